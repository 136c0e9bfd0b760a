"""Functions of torch tensors, and torch modules as they are."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from normscope.identify.box import Array, Box, Boxed, is_shape, name_of, roundoff_of

TENSORS = (
    "it was called with tensors, as the example is one, and does otherwise with arrays (Tensor.var and Tensor.std are "
    "unbiased, those of NumPy are not). An array as the example calls it with arrays"
)


def adapt(fn: Any, example: Any) -> Box | None:
    """A function or module called with tensors of the example's dtype and device.

    A shape means float64 for a function, and a module's own dtype and device for a module. A function is called
    with a tensor for a shape only where NumPy arrays do not suit it.
    """
    torch = sys.modules.get("torch")
    if torch is None or not callable(fn):
        return None
    module = isinstance(fn, torch.nn.Module)
    given = isinstance(example, torch.Tensor) and inspect.isfunction(fn)
    if is_shape(example):
        shape = tuple(int(n) for n in example)
        if not module and _takes_arrays(fn, shape):
            return None
        like = next((p for p in fn.parameters() if p.is_floating_point()), None) if module else None
        example = torch.zeros(shape, dtype=torch.float64) if like is None else like.new_zeros(shape).detach()
    if isinstance(example, np.ndarray) and module:
        example = torch.as_tensor(example)
    if not isinstance(example, torch.Tensor):
        return None
    dtype, device = example.dtype, example.device
    roundoff = roundoff_of(str(dtype).removeprefix("torch."))
    function = _from_one_state(fn) if module else fn

    def call(x: Array) -> Any:
        with torch.no_grad():
            y = function(torch.tensor(x, dtype=dtype, device=device))
        if not isinstance(y, torch.Tensor):
            return y
        y = y.detach().resolve_conj().cpu()
        return (y if y.is_complex() else y.double()).numpy()

    name = f"{name_of(fn)}, on torch {str(dtype).removeprefix('torch.')}"
    return Boxed(name, roundoff, call, TENSORS if given and _minds_arrays(fn, example) else "")


def _minds_arrays(fn: Callable[..., Any], example: Any) -> bool:
    """Whether the function takes arrays too, and gives another result for them than for tensors, which is no chance."""
    x = np.linspace(-1.0, 1.0, example.numel()).reshape(example.shape)
    if not _takes_arrays(fn, x.shape):
        return False

    def with_tensors() -> Array:
        return np.asarray(fn(example.new_tensor(x, dtype=float)).detach().cpu(), dtype=float)

    try:
        with np.errstate(all="ignore"):
            one, array, again = with_tensors(), fn(x), with_tensors()
            return np.array_equal(one, again, equal_nan=True) and not np.allclose(one, array, equal_nan=True)
    except (Exception, SystemExit):
        return False


def _takes_arrays(fn: Callable[..., Any], shape: tuple[int, ...]) -> bool:
    """Whether the function turns a NumPy array of this shape into a NumPy array."""
    try:
        with np.errstate(all="ignore"):
            return isinstance(fn(np.linspace(-1.0, 1.0, int(np.prod(shape))).reshape(shape)), np.ndarray)
    except (Exception, SystemExit):
        return False


def _from_one_state(module: Any) -> Callable[[Any], Any]:
    """A copy of the module whose tensors are put back before each call; the module itself is never called."""
    twin = copy.deepcopy(module)
    saved = [(tensor, tensor.detach().clone()) for tensor in (*twin.buffers(), *twin.parameters())]

    def call(x: Any) -> Any:
        for tensor, value in saved:
            tensor.copy_(value)
        return twin(x)

    return call
