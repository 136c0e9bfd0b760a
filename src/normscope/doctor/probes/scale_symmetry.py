"""Which weights upstream of a norm is the network invariant to the scale of?

A norm removes the scale of what feeds it, and so the scale of the weights that made it: of each filter on its own
before batch norm, of all filters of a statistic set together, with their biases, before group and layer norm. Then

    f(t w) = f(w) for t > 0,   so   <w, grad f(w)> = 0   (Euler)

For every set of features that share statistics, w and its bias as one vector, the cosine |<w, g>| / (|w| |g|) is
measured. A chance cosine is about 1 / sqrt(size), so one alone proves little: a weight is a candidate where every set
is below 1e-3, and it counts where doubling all candidates at once leaves the output unchanged. Measured with norms in
batch mode and dropout off, on the user's loss or a fixed random projection of the output. A weight so small that eps
matters is not invariant, and is not called so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from normscope.doctor.change import change, some
from normscope.doctor.nested import detached
from normscope.doctor.probes import Probe

if TYPE_CHECKING:
    from normscope.doctor.site import Call, Neighbour
    from normscope.doctor.subject import Subject

COSINE = 1e-3
UNCHANGED = 1e-2
"""relative change of the output on doubling; eps keeps it from being 0"""


@dataclass(frozen=True)
class Symmetry:
    """One weight that feeds a norm."""

    site: str
    bias: str
    """name of the bias that belongs to the symmetry, "" without one"""
    sets: int
    """sets of features that share statistics: each has its own scale"""
    cosine: float
    """largest over the sets"""
    median_cosine: float
    norm: float
    """Euclidean norm of the weight, with its bias where that belongs to the symmetry: with learning rate r, the
    effective learning rate is r / norm^2"""
    numbers: int
    """how many numbers that norm is over"""
    gradient: float
    """Euclidean norm of the gradient of the same numbers"""
    invariant: bool
    change: float | None = None
    """relative change of the model's output when all candidates are doubled; None where it is no candidate"""


class ScaleSymmetryProbe(Probe):
    """``measured["scale_symmetry"]``: parameter name -> :class:`Symmetry`."""

    name = "scale_symmetry"
    runs = ("gradient",)

    def start(self, subject: Subject) -> str | None:
        # two more forward passes, of use only to who decays weights
        return "no optimizer was given: pass optimizer=" if subject.optimizer is None else None

    def finish(self, subject: Subject) -> dict[str, Symmetry]:
        names = {id(p): n for n, p in subject.model.named_parameters()}
        found: dict[str, Symmetry] = {}
        for site in subject.known():
            for call in site.calls[:1]:
                for neighbour in call.fed_by:
                    name = names.get(id(neighbour.weight), "")
                    if name in subject.gradients and not neighbour.through:
                        measured = _measure(subject, site.name, call, neighbour, name, names)
                        if measured is not None:
                            found[name] = measured
        candidates = [name for name, symmetry in found.items() if symmetry.cosine < COSINE]
        if candidates:
            moved = _doubled(subject, {n for c in candidates for n in (c, found[c].bias) if n})
            for name in candidates:
                found[name] = replace(found[name], change=moved, invariant=moved < UNCHANGED)
        return found


def _measure(
    subject: Subject, site: str, call: Call, neighbour: Neighbour, name: str, names: dict[int, str]
) -> Symmetry | None:
    if neighbour.kind not in ("conv", "linear") or neighbour.feature_axis is None or call.spec is None:
        return None
    # Elementary axes that the features make up at the site: the kept ones count sets, "(g c)" with g outermost.
    axes = [axis for axis in call.spec.bind(call.shape).axes if axis.dim == neighbour.feature_axis]
    sets = prod(axis.size for axis in axes if axis.kept)
    if [axis.kept for axis in axes] != sorted((axis.kept for axis in axes), reverse=True):
        return None
    parameters = dict(subject.model.named_parameters())
    bias = names.get(id(neighbour.bias), "") if neighbour.bias is not None else ""
    features = 1 if neighbour.transposed else 0
    pairs = [(parameters[name].detach().movedim(features, 0), subject.gradients[name].movedim(features, 0))]
    if pairs[0][0].shape[0] % sets:
        return None  # grouped transposed convolutions hold their features on two axes
    # Where every feature is a set of its own, the norm removes the bias altogether: the weight alone is invariant.
    joint = bias if bias in subject.gradients and sets < pairs[0][0].shape[0] else ""
    if joint:
        pairs.append((parameters[joint].detach(), subject.gradients[joint]))
    w, g = (torch.cat([t.reshape(sets, -1).double() for t in ts], 1) for ts in zip(*pairs, strict=True))
    sizes = w.norm(dim=1) * g.norm(dim=1)
    cosines = ((w * g).sum(1).abs() / sizes.clamp_min(1e-300)).cpu().numpy()
    live = (sizes > 0).cpu().numpy()
    if not live.any():
        return None
    return Symmetry(
        site=site,
        bias=joint,
        sets=sets,
        cosine=float(cosines[live].max()),
        median_cosine=float(np.median(cosines[live])),
        norm=float(w.norm()),
        numbers=w.numel(),
        gradient=float(g.norm()),
        invariant=False,
    )


def _doubled(subject: Subject, names: set[str]) -> float:
    """Relative change of the model's output when these parameters are doubled."""
    parameters = [p for n, p in subject.model.named_parameters() if n in names]
    args = subject.args or ()
    before = detached(subject.session.forward(args, subject.kwargs, mode="batch"))
    after = detached(
        subject.session.forward(args, subject.kwargs, mode="batch", watch=(_scaled(parameters),))
    )
    moved = [
        change(some(old), some(new), old.dtype).relative
        for old, new in zip(before, after, strict=True)
        if old.is_floating_point() and old.shape == new.shape
    ]
    return max(moved, default=float("inf"))


@contextmanager
def _scaled(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Twice the parameters during one forward; the session puts the very bits back."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(2)
    yield
