"""A batch from a file, or random input of a given shape."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normscope.errors import BadInput
from normscope.targets import checkpoints

INPUTS, TARGETS, MASK = ("inputs", "input", "x"), ("targets", "target", "y", "labels"), "mask"


@dataclass
class Batch:
    inputs: Any
    targets: Any = None
    mask: Any = None


def read(path: Path) -> Batch:
    """A batch of a ``.npz``, ``.npy``, ``.pt`` or ``.safetensors`` file.

    Among named arrays, ``inputs`` (or ``input``, ``x``) is passed as ``model(x)``, ``targets`` (or ``target``, ``y``,
    ``labels``) goes to the loss, ``mask`` is the padding mask; other names are the model's keyword arguments.

    Raises:
        BadInput: the file is missing, broken, of another format, or would run code.
    """
    if not path.is_file():
        raise BadInput(f"there is no file {path}")
    if path.suffix in (".npz", ".npy"):
        content = _numpy(path)
    elif path.suffix in (".pt", ".pth", ".safetensors"):
        content = checkpoints.read(path)
    else:
        raise BadInput(
            f"{path}: the batch must be a .npz, .npy, .pt or .safetensors file, got {path.suffix or 'no suffix'}"
        )
    if set(content) == {""}:
        value = content[""]
        if isinstance(value, (tuple, list)):
            value = tuple(value)
        return Batch(value)
    return _named(path, content)


def random(spec: str) -> torch.Tensor:
    """Standard normal numbers of shape ``8x3x224x224``, or integers below n as ``2x16:int64:n``.

    Raises:
        BadInput: for anything else.
    """
    form = "write sizes with x between them, 8x3x224x224; for token ids add type and size, 2x16:int64:30522"
    shape_text, *rest = spec.split(":")
    try:
        shape = [int(size) for size in shape_text.lower().split("x")]
    except ValueError:
        raise BadInput(f"cannot read the shape {spec!r}: {form}") from None
    if not shape or min(shape) < 1:
        raise BadInput(f"every size of {spec!r} must be at least 1: {form}")
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, rest[0], None) if rest else torch.float32
    if not isinstance(dtype, torch.dtype) or len(rest) > 2:
        raise BadInput(f"cannot read the type in {spec!r}: {form}")
    try:
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(dtype)
        high = int(rest[1]) if len(rest) == 2 else 2
        return torch.randint(high, shape, generator=generator).to(dtype)
    except (ValueError, RuntimeError) as error:
        raise BadInput(f"cannot make random input {spec!r}: {error}") from error


def _numpy(path: Path) -> dict[str, Any]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": torch.from_numpy(np.ascontiguousarray(loaded))}
        with loaded:
            return {name: torch.from_numpy(np.ascontiguousarray(loaded[name])) for name in loaded.files}
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        if "allow_pickle" in str(error):
            raise BadInput(
                f"{path} holds no plain arrays (or pickled objects, which could run code); save it with numpy.save"
            ) from error
        raise BadInput(f"{path} cannot be read as NumPy arrays: {error}") from error


def _named(path: Path, content: dict[str, Any]) -> Batch:
    def take(names: tuple[str, ...]) -> Any:
        found = [name for name in names if name in content]
        if len(found) > 1:
            raise BadInput(f"{path} holds both {' and '.join(found)}; keep one")
        return content.pop(found[0]) if found else None

    content = dict(content)
    inputs, targets = take(INPUTS), take(TARGETS)
    mask = take((MASK,))
    if inputs is None:
        if not content:
            raise BadInput(f"{path} holds no inputs; name them inputs, or as the model's keyword arguments")
        inputs = content.popitem()[1] if len(content) == 1 else content
    elif content:
        raise BadInput(
            f"{path} holds {', '.join(content)} beside the inputs; name all as keyword arguments instead"
        )
    return Batch(inputs, targets, mask)
