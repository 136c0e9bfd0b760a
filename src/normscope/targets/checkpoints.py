"""State dicts from files, never through a pickle that can run code."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from normscope.errors import BadTarget

NESTS = ("state_dict", "model", "model_state_dict")


def load_into(model: torch.nn.Module, path: Path) -> None:
    """Load a state dict into the model, all keys matching.

    Raises:
        BadTarget: for a file that cannot be read safely, or keys and shapes that do not match.
    """
    state = read(path)
    for nest in NESTS:
        if isinstance(state.get(nest), Mapping):
            state = state[nest]
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    for prefix in ("module.", "_orig_mod."):
        if tensors and all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise BadTarget(f"{path} does not fit the model: {error}") from error


def read(path: Path) -> dict[str, Any]:
    """What a ``.safetensors``, ``.pt`` or ``.pth`` file holds, on the CPU.

    Raises:
        BadTarget: for a missing, broken or unsafe file.
    """
    if not path.is_file():
        raise BadTarget(f"there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(str(path)))
        value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadTarget(
            f"{path} cannot be read as plain tensors ({_first_line(error)}). Files that run code are never "
            "loaded: save it again as safetensors, or with torch.save(model.state_dict(), ...)"
        ) from error
    except Exception as error:  # a broken pickle stream can fail in any way; none of it ran code
        raise BadTarget(f"{path} is broken or of another format: {_first_line(error)}") from error
    if not isinstance(value, Mapping):
        return {"": value}
    return dict(value)


def _first_line(error: Exception) -> str:
    """Why, in one line: torch's message goes on with advice to switch the safety off."""
    text = str(error)
    for marker in ("Unsupported global: GLOBAL ", "Unsupported class "):
        if marker in text:
            return f"it asks for {text.split(marker, 1)[1].split()[0]}"
    lines = [line for line in text.strip().splitlines() if line]
    return lines[0][:200] if lines else type(error).__name__
