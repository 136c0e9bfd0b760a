"""The statistic sets of one call: mean, variance and denominator of each, and whole sets to look at closely.

Of sets with many places (large images) every n-th row is read: some two thousand elements give a standard deviation to
2 %. Whether a set is constant is never guessed: one that looks so is read whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from normscope.doctor.set_moments import measured
from normscope.reference.moments import denominator
from normscope.spec import PatternError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.spec import BoundSpec, NormSpec

    Array = NDArray[np.float64]

AT_ONCE = 1 << 20
"""elements of the sets that are read whole together"""
ENOUGH = 2048
"""elements of a set that are read"""


@dataclass(frozen=True, eq=False)
class Sets:
    """The statistic sets of one tensor. Arrays have one entry a set, kept axes in row-major order.

    Moments are computed when first asked for: stored statistics normalize without them.
    """

    spec: NormSpec
    bound: BoundSpec
    eps: float
    x: torch.Tensor
    """the input, its axes split as the spec names them"""

    @cached_property
    def _moments(self) -> tuple[Array, Array, NDArray[np.bool_]]:
        erased = [i for i, axis in enumerate(self.bound.axes) if not axis.kept]
        thin = _thinned(self.x, self.bound)
        mean, variance, constant = measured(thin, erased)
        if thin is not self.x:
            suspects = np.flatnonzero(constant)
            at_once = max(1, AT_ONCE // self.size)
            for some in (suspects[i : i + at_once] for i in range(0, len(suspects), at_once)):
                rows = self.take(self.x, some)
                mean[some], variance[some] = rows.mean(1), rows.var(1)
                constant[some] = rows.max(1) == rows.min(1)
            variance[constant] = 0.0
        return mean, variance, constant

    @property
    def mean(self) -> Array:
        return self._moments[0]

    @property
    def variance(self) -> Array:
        """biased, about the mean; exactly 0 where the set is constant"""
        return self._moments[1]

    @property
    def constant(self) -> NDArray[np.bool_]:
        """all elements of the set are the same number"""
        return self._moments[2]

    @property
    def size(self) -> int:
        """elements per set"""
        return self.bound.set_size

    @property
    def finite(self) -> NDArray[np.bool_]:
        known: NDArray[np.bool_] = np.isfinite(self.variance) & np.isfinite(self.mean)
        return known

    @property
    def dead(self) -> NDArray[np.bool_]:
        """Sets without anything to normalize: constant, or all zeros where no mean is subtracted."""
        if self.spec.center:
            return self.constant
        zero: NDArray[np.bool_] = self.constant & (self.mean == 0)
        return zero

    @property
    def under_root(self) -> Array:
        """What the spec takes the root of: variance, mean square or sum of squares."""
        if self.spec.scale == "std":
            left = self.size - self.spec.correction
            return self.variance * (self.size / left if left > 0 else np.nan)
        mean_square = self.variance if self.spec.center else self.variance + self.mean**2
        return mean_square if self.spec.scale == "rms" else mean_square * self.size

    @property
    def denominator(self) -> Array:
        return denominators(self.under_root, self.spec, self.eps)

    @property
    def amplification(self) -> Array:
        """|mean| / denominator: how much of the output one relative error of the input or of its mean becomes."""
        if not self.spec.center:
            return np.zeros_like(self.mean)
        with np.errstate(all="ignore"):
            return np.abs(self.mean) / self.denominator

    def label(self, index: int) -> str:
        """The set's place on the kept axes, such as ``b=3, c=17``."""
        kept = [axis for axis in self.bound.axes if axis.kept]
        places = np.unravel_index(index, [axis.size for axis in kept]) if kept else ()
        return ", ".join(
            f"{axis.name.replace('...', 'axis ')}={int(place)}"
            for axis, place in zip(kept, places, strict=True)
        )

    def valid(self, mask: torch.Tensor | None) -> NDArray[np.bool_]:
        """Which sets lie at valid positions of a (B, L) mask; all where the sets do not lie on its two axes."""
        everywhere: NDArray[np.bool_] = np.ones(len(self.mean), dtype=bool)
        kept = [axis for axis in self.bound.axes if axis.kept]
        at = {axis.dim: i for i, axis in enumerate(kept)}
        if mask is None or not {0, 1} <= set(at) or len(at) != len(kept):
            return everywhere
        if (kept[at[0]].size, kept[at[1]].size) != tuple(mask.shape):
            return everywhere
        places = np.unravel_index(np.arange(len(everywhere)), [axis.size for axis in kept])
        valid: NDArray[np.bool_] = mask.cpu().numpy()[places[at[0]], places[at[1]]]
        return valid

    def take(self, tensor: torch.Tensor, sets: NDArray[np.int64], *, thinned: bool = False) -> Array:
        """Whole sets of a tensor of the input's shape: float64 of shape (len(sets), size); some places if thinned."""
        kept = [i for i, axis in enumerate(self.bound.axes) if axis.kept]
        erased = [i for i, axis in enumerate(self.bound.axes) if not axis.kept]
        view = tensor.detach().reshape(self.x.shape)
        view = (_thinned(view, self.bound) if thinned else view).permute(*kept, *erased)
        if kept:
            places = np.unravel_index(sets, [self.bound.axes[i].size for i in kept])
            view = view[tuple(torch.from_numpy(place).to(view.device) for place in places)]
        rows: Array = view.reshape(len(sets), -1).double().cpu().numpy()
        return rows

    def spread(self, values: Array, axes: str, sets: NDArray[np.int64]) -> Array:
        """A weight or bias on ``axes`` as the elements of some sets see it, broadcastable to (len(sets), size)."""
        sizes = {axis.name: axis.size for axis in self.bound.axes}
        names: list[str] = []
        for name in axes.replace("(", " ").replace(")", " ").split():
            names += [a for a in sizes if a.startswith("...")] if name == "..." else [name]
        table = values.reshape([sizes[name] for name in names])
        kept = [axis.name for axis in self.bound.axes if axis.kept]
        erased = [axis.name for axis in self.bound.axes if not axis.kept]
        order = [name for name in (*kept, *erased) if name in names]
        table = table.transpose([names.index(name) for name in order])
        if kept:
            places = dict(zip(kept, np.unravel_index(sets, [sizes[name] for name in kept]), strict=True))
            on_kept = tuple(places[name] for name in order if name in places)
            table = table[on_kept] if on_kept else table[None]
        else:
            table = table[None]
        if not set(names) & set(erased):
            column: Array = table.reshape(-1, 1)
            return column
        inner = [sizes[name] if name in names else 1 for name in erased]
        table = np.broadcast_to(table.reshape(-1, *inner), (len(table), *(sizes[name] for name in erased)))
        rows: Array = table.reshape(len(table), -1)
        return rows

    def gain(self, weight: torch.Tensor | None, sets: NDArray[np.int64]) -> Array:
        """(offset + weight) * gain at the elements of some sets, broadcastable to (len(sets), size)."""
        if weight is None or self.spec.weight is None:
            return np.full((1, 1), self.spec.gain)
        values: Array = weight.detach().double().cpu().numpy()
        return (self.spec.weight_offset + self.spread(values, self.spec.weight, sets)) * self.spec.gain

    def bias(self, bias: torch.Tensor | None, sets: NDArray[np.int64]) -> Array:
        """The bias at the elements of some sets, broadcastable to (len(sets), size)."""
        if bias is None or self.spec.bias is None:
            return np.zeros((1, 1))
        return self.spread(bias.detach().double().cpu().numpy(), self.spec.bias, sets)


