"""Does what a norm removes say more about the targets than what the network keeps?

A norm over the elements of one sample takes that sample's mean and scale away. For each such site three linear
probes (ridge, standardized, cross-validated in 5 folds) predict the targets of the batch:

- from what is removed: mean and log denominator of every set of the sample, or, of many sets, random projections of
  them and their averages;
- from what is kept: the site's output, averaged over all axes but the second, over all but the last, and into a few
  pieces along every axis, with the same averages of its absolute value and of its square;
- from the network's output, in the same form: what a residual sum, a concatenation or a later layer carries past
  the site is there.

Each prediction of a held-out sample is right or wrong (for numbers: nearer than another prediction or not), so all
comparisons are of counts: against the most common class (binomial tail) and against another probe on the same
samples (sign test on those where the two differ). What is kept is looked at only where what is removed beats chance;
it is reduced at once to at most ``KEPT`` numbers a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from math import comb, fsum
from typing import TYPE_CHECKING

import numpy as np
import torch

from normscope.doctor.probes import Probe
from normscope.doctor.sets import Sets, sets_of
from normscope.errors import MissingExtra

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject

    Array = NDArray[np.float64]

MIN_SAMPLES = 32
MOST_SAMPLES = 512
"""of the batch that are looked at"""
REMOVED, KEPT = 32, 512
"""numbers a sample that a probe predicts from"""
PIECES = 4
"""averages along each axis"""
ELEMENTS, COLUMNS = 1 << 20, 1 << 14
"""of an activation that are averaged at a time; of a table that enter random sums"""
PROMISING = 0.01
"""probability by chance below which what is removed is compared with what is kept"""
FOLDS = 5


@dataclass(frozen=True)
class Removed:
    """One site. Scores: share of held-out samples predicted right, or R^2 for numbers."""

    order: int
    samples: int
    chance: float
    """of always saying the most common class, or the mean"""
    removed: float
    against_chance: float
    """probability of so many right by chance"""
    kept: float | None = None
    """None where what is removed predicts nothing, so that nothing was compared"""
    output: float | None = None
    against_kept: float = 1.0
    against_output: float = 1.0
    classes: int = 0
    """0 for numbers"""


class RemovedProbe(Probe):
    """``measured["removed"]``: site name -> :class:`Removed`, for sites that normalize each sample by itself."""

    name = "removed"
    runs = ("eval",)

    def start(self, subject: Subject) -> str | None:
        if subject.targets is None:
            return "needs targets: pass targets="
        if not isinstance(subject.targets, (torch.Tensor, np.ndarray)):
            return f"needs targets as one tensor or array, got {type(subject.targets).__name__}"
        if subject.batch_size < MIN_SAMPLES:
            return f"cannot tell with {subject.batch_size} samples: pass at least {MIN_SAMPLES}"
        if subject.inputs_dependent:
            return f"the samples are not independent: {subject.inputs_dependent}"
        if find_spec("sklearn") is None:
            return str(MissingExtra("scikit-learn", "studies", "the linear probe of targets"))
        self._count = min(subject.batch_size, MOST_SAMPLES)
        wanted = _targets(subject.targets, subject.batch_size)
        if isinstance(wanted, str):
            return wanted
        self._samples, self._seed = subject.batch_size, subject.seed
        self._found: dict[str, Removed] = {}
        self._losses: dict[str, tuple[Array, Array]] = {}
        self._probes = _Probes(wanted[: self._count])
        return None

    def observe(self, event: Event) -> None:
        name = event.site.name
        if event.mode != "input" or name in self._found:
            return  # stored statistics are the same for all samples, those of a batch for all of it
        sets = sets_of(event)
        if not isinstance(sets, Sets) or sets.bound.sample_dim is None:
            return
        removed = self._statistics(sets)
        if removed is None or event.output.shape != event.input.shape:
            return
        losses = self._probes.losses(removed)
        self._found[name] = found = self._probes.alone(losses, len(self._found))
        if found.removed > found.chance and found.against_chance < PROMISING:
            kept = _pooled(event.output, sets.bound.sample_dim, self._count, self._seed)
            self._losses[name] = (losses, self._probes.losses(kept))

    def finish(self, subject: Subject) -> dict[str, Removed]:
        outputs = [t for t in subject.outputs.get("eval", ()) if t.ndim and t.shape[0] == self._samples]
        if self._losses and outputs:
            data = np.concatenate([_pooled(t, 0, self._count, self._seed) for t in outputs[:4]], axis=1)
            output = self._probes.losses(data)
            for name, (removed, kept) in self._losses.items():
                self._found[name] = replace(
                    self._found[name],
                    kept=self._probes.score(kept),
                    output=self._probes.score(output),
                    against_kept=_sign(removed, kept),
                    against_output=_sign(removed, output),
                )
        return self._found

    def _statistics(self, sets: Sets) -> Array | None:
        """(samples, numbers): mean and log denominator of each set of a sample."""
        axes = [axis for axis in sets.bound.axes if axis.kept]
        rows = [i for i, axis in enumerate(axes) if axis.dim == sets.bound.sample_dim]
        if len(rows) != 1 or axes[rows[0]].size != self._samples:
            return None
        shape = [axis.size for axis in axes]
        with np.errstate(all="ignore"):
            found = [np.log(sets.denominator)] + ([sets.mean] if sets.spec.center else [])
        table = [np.moveaxis(v.reshape(shape), rows[0], 0).reshape(self._samples, -1) for v in found]
        parts = [table[i][: self._count] for i in range(len(table))]
        parts = [_projected(part, REMOVED // len(parts), self._seed) for part in parts]
        return _finite(np.concatenate(parts, axis=1))


class _Probes:
    """Linear probes of one set of targets."""

    def __init__(self, targets: Array) -> None:
        self.classes = int(targets.max()) + 1 if targets.ndim == 1 else 0
        self.targets = targets
        self.chance = np.bincount(targets.astype(int)).max() / len(targets) if self.classes else 0.0

    def alone(self, losses: Array, order: int) -> Removed:
        """What is removed, against chance."""
        if self.classes:
            proof = _tail(int((losses == 0).sum()), len(losses), self.chance)
        else:
            proof = _sign(losses, self._guesses)
        return Removed(order, len(losses), self.chance, self.score(losses), proof, classes=self.classes)

    @cached_property
    def _guesses(self) -> Array:
        """Losses of a probe that knows nothing of a sample."""
        return self.losses(np.zeros((len(self.targets), 1)))

    def losses(self, data: Array) -> Array:
        """Of each sample, predicted by a probe that has not seen it: 0 or 1 for a class, else the squared error."""
        from sklearn.linear_model import RidgeClassifierCV, RidgeCV
        from sklearn.model_selection import KFold, StratifiedKFold, cross_val_predict
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        strengths = np.logspace(-1, 4, 11)
        if self.classes:
            probe = make_pipeline(StandardScaler(), RidgeClassifierCV(alphas=strengths))
            folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
        else:
            probe = make_pipeline(StandardScaler(), RidgeCV(alphas=strengths))
            folds = KFold(FOLDS, shuffle=True, random_state=0)
        predicted = cross_val_predict(probe, data, self.targets, cv=folds)
        if self.classes:
            wrong: Array = (predicted != self.targets).astype(np.float64)
            return wrong
        errors: Array = ((predicted.reshape(self.targets.shape) - self.targets) ** 2).sum(1)
        return errors

    def score(self, losses: Array) -> float:
        if self.classes:
            return float(1 - losses.mean())
        return float(1 - losses.sum() / ((self.targets - self.targets.mean(0)) ** 2).sum())


def _targets(targets: torch.Tensor | NDArray[np.generic], samples: int) -> Array | str:
    """One axis of class numbers, or two of numbers standardized; or why they cannot be predicted."""
    value = targets.detach().cpu() if isinstance(targets, torch.Tensor) else torch.as_tensor(targets)
    if value.ndim == 0 or value.shape[0] != samples or value.numel() > 64 * samples:
        return f"needs one target a sample, got targets of shape {tuple(value.shape)} for {samples} samples"
    if value.is_floating_point():
        numbers = value.reshape(samples, -1).double().numpy()
        if not np.isfinite(numbers).all():
            return "the targets hold NaN or infinities"
        spread = numbers.std(0)
        if not (spread > 0).any():
            return "all targets of this batch are the same"
        columns: Array = (numbers[:, spread > 0] - numbers[:, spread > 0].mean(0)) / spread[spread > 0]
        return columns
    if value.is_complex() or value.numel() != samples:
        return f"needs one class or number a sample, got targets of shape {tuple(value.shape)}"
    _, labels, counts = np.unique(value.reshape(-1).numpy(), return_inverse=True, return_counts=True)
    if len(counts) < 2:
        return "all targets of this batch are the same"
    if counts.min() < FOLDS:
        return f"a class has {counts.min()} samples in this batch: pass at least {FOLDS} of each"
    classes: Array = labels.astype(np.float64)
    return classes


def _pooled(tensor: torch.Tensor, sample_dim: int, count: int, seed: int) -> Array:
    """(samples, at most KEPT): averages of the values, of their sizes and of their squares; some samples at a time."""
    x = tensor.detach().movedim(sample_dim, 0)[:count]
    at_once = max(1, ELEMENTS // max(1, x[0].numel()))
    parts = [x[start : start + at_once] for start in range(0, count, at_once)]
    return _finite(np.concatenate([_averages(part, seed) for part in parts]))


def _averages(x: torch.Tensor, seed: int) -> Array:
    x = (x if x.ndim > 2 else x.reshape(len(x), 1, -1)).to(torch.promote_types(x.dtype, torch.float32))
    blocks = []
    for values in (x, x.abs(), x.square()):
        pieces = values
        for axis in range(1, values.ndim):
            if values.shape[axis] > PIECES:
                parts = pieces.tensor_split(PIECES, axis)
                pieces = torch.stack([part.mean(axis) for part in parts], axis)
        # features stand on the second axis or on the last; no axis is averaged away that the pieces do not show
        second, last = values.flatten(2).mean(2), values.flatten(1, -2).mean(1)
        blocks += [t.reshape(len(x), -1).double().cpu().numpy() for t in (second, last, pieces)]
    return np.concatenate([_projected(block, KEPT // len(blocks), seed) for block in blocks], axis=1)


def _projected(table: Array, most: int, seed: int) -> Array:
    """At most ``most`` columns: the average over columns, and random sums of them."""
    if table.shape[1] <= most:
        return table
    thin = table[:, :: -(-table.shape[1] // COLUMNS)]
    return np.concatenate(
        [table.mean(1, keepdims=True), thin @ _random(thin.shape[1], most - 1, seed)], axis=1
    )


@lru_cache(maxsize=8)
def _random(rows: int, columns: int, seed: int) -> Array:
    drawn: Array = np.random.default_rng(seed).standard_normal((rows, columns)) / np.sqrt(rows)
    return drawn


def _finite(table: Array) -> Array:
    """What is not finite says nothing, rather than all."""
    return np.nan_to_num(table, nan=0.0, posinf=0.0, neginf=0.0)


def _tail(right: int, of: int, chance: float) -> float:
    """P(at least ``right`` of ``of``) where each is right with probability ``chance``."""
    wrong = 1 - chance
    return fsum(comb(of, k) * chance**k * wrong ** (of - k) for k in range(right, of + 1))


def _sign(first: Array, second: Array) -> float:
    """One-sided sign test that losses of the first are smaller, on the samples where they differ."""
    better, worse = int((first < second).sum()), int((first > second).sum())
    return _tail(better, better + worse, 0.5) if better + worse else 1.0
