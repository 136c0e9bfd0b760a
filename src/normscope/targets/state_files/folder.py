"""A folder as transformers writes it: ``config.json``, and the weights in one file or in shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normscope.errors import BadTarget
from normscope.targets.state_files.bounded import JSON_BYTES, exactly, opened, parsed

USUAL = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
CONFIG = "config.json"


def has_weights(folder: Path) -> bool:
    """Whether there is a file in it that could be the weights."""
    return any((folder / name).exists() for name in USUAL) or any(folder.glob("*.safetensors"))


def weights_of(folder: Path) -> Path:
    """The folder's weights: the usual names first, else its only ``.safetensors`` file.

    Raises:
        BadTarget: there are none, or several to choose from.
    """
    for name in USUAL:
        if (folder / name).exists():
            return folder / name
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    if not others:
        beside = sorted(
            file.name for file in folder.iterdir() if file.suffix in (".pt", ".pth", ".ckpt", ".bin")
        )
        advice = f"name one of its files: {', '.join(beside[:4])}" if beside else "name a file of weights"
        raise BadTarget(
            f"the folder {folder} holds no {CONFIG} with weights and no .safetensors file; {advice}"
        )
    found = ", ".join(file.name for file in others[:4])
    raise BadTarget(
        f"the folder {folder} holds none of {', '.join(USUAL)}, and not one other .safetensors file ({found}); "
        "name the file itself"
    )


def config_of(folder: Path) -> tuple[Mapping[str, Any] | None, list[str]]:
    """What ``config.json`` says; None where there is none, or no object. A broken one costs a note, not the check."""
    path = folder / CONFIG
    if not path.exists():
        return None, [f"{folder} has no {CONFIG}, which would name eps"]
    try:
        with opened(path) as (file, size):
            if size > JSON_BYTES:
                raise BadTarget(f"{path} has {size} bytes")
            content = parsed(exactly(file, 0, size, path), str(path))
    except BadTarget as error:
        return None, [f"its eps is not known: {error}"]
    return (content, []) if isinstance(content, dict) else (None, [f"{path} is no object of settings"])