def denominators(under_root: Array, spec: NormSpec, eps: float) -> Array:
    """The denominator where ``under_root`` is the variance, mean square or sum of squares."""
    with np.errstate(all="ignore"):
        return denominator(under_root, eps, spec.eps_at)[0]


def working_dtype(spec: NormSpec, given: torch.dtype) -> torch.dtype:
    """The dtype the statistics are computed in, for an input of dtype ``given``."""
    compute = spec.cast.compute
    if compute is None:
        return torch.promote_types(given, torch.float32)
    named: torch.dtype = given if compute == "input" else getattr(torch, compute)
    return named


def working_eps(spec: NormSpec, given: torch.dtype) -> float:
    """The spec's eps; the machine epsilon of the computing dtype where the spec has None."""
    return float(torch.finfo(working_dtype(spec, given)).eps) if spec.eps is None else float(spec.eps)


def sets_of(event: Event) -> Sets | str:
    """The sets of this call's input, or why there is nothing to measure. Made once, shared by all probes."""
    if "sets" not in event.extra:
        event.extra["sets"] = _sets(event)
    found: Sets | str = event.extra["sets"]
    return found


def _sets(event: Event) -> Sets | str:
    x, spec = event.input.detach(), event.spec
    if spec.scale not in ("std", "rms", "l2"):
        return f"{spec.scale} whitening has no scalar denominator"
    if not x.is_floating_point() or x.numel() == 0:
        return "its input holds no real numbers"
    try:
        bound = spec.bind(tuple(x.shape))
    except PatternError as error:
        return str(error)
    if bound.ragged:
        return "its virtual batches differ in size"
    for kind, shape in (("weight", bound.weight_shape), ("bias", bound.bias_shape)):
        held = event.tensors.get(kind)
        if held is not None and shape is not None and held.numel() != prod(shape):
            return f"its {kind} of shape {tuple(held.shape)} is not the {shape} of its specification"
    return Sets(spec, bound, working_eps(spec, x.dtype), x.reshape(bound.shape))


def _thinned(x: torch.Tensor, bound: BoundSpec) -> torch.Tensor:
    """Every n-th place along the axes of space, which are erased and unnamed; samples and channels stay whole."""
    surplus = bound.set_size // ENOUGH
    steps: list[slice] = []
    for axis in bound.axes:
        free = not axis.kept and axis.name.startswith("...") and axis.dim != bound.sample_dim
        # an odd step does not fall in with patterns of 2, 4 or 8 pixels
        step = min(surplus, axis.size) - 1 | 1 if free and surplus > 2 else 1
        surplus //= step
        steps.append(slice(None, None, step))
    return x[tuple(steps)] if any(s.step > 1 for s in steps) else x
