"""What a caller hands in, checked and flattened: values, mask, gain and bias of every element."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from normscope.reference.axes import Axes, Labels, locate
from normscope.reference.moments import Array, Flags, total

_PRECISION = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


@dataclass(frozen=True)
class Inputs:
    """One input of one spec; all arrays hold one number an element, in row-major order."""

    spec: Any
    axes: Axes
    x: Array
    """0 where the mask is False, so that nothing under it, NaN included, can leak"""
    valid: Flags
    eps: float

    @property
    def labels(self) -> Labels:
        """Number of the statistic set of every element."""
        return self.axes.label(self.axes.kept)

    @property
    def sets(self) -> int:
        return math.prod(self.kept_shape)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        return self.axes.extent([(name,) for name in self.axes.kept])


def read(x: ArrayLike, spec: Any, mask: ArrayLike | None) -> Inputs:
    """The input in float64, and eps as a number."""
    given = np.asarray(x)
    if given.dtype.kind == "c":
        raise ValueError(
            f"inputs are real; got {given.dtype}. Normalize real and imaginary parts, or the modulus"
        )
    axes = locate(spec, given.shape)
    eps = _machine_epsilon(spec.cast.compute, given.dtype.name) if spec.eps is None else float(spec.eps)
    valid = _flags(mask, given.shape)
    return Inputs(spec, axes, np.where(valid, given.astype(np.float64).ravel(), 0.0), valid, eps)


def _machine_epsilon(compute: str | None, dtype: str) -> float:
    """``eps=None``: the gap between 1 and the next number of the dtype that the spec's layer would compute in.

    By PyTorch's rule (``compute=None``) half types compute in float32. What is no floating type is read as float64.
    """
    own = dtype if dtype in _PRECISION else "float64"
    if compute is None:
        compute = "float32" if own in ("float16", "bfloat16") else own
    return _PRECISION[own if compute == "input" else compute]


def _flags(mask: ArrayLike | None, shape: tuple[int, ...]) -> Flags:
    if mask is None:
        return np.ones(math.prod(shape), dtype=np.bool_)
    given = np.asarray(mask)
    if given.dtype != np.bool_:
        raise ValueError(
            f"a mask is boolean, True where an element counts; got {given.dtype}. Compare first: lengths > position"
        )
    try:
        return np.broadcast_to(given, shape).ravel()
    except ValueError:
        raise ValueError(
            f"a mask broadcasts to the input's shape {shape}; got {given.shape}. Add axes of size 1 on the right"
        ) from None


@dataclass(frozen=True)
class Parameter:
    """A weight or a bias, and the entry of it that each element uses."""

    value: Array
    labels: Labels

    @property
    def spread(self) -> Array:
        """The value at every element."""
        return self.value.ravel()[self.labels]

    def collect(self, gradient: Array) -> Array:
        """Sum of an elementwise gradient over the elements that share an entry."""
        return total(gradient, self.labels, self.value.size).reshape(self.value.shape)


@dataclass(frozen=True)
class Affine:
    """y = (offset + weight) * gain * x_hat + bias; without a weight the first factor is 1."""

    weight: Parameter | None
    bias: Parameter | None
    gain: float
    factor: Array
    """(offset + weight) * gain at every element"""

    def apply(self, value: Array) -> Array:
        y = self.factor * value
        return y if self.bias is None else y + self.bias.spread


def affine(inputs: Inputs, weight: ArrayLike | None, bias: ArrayLike | None) -> Affine:
    """Gain and bias of every element. Raises ValueError where a parameter's shape is not what the spec says."""
    spec, gain = inputs.spec, float(inputs.spec.gain)
    w = _parameter("weight", weight, spec.weight, inputs.axes)
    b = _parameter("bias", bias, spec.bias, inputs.axes)
    factor = np.full(inputs.x.size, gain) if w is None else (float(spec.weight_offset) + w.spread) * gain
    return Affine(w, b, gain, factor)


def _parameter(kind: str, value: ArrayLike | None, pattern: str | None, axes: Axes) -> Parameter | None:
    if value is None:
        return None
    array = np.asarray(value, dtype=np.float64)
    if pattern is None:
        raise ValueError(
            f"a spec without {kind} takes none; got one of shape {array.shape}. Name the axes it lives on in "
            f"spec.{kind}"
        )
    groups = axes.names(pattern)
    shape = axes.extent(groups)
    if array.shape != shape and not (shape == () and array.size == 1):
        raise ValueError(
            f"the {kind} on {pattern!r} of an input of shape {axes.shape} has shape {shape}; got {array.shape}"
        )
    return Parameter(array, axes.label(name for group in groups for name in group))
