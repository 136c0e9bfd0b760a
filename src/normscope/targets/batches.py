"""A batch from a file, or random input of a given shape."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normscope.errors import BadInput, told
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
    suffix = path.suffix.lower()
    if suffix in (".npz", ".npy"):
        content = _numpy(path)
    elif suffix in (".pt", ".pth", ".safetensors"):
        content = checkpoints.read(path)
    else:
        raise BadInput(
            f"{path}: the batch must be a .npz, .npy, .pt or .safetensors file, got {path.suffix or 'no suffix'}"
        )
    if set(content) == {""}:
        value = content[""]
        if isinstance(value, (tuple, list)) and value:
            value = tuple(value)
        if not isinstance(value, (torch.Tensor, tuple)):
            held = "an empty list" if isinstance(value, list) else f"an object of type {type(value).__name__}"
            raise BadInput(
                f"{path} holds {held}; the batch must be a tensor, a tuple of them, or a dict of them"
            )
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
    dtype = getattr(torch, rest[0], None) if rest else torch.float32
    if not isinstance(dtype, torch.dtype) or len(rest) > 2:
        raise BadInput(f"cannot read the type in {spec!r}: {form}")
    real = dtype.is_floating_point or dtype.is_complex
    if len(rest) == 2 and real:
        raise BadInput(f"{rest[0]} numbers in {spec!r} have no range, only integers do: {form}")
    generator = torch.Generator().manual_seed(0)
    try:
        if real:
            return torch.randn(shape, generator=generator).to(dtype)
        high = int(rest[1]) if len(rest) == 2 else 2
        numbers = torch.randint(high, shape, generator=generator)
        if dtype is not torch.bool and high - 1 > torch.iinfo(dtype).max:
            raise BadInput(f"{rest[0]} cannot hold integers up to {high - 1}: {form}")
        return numbers.to(dtype)
    except (ValueError, RuntimeError, TypeError, MemoryError) as error:
        raise BadInput(f"cannot make random input {spec!r}: {told(error)}") from error


def _numpy(path: Path) -> dict[Any, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's advice on files of old formats
            loaded = np.load(path, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {"": _tensor(loaded)}
            with loaded:
                return {name: _tensor(loaded[name]) for name in loaded.files}
    except MemoryError as error:
        raise BadInput(
            f"{path} claims more data than fits into memory; is it broken? ({told(error)})"
        ) from error
    except Exception as error:  # a broken file can fail in any way; nothing in it is run
        if "allow_pickle" in str(error):
            raise BadInput(
                f"{path} holds no plain arrays (or pickled objects, which could run code); save it with numpy.save"
            ) from error
        raise BadInput(f"{path} cannot be read as NumPy arrays: {told(error)}") from error


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.ascontiguousarray(native))


def _named(path: Path, content: dict[Any, Any]) -> Batch:
    odd = next((name for name in content if not isinstance(name, str)), None)
    if odd is not None:
        raise BadInput(f"{path} holds a value named {odd!r}; names must be strings: inputs, targets, mask")
    nothing = [name for name, value in content.items() if value is None]
    if nothing:
        raise BadInput(f"{path} holds None under {' and '.join(nothing)}; leave that out")

    def take(names: tuple[str, ...]) -> Any:
        found = [name for name in names if name in content]
        if len(found) > 1:
            raise BadInput(f"{path} holds both {' and '.join(found)}; keep one")
        return content.pop(found[0]) if found else None

    content = dict(content)
    inputs, targets, mask = take(INPUTS), take(TARGETS), take((MASK,))
    if inputs is None:
        if not content:
            raise BadInput(f"{path} holds no inputs; name them inputs, or as the model's keyword arguments")
        inputs = content.popitem()[1] if len(content) == 1 else content
    elif content:
        raise BadInput(
            f"{path} holds {', '.join(content)} beside the inputs; name all as keyword arguments instead"
        )
    return Batch(inputs, targets, mask)
