"""A norm by stored statistics as the linear map that it is, y = a x + b, and what of the norm itself forbids a fold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from normscope.doctor.folding.holdings import Holdings
from normscope.doctor.folding.obstacles import Obstacle, Surroundings, tampered
from normscope.doctor.folding.unseen import Unseen
from normscope.doctor.folding.watching import watching
from normscope.doctor.sets import denominators, working_eps
from normscope.doctor.wording import number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.session import Session
    from normscope.doctor.site import Call, Site
    from normscope.spec import NormSpec

    Array = NDArray[np.float64]


COMPUTED = Obstacle(
    "its gain and bias are computed in each call from what comes beside the input: no weight that is fixed could take "
    "them over"
)


@dataclass(frozen=True, eq=False)
class Affine:
    """``scale`` and ``shift`` of each feature, and the input axis that the features lie on."""

    scale: Array
    shift: Array
    axis: int | None

    @property
    def moved(self) -> float:
        """the largest |b|"""
        return float(np.abs(self.shift).max(initial=0.0))


def surroundings(
    session: Session, sites: Sequence[Site], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Surroundings:
    """What one forward in eval mode shows of everybody around the norms."""
    runs: Counter[int] = Counter()
    unseen = Unseen(session.model, {id(site.module) for site in sites if site.kind == "module"})
    session.forward(args, kwargs, mode="eval", watch=(_counting(runs), watching(unseen)))
    return Surroundings(Holdings(session.model), runs, unseen)


@contextmanager
def _counting(runs: Counter[int]) -> Iterator[None]:
    def count(module: nn.Module, args: Any) -> None:
        runs[id(module)] += 1

    handle = register_module_forward_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()


def of_the_norm(site: Site, around: Surroundings) -> Obstacle | None:
    """Why this module cannot be changed, whatever stands beside it."""
    assert site.module is not None
    if site.fused:
        return Obstacle(
            "PyTorch runs it inside the fused kernel of its transformer layer, which wants it whole"
        )
    if not site.calls:
        return Obstacle("is not called on this sample", bare=True)
    paths = around.holdings.paths(site.module)
    if len(paths) > 1:
        return Obstacle(f"is registered under {len(paths)} names", tuple(paths[1:]), bare=True)
    if not around.runs[id(site.module)]:
        return Obstacle(f"is never called: a function is, with what it holds ({site.name}.weight)", bare=True)
    if len(site.calls) > 1:
        return Obstacle(f"runs {len(site.calls)} times in a forward", bare=True)
    reason = tampered(site.module, site.name or "the model")
    return Obstacle(reason) if reason else None


def stored(site: Site, *, now: bool) -> Affine | Obstacle:
    """The map that a site with stored statistics is, or why it is none.

    ``now``: as the model was handed over, with the values of what is not finite; otherwise after ``model.eval()``.
    """
    call = site.calls[0]
    spec = call.spec or site.spec
    assert spec is not None
    modes = (site.mode_eval, call.mode, *((site.mode_now,) if now else ()))
    if "batch" in modes:
        when = "also in evaluation" if site.mode_eval == "batch" else "since it is in training mode"
        return Obstacle(f"normalizes by the batch, {when}: its function is not linear", bare=True)
    if spec.source == "input":
        return COMPUTED
    if not any(fold.part == "norm" for fold in spec.properties().folds):
        return several_axes(spec) or Obstacle("its statistics do not lie on one axis of features")
    a, b = (np.broadcast_to(value, site.tensors["running_var"].shape) for value in affine(site))
    bad = np.flatnonzero(~(np.isfinite(a) & np.isfinite(b)))
    if bad.size:
        where = (
            f"its scale or shift is not finite in {bad.size} of {a.size} channels, the first of them {bad[0]}"
        )
        if not now:
            return Obstacle(where)
        held = {name: site.array(name) for name in ("running_mean", "running_var", "weight", "bias")}
        values = ", ".join(f"{name} {number(float(t[bad[0]]))}" for name, t in held.items() if t is not None)
        return Obstacle(f"{where} ({values})")
    return Affine(a, b, feature_axis(call, site, spec.running_axes))


def several_axes(spec: NormSpec) -> Obstacle | None:
    """The obstacle where something of the norm differs along more than its features, as over time steps."""
    for what, where in (
        ("stored statistics", spec.running_axes if spec.running is not None else None),
        ("gain", spec.weight),
        ("bias", spec.bias),
    ):
        axes = (where or "").split()
        if len(axes) > 1 and "(" not in (where or ""):
            verb = "differ" if what == "stored statistics" else "differs"
            return Obstacle(
                f"its {what} {verb} along {' and '.join(axes)}, and the layer beside it has one weight a feature"
            )
    return None


def affine(site: Site) -> tuple[Array, Array]:
    """a and b of y = a x + b by the stored statistics of a site that has them."""
    assert site.spec is not None
    mean, variance = site.array("running_mean"), site.array("running_var")
    weight, bias = site.array("weight"), site.array("bias")
    assert mean is not None
    assert variance is not None
    eps = working_eps(site.spec, site.tensors["running_var"].dtype)
    gain = (site.spec.weight_offset + weight if weight is not None else 1.0) * site.spec.gain
    with np.errstate(all="ignore"):
        a: Array = gain / denominators(variance, site.spec, eps)
    return a, (0.0 if bias is None else bias) - a * mean


def feature_axis(call: Call, site: Site, where: str | None) -> int | None:
    """The input axis that a pattern's axes make up."""
    spec = call.spec or site.spec
    assert spec is not None
    names = set((where or "").replace("(", " ").replace(")", " ").split())
    axes = spec.bind(call.shape).axes
    dims = {axis.dim for axis in axes if axis.name in names}
    if len(dims) != 1:
        return None
    (dim,) = dims
    whole = math.prod(axis.size for axis in axes if axis.dim == dim) == call.shape[dim]
    return dim if whole else None
