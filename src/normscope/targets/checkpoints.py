"""State dicts from files, never through a pickle that can run code."""

from __future__ import annotations

import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from normscope.doctor.checkpoint import WRAPPERS, of_a_norm, unmatched
from normscope.doctor.wording import plural
from normscope.errors import BadTarget, told
from normscope.targets.failures import blamed
from normscope.targets.misfit import misfit, other_shapes
from normscope.targets.state_files import open_state
from normscope.targets.state_files.shards import INDEX

NESTS = ("state_dict", "model", "model_state_dict")


def load_into(
    model: torch.nn.Module, path: Path
) -> tuple[dict[str, torch.Tensor], Mapping[str, Any] | None, list[str]]:
    """Load a state dict, of a file or a transformers folder, into the model. All keys must match, but those of norms:
    what becomes of them a rule tells.

    Returns:
        the tensors, by name; what the folder's ``config.json`` says, or None; and what was done to make them fit, in
        words.

    Raises:
        BadTarget: for a file that cannot be read safely, or keys and shapes that do not match.
    """
    notes: list[str] = []
    config = None
    if path.is_dir() or path.name.lower().endswith(INDEX):
        stored = open_state(path)
        state: dict[Any, Any] = {name: tensor.read() for name, tensor in stored.tensors.items()}
        config, notes = stored.config, list(stored.notes)
    else:
        state = read(path)
    for nest in NESTS:
        if isinstance(state.get(nest), Mapping):
            state = state[nest]
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise BadTarget(
            f"{path} holds no named tensors; it must hold a state dict, as model.state_dict() gives"
        )
    odd = next((key for key in tensors if not isinstance(key, str)), None)
    if odd is not None:
        raise BadTarget(f"{path} holds a tensor named {odd!r}; a state dict names parameters by strings")
    why = ""
    with blamed(f"{path} does not fit the model: loading it"):
        expected = model.state_dict()
        for prefix in WRAPPERS:
            if all(key.startswith(prefix) and key not in expected for key in tensors):
                tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
                notes.append(f"{path}: took the prefix {prefix!r} off every key")
        try:
            model.load_state_dict(tensors | _tied(model, tensors))
        except RuntimeError:
            odd_ones = unmatched(model, tensors)
            fits = any(name in tensors for name in expected) and not other_shapes(expected, tensors)
            if fits and odd_ones and all(of_a_norm(model, name) for name in odd_ones):
                model.load_state_dict(tensors, strict=False)
                found = plural(len(odd_ones), "name")
                notes.append(f"{path}: {found} of norms did not match and stayed as they were (see NS313)")
            elif not (why := misfit(model, tensors | _tied(model, tensors))):
                raise
    if why:
        raise BadTarget(f"{path} does not fit the model:\n{why}")
    return tensors, config, notes


def _tied(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What stands under one of its names only: a parameter that a model has twice is written once."""
    held: dict[int, torch.Tensor] = {}
    names = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in names:
        if name in tensors:
            held.setdefault(id(parameter), tensors[name])
    return {name: held[id(p)] for name, p in names if name not in tensors and id(p) in held}


def read(path: Path) -> dict[Any, Any]:
    """What a ``.safetensors``, ``.pt`` or ``.pth`` file holds, on the CPU; under "" where it is no mapping.

    Raises:
        BadTarget: for a missing, broken or unsafe file.
    """
    if not path.is_file():
        raise BadTarget(f"there is no file {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on files of old formats
            if path.suffix.lower() == ".safetensors":
                return dict(load_file(str(path)))
            value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle stream can fail in any way; none of it ran code
        reason = _refusal(path, str(error))
        if not reason and not isinstance(error, pickle.UnpicklingError):
            raise BadTarget(f"{path} is broken or of another format: {told(error)}") from error
        raise BadTarget(
            f"{path} cannot be read as plain tensors ({reason or told(error)}). Files that run code "
            "are never loaded: save it again as safetensors, or with torch.save(model.state_dict(), ...)"
        ) from None  # its advice would show in a traceback
    return dict(value) if isinstance(value, Mapping) else {"": value}


ASKED_FOR = (
    r"GLOBAL ([\w.]+)",
    r"unrecognized function ([^\n\x1b]+)",
    r"but got ([^\n\x1b]+)",
    r"([\w.]+)`* must be imported",
)
"""how the loader names the class or function that it does not load"""


def _refusal(path: Path, message: str) -> str:
    """Why the loader refused, in words of our own: its message goes on with advice to switch the safety off."""
    if "TorchScript" in message:
        return "it is a TorchScript archive, which is code"
    if "legacy .tar format" in message:
        return "it has the format of PyTorch before 0.1.10"
    for pattern in ASKED_FOR:
        if found := re.search(pattern, message):
            return f"it asks for {found[1]}"
    if "weights_only" not in message:
        return ""
    name = _first_global(path)
    return f"it asks for {name}" if name else "it is broken, or does what plain tensors do not need"


def _first_global(path: Path) -> str:
    """The first name that a bare pickle looks up; the loader knows only the pickles of ``torch.save``."""
    strings: list[str] = []
    if zipfile.is_zipfile(path):
        return ""
    try:
        with path.open("rb") as file:
            for operation, value, _ in pickletools.genops(file):
                if operation.name == "STACK_GLOBAL":
                    return re.sub(r"[^\w.]", "?", ".".join(strings[-2:]))
                if isinstance(value, str):
                    strings.append(value)
    except Exception:  # read up to where it is broken; nothing is run
        pass
    return ""
