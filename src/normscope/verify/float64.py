"""PyTorch's layers in float64 on small tensors, and what the checks measure on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from normscope.reading import read

Array = NDArray[np.float64]
ULP = 2.0**-52


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, seed: int) -> torch.Tensor:
    """Standard normal numbers from a generator of their own."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def numpy(value: torch.Tensor) -> Array:
    return value.detach().to(torch.float64).cpu().numpy()


def array(value: Any) -> Array:
    """A tensor, an array or nested lists as a float64 array."""
    return numpy(value) if isinstance(value, torch.Tensor) else np.asarray(value, dtype=np.float64)


def gap(one: Any, other: Any) -> float:
    """Largest absolute difference."""
    return float(np.max(np.abs(array(one) - array(other))))


def jacobian(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Array:
    """dy/dx by autograd, of shape (*y.shape, *x.shape)."""
    result: torch.Tensor = torch.autograd.functional.jacobian(function, x)  # type: ignore[no-untyped-call]
    return numpy(result)


def differences(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, step: float) -> Array:
    """dy/dx by central differences with ``step``, of the same shape."""
    columns = []
    for i in range(x.numel()):
        move = torch.zeros_like(x)
        move.view(-1)[i] = step
        columns.append(numpy(function(x + move) - function(x - move)) / (2 * step))
    return np.stack(columns, axis=-1).reshape(*columns[0].shape, *x.shape)


def convention(layer: torch.nn.Module, ndim: int | None = None) -> str:
    """Which layer, and its specification in words."""
    reading = read(layer, input_ndim=ndim)
    return f"{reading.type_name}: {reading.spec}"
