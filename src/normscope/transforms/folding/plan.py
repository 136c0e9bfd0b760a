"""Which norms fold into which linear maps, and why the others stay: read off one followed forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

import normscope.nn as own
from normscope.doctor.folding.linear_map import LinearMap
from normscope.doctor.folding.obstacles import Obstacle, Surroundings, both
from normscope.doctor.folding.stored import (
    COMPUTED,
    feature_axis,
    of_the_norm,
    several_axes,
    stored,
    surroundings,
)
from normscope.doctor.session import Session
from normscope.doctor.sites import find_sites
from normscope.transforms.chosen import HAND_WRITTEN
from normscope.transforms.elsewhere import INLINED

if TYPE_CHECKING:
    from normscope.doctor.site import Call, Site

IDENTITY, PLAIN, NEUTRAL, RMS = "torch.nn.Identity", "without gain and bias", "with a neutral gain", "RMSNorm"
NULLABLE = {
    getattr(home, name)
    for home in (nn, own)
    for name in ("LayerNorm", "GroupNorm", "RMSNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d")
}
"""layers that run with None in place of weight and bias"""
LAYER_NORMS = {nn.LayerNorm: nn.RMSNorm, own.LayerNorm: own.RMSNorm}
ELSEWHERE = {
    "functional": "is a call of a function, not a module: there is nothing that could be taken out",
    "hidden": "runs inside a scripted, traced or exported module: fold the model it was made from",
    "inlined": INLINED,
    "hand-written": HAND_WRITTEN,
}


@dataclass(frozen=True, eq=False)
class Step:
    """One norm that folds."""

    site: str
    path: str
    """as ``named_modules`` gives it"""
    before: str
    becomes: str
    maps: tuple[LinearMap, ...]
    where: str
    """before (the map feeds the norm) | after"""
    scale: Tensor
    shift: Tensor
    shifts: bool = True
    """it has a shift, be it 0 now: which keys a folded model has does not depend on values"""
    centered: LinearMap | None = None
    """the map that takes over the centering"""
    neutral: float = 1.0
    """the weight that leaves a norm written by hand without a gain"""
    zero_variance: int = 0
    """channels whose stored variance is 0"""
    remark: str = ""

    @property
    def witness(self) -> str:
        """Path of the module whose output is the same before and after."""
        return self.path if self.where == "before" or not self.maps else self.maps[0].path

    @property
    def after(self) -> str:
        if self.becomes == RMS:
            return f"{self.before.rpartition('.')[0]}.{RMS}"
        return self.becomes if self.becomes == IDENTITY else f"{self.before} {self.becomes}"


@dataclass(frozen=True, eq=False)
class Stays:
    """One norm that is left alone."""

    site: str
    before: str
    obstacle: Obstacle
    aliases: tuple[str, ...] = ()


def plan(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, gains: bool, center: bool
) -> list[Step | Stays]:
    """Each normalization of a forward in eval mode, in the order of execution; nothing in the model is changed."""
    with Session(model) as session:
        sites = find_sites(session, args, kwargs)
        around = surroundings(session, sites, args, kwargs)
    planned = [_planned(site, around, gains=gains, center=center) for site in sites]
    return [_inside(one, planned) for one in planned]


def _inside(one: Step | Stays, planned: list[Step | Stays]) -> Step | Stays:
    """What a norm is made of goes with it."""
    for other in planned:
        whole = isinstance(other, Step) and other.becomes == IDENTITY
        if whole and other is not one and one.site.startswith(f"{other.site}."):
            return Stays(one.site, one.before, Obstacle(f"is part of {other.site}, which is gone"))
    return one


def _planned(site: Site, around: Surroundings, *, gains: bool, center: bool) -> Step | Stays:
    obstacle = _of_the_site(site, around)
    if obstacle is None:
        assert site.module is not None
        call, (path,) = site.calls[0], around.holdings.paths(site.module)
        blank = Step(site.name, path, site.type_name, "", (), "after", torch.ones(0), torch.zeros(0))
        if {"running_mean", "running_var"} <= set(site.tensors):
            found = _stored(site, around, blank)
        else:
            found = _gain(site, call, around, blank, gains=gains)
            if center:
                found = _center(site, call, around, blank, found)
        if isinstance(found, Step):
            return found
        obstacle = found
    return Stays(site.name, site.type_name, obstacle, site.aliases)


def _of_the_site(site: Site, around: Surroundings) -> Obstacle | None:
    if site.kind != "module" or site.module is None:
        return Obstacle(ELSEWHERE.get(site.kind, site.reason))
    if site.spec is None:
        return Obstacle(site.reason)
    return of_the_norm(site, around)


def _stored(site: Site, around: Surroundings, blank: Step) -> Step | Obstacle:
    """A norm by stored statistics, y = a x + b: into the map behind it, else into those ahead."""
    linear = stored(site, now=True)
    if isinstance(linear, Obstacle):
        return linear
    variance = site.array("running_var")
    found = replace(
        blank,
        becomes=IDENTITY,
        scale=torch.tensor(linear.scale),
        shift=torch.tensor(linear.shift),
        zero_variance=int((variance == 0).sum()) if variance is not None else 0,
    )
    behind = around.behind(site, linear.axis, bias=True)
    if isinstance(behind, LinearMap):
        return replace(found, maps=(behind,), where="before")
    ahead = around.ahead(site, linear.axis, shift=linear.moved, identity=True)
    if isinstance(ahead, tuple):
        return replace(found, maps=ahead)
    return both(behind, ahead)


def _gain(site: Site, call: Call, around: Surroundings, blank: Step, *, gains: bool) -> Step | Obstacle:
    """Gain and bias of any other norm into the maps ahead; what is left has neither."""
    spec = call.spec or site.spec
    assert spec is not None
    weight, bias = site.array("weight"), site.array("bias")
    if not gains:
        return Obstacle("gains stay where they are, as was asked for")
    if spec.source == "input":
        return COMPUTED
    if weight is None and bias is None:
        return Obstacle("has no gain or bias that could move")
    parts = {fold.part for fold in spec.properties().folds if fold.into == "after"}
    if not {what for what, held in (("gain", weight), ("bias", bias)) if held is not None} <= parts:
        return several_axes(spec) or Obstacle("its gain and bias do not lie on one axis of features")
    size = next(held.size for held in (weight, bias) if held is not None)
    if spec.weight == "":
        return Obstacle("its gain is one number, not one a feature")
    a = np.ones(size) if weight is None else spec.weight_offset + weight.reshape(-1)
    b = np.zeros(size) if bias is None else bias.reshape(-1)
    axis = feature_axis(call, site, spec.weight if weight is not None else spec.bias)
    shift = None if bias is None else float(np.abs(b).max(initial=0.0))
    ahead = around.ahead(site, axis, shift=shift, identity=False)
    if isinstance(ahead, Obstacle):
        return ahead
    becomes = PLAIN if type(site.module) in NULLABLE else NEUTRAL
    if becomes == NEUTRAL:
        for what in ("weight", "bias"):
            held = site.tensors.get(what)
            if held is not None and len(around.holdings.names(held)) != 1:
                return Obstacle(f"its {what} is tied to that of another module")
    return replace(
        blank,
        becomes=becomes,
        maps=ahead,
        scale=torch.tensor(a),
        shift=torch.tensor(b),
        shifts=bias is not None,
        neutral=1.0 - spec.weight_offset,
    )


def _center(
    site: Site, call: Call, around: Surroundings, blank: Step, found: Step | Obstacle
) -> Step | Obstacle:
    """The centering of a layer norm into the map behind it; what is left is an RMS norm."""
    spec = call.spec or site.spec
    assert spec is not None
    if not any(fold.part == "centering" for fold in spec.properties().folds):
        return found
    obstacle = _no_centering(site, call, around, found)
    if isinstance(obstacle, LinearMap):
        step = found if isinstance(found, Step) else blank
        return replace(step, becomes=RMS, centered=obstacle)
    remark = f"centering stays: {obstacle.reason}"
    if isinstance(found, Step):
        return replace(found, remark=f"{site.name}: {remark}")
    return replace(found, reason=f"{found.reason}; {remark}")


def _no_centering(
    site: Site, call: Call, around: Surroundings, found: Step | Obstacle
) -> LinearMap | Obstacle:
    if type(site.module) not in LAYER_NORMS:
        return Obstacle("only torch.nn.LayerNorm and normscope.nn.LayerNorm have an RMS norm beside them")
    bias = site.array("bias")
    if isinstance(found, Obstacle) and bias is not None:
        return Obstacle("its bias has no place in an RMS norm")
    behind = around.behind(site, len(call.shape) - 1, bias=False)
    if isinstance(behind, LinearMap) and behind.op.startswith("conv"):
        (one,) = call.fed_by
        if getattr(one.module, "groups", 1) != 1:
            return Obstacle(
                f"{behind.path} computes its outputs in groups, and the mean runs over all of them"
            )
    return behind
