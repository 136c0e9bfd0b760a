"""Stored statistics: the entries that elements read, and how a batch moves them.

run <- (1 - m) run + m batch, with m the momentum (``average="ema"``) or 1 / (number of updates) (``"cumulative"``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from normscope.reference.axes import Axes, Labels
from normscope.reference.inputs import Inputs, read
from normscope.reference.moments import Array, Flags, Moments, moments
from normscope.reference.whitening import METHODS, covariances, group_names, whitened_size, whitening_matrices


@dataclass
class RunningState:
    """Stored mean and variance of one site, and the number of updates that they saw.

    Any object with these three attributes serves as well; an update returns one of the type that it was given.
    """

    mean: Any
    var: Any
    batches: int = 0


@dataclass(frozen=True)
class State:
    """Stored statistics in float64, and the entry that each element reads."""

    mean: Array
    mean_labels: Labels
    var: Array
    """one number an entry; where the spec whitens one matrix, shape (entries, k, k)"""
    var_labels: Labels


def over(spec: Any, axes: Axes) -> list[tuple[str, ...]]:
    """The axes that the state lives on: ``Running.over``, else the kept axes that hold no samples."""
    if spec.running is None:
        raise ValueError("a spec without running statistics has no state; set spec.running to a Running")
    if spec.running.over is None:
        return [(name,) for name in axes.kept if name not in ("b", "v", spec.sample_axis)]
    groups = axes.names(spec.running.over)
    for name in (name for group in groups for name in group):
        if name not in axes.kept:
            raise ValueError(
                f"running statistics live on kept axes; got over={spec.running.over!r}, and {name!r} is erased in "
                f"{axes.pattern!r}"
            )
    return groups


def read_state(running: Any, inputs: Inputs) -> State:
    """Read a state. Raises ValueError where there is none, or where its shape is not that of the axes it lives on."""
    spec, axes = inputs.spec, inputs.axes
    groups = over(spec, axes)
    names = tuple(name for group in groups for name in group)
    shape = wide = axes.extent(groups)
    var_names: tuple[str, ...] = names
    entry: tuple[int, ...] = ()
    if spec.scale in METHODS:
        var_names, k = tuple(name for name in names if name in group_names(inputs)), whitened_size(inputs)
        entry = (k, k)
        joint = axes.extent(axes.names(spec.whiten))
        wide = (*axes.extent((name,) for name in var_names), *joint, *joint)
    if running is None:
        raise ValueError(
            "normalizing by stored statistics needs them; got none. Pass running=RunningState(mean, var), with a mean "
            f"of shape {shape}"
        )
    mean, var = np.asarray(running.mean, dtype=np.float64), np.asarray(running.var, dtype=np.float64)
    for name, value, wanted in (("mean", mean, shape), ("var", var, wide)):
        if value.shape != wanted:
            raise ValueError(
                f"running.{name} has shape {wanted} under {axes.pattern!r} on an input of shape {axes.shape}; got "
                f"{value.shape}"
            )
    return State(mean.ravel(), axes.label(names), var.reshape(-1, *entry), axes.label(var_names))


@np.errstate(all="ignore")  # NaN and infinities in x are passed on to the state, as in PyTorch
def update_running(running: Any, x: ArrayLike, spec: Any, mask: ArrayLike | None = None) -> Any:
    """The state after one training batch; ``running`` itself is not changed.

    The stored variance is the sum of squares about the mean over M - correction (``Running.correction``: 1 in PyTorch,
    0 in ONNX, Keras and Flax). Sets that share an entry are averaged, as instance norm does over its samples; virtual
    batches (``v``) update one after the other, in order. Under ``Running.averages="denominator"`` it is sqrt(var + eps)
    that is averaged, and its square less eps that is stored. Sets without a valid element are left out.

    Arguments:
        running: an object with ``mean``, ``var`` and ``batches``.
        x: input of any shape that the spec fits.
        spec: a specification with ``running``.
        mask: boolean, broadcastable to ``x``; False elements do not count.

    Returns an object of the type of ``running``, with float64 arrays. Raises ValueError where a set has too few
    elements for the correction.

    >>> from normscope.spec import families
    >>> start = RunningState(mean=np.zeros(1), var=np.ones(1))
    >>> update_running(start, [[1.0], [2.0], [6.0]], families.batch_norm(momentum=0.5))
    RunningState(mean=array([1.5]), var=array([4.]), batches=1)
    """
    inputs = read(x, spec, mask)
    state = read_state(running, inputs)
    m = moments(inputs.x, inputs.labels, inputs.sets, inputs.valid)
    kept = Cells(inputs.axes, inputs.axes.kept)
    lives = [name for group in over(spec, inputs.axes) for name in group]
    in_turn = ["v"] if "v" in inputs.axes.kept and "v" not in lives else []
    turns = kept.number(in_turn)
    present = m.count > 0

    batches, fractions = int(running.batches), []
    for turn in range(math.prod(inputs.axes.sizes[name] for name in in_turn)):
        batches += bool(present[turns == turn].any())
        cumulative = spec.running.average == "cumulative"
        fractions.append(1 / max(batches, 1) if cumulative else float(spec.running.momentum))

    def follow(run: Array, batch: Array, cells: Cells, present: Flags) -> Array:
        turns, entries = cells.number(in_turn), cells.number(name for name in lives if name in cells.names)
        for turn, fraction in enumerate(fractions):
            chosen = present & (turns == turn)
            seen = np.bincount(entries[chosen], minlength=len(run)).reshape(-1, *(1 for _ in run.shape[1:]))
            mean = np.zeros_like(run)
            np.add.at(mean, entries[chosen], batch[chosen])
            run = np.where(seen > 0, (1 - fraction) * run + fraction * mean / np.maximum(seen, 1), run)
        return run

    mean = follow(state.mean, m.mean, kept, present)
    if spec.scale in METHODS:
        groups = Cells(inputs.axes, group_names(inputs))
        some = np.zeros(groups.size, dtype=np.bool_)
        some[kept.number(groups.names)] = present
        var = follow(state.var, _stored_matrices(inputs, m), groups, some)
    elif spec.running.averages == "denominator":
        root = np.sqrt(state.var + inputs.eps)
        after = follow(root, np.sqrt(_stored_variance(inputs, m) + inputs.eps), kept, present)
        var = np.where(after == root, state.var, np.maximum(after**2 - inputs.eps, 0.0))
    else:
        var = follow(state.var, _stored_variance(inputs, m), kept, present)
    mean, var = mean.reshape(np.shape(running.mean)), var.reshape(np.shape(running.var))
    if dataclasses.is_dataclass(running) and not isinstance(running, type):
        return dataclasses.replace(running, mean=mean, var=var, batches=batches)
    return RunningState(mean, var, batches)


def _enough(inputs: Inputs, m: Moments, correction: float) -> float:
    """The correction, where every set that is not empty has more elements than it."""
    fewest = int(m.count[m.count > 0].min(initial=np.iinfo(np.int64).max))
    if fewest <= correction:
        raise ValueError(
            f"a stored variance divides by M - {correction:g}, so every set needs M > {correction:g} elements; got "
            f"M = {fewest} under {inputs.axes.pattern!r} in an input of shape {inputs.axes.shape}. Take larger "
            "batches, or Running(correction=0)"
        )
    return correction


def _stored_variance(inputs: Inputs, m: Moments) -> Array:
    """What is stored for each set: the variance with the correction of the state, or the mean square, or the sum."""
    spec = inputs.spec
    if spec.scale == "std":
        return m.variance * m.bessel(_enough(inputs, m, float(spec.running.correction)))
    return m.under_root(spec, inputs.x)[0]


def _stored_matrices(inputs: Inputs, m: Moments) -> Array:
    """What is stored for each whitened group: the covariance, or the whitening matrix."""
    spec = inputs.spec
    if spec.whiten_state == "covariance":
        return covariances(inputs, _enough(inputs, m, float(spec.running.correction)))
    return whitening_matrices(covariances(inputs, float(spec.correction)), spec, inputs.eps)


class Cells:
    """The cells of some axes in row-major order, as the entries of a statistic are."""

    def __init__(self, axes: Axes, names: tuple[str, ...]) -> None:
        self.names = names
        self.sizes = {name: axes.sizes[name] for name in names}
        self.size = math.prod(self.sizes.values())
        grid = np.indices(tuple(self.sizes.values()), dtype=np.int64).reshape(len(names), self.size)
        self.coordinates = dict(zip(names, grid, strict=True))

    def number(self, names: Iterable[str]) -> Labels:
        """For every cell, the row-major number of its coordinates on ``names``."""
        number = np.zeros(self.size, dtype=np.int64)
        for name in names:
            number = number * self.sizes[name] + self.coordinates[name]
        return number
