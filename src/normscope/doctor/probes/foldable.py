"""``foldable``: which batch norms could be folded into a neighbouring linear map, and what stands in the way of others.

By stored statistics a norm is y = a x + b per channel, with a = gain / sqrt(running variance + eps) and
b = bias - a running mean. It folds into the map before it (W' = a W, and a, b on its bias) or into the map after it
(where that fills in no zeros: at a padded border b would be missing). Candidates are modules with running statistics
whose one neighbour, with nothing but views between, is a convolution or a linear layer on the same axis. What stands
in the way is told by ``doctor/folding``, which ``normscope.transforms.fold`` asks too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from normscope.doctor.folding.obstacles import Obstacle, Surroundings
from normscope.doctor.folding.stored import affine, feature_axis, of_the_norm, stored, surroundings
from normscope.doctor.probes import Probe
from normscope.doctor.wording import number

if TYPE_CHECKING:
    from normscope.doctor.site import Neighbour, Site
    from normscope.doctor.subject import Subject


@dataclass(frozen=True)
class Candidate:
    """A norm beside a linear map."""

    site: str
    into: str
    """path of the layer that would take it over"""
    op: str
    where: str
    """before (the layer feeds the norm) | after"""
    channels: int
    obstacles: tuple[str, ...]
    """why a fold would change the function, in words; empty where it would not"""
    shift: float
    """largest |b| over the channels"""


class Foldable(Probe):
    """``measured["foldable"]``: every :class:`Candidate`, in the order of execution."""

    name: ClassVar[str] = "foldable"

    def finish(self, subject: Subject) -> list[Candidate]:
        self.subject = subject
        found = (self._candidate(site) for site in subject.known() if site.kind in ("module", "node"))
        return [candidate for candidate in found if candidate is not None]

    @cached_property
    def _around(self) -> Surroundings:
        """Seen in a forward of its own, which is made where there is a candidate."""
        subject = self.subject
        return surroundings(subject.session, subject.sites, subject.args or (), subject.kwargs)

    def _candidate(self, site: Site) -> Candidate | None:
        if not site.calls or not {"running_mean", "running_var"} <= set(site.tensors):
            return None
        call = site.calls[0]
        assert site.spec is not None
        scale, shift = affine(site)
        folds = {fold.into for fold in site.spec.properties().folds if fold.part == "norm"}
        axis = feature_axis(call, site, (call.spec or site.spec).running_axes)
        before = _beside(call.fed_by, axis) if "before" in folds else None
        after = _beside(call.feeds, axis) if "after" in folds else None
        if before is None and after is None:
            return None
        moved = float(np.abs(shift).max(initial=0.0))
        if site.kind == "node":
            own = tuple(_of_the_node(site))
            into_before = () if before is None else tuple(_of_the_layer(before, "before", moved))
            into_after = () if after is None else tuple(_of_the_layer(after, "after", moved))
        else:
            around = self._around
            own = _told(of_the_norm(site, around)) or _told(stored(site, now=False))
            into_before = () if before is None else _told(around.behind(site, axis, bias=True))
            into_after = () if after is None else _told(around.ahead(site, axis, shift=moved, identity=True))
        # into the layer after it only where the one before cannot take it
        where = (
            "before" if before is not None and (not into_before or after is None or into_after) else "after"
        )
        layer, theirs = (before, into_before) if where == "before" else (after, into_after)
        assert layer is not None
        return Candidate(
            site=site.name,
            into=layer.path,
            op=layer.op,
            where=where,
            channels=scale.size,
            obstacles=own + theirs,
            shift=moved,
        )


def _told(found: object) -> tuple[str, ...]:
    """What stands in the way, if that is what was found."""
    if not isinstance(found, Obstacle):
        return ()
    return (f"the norm {found.reason}" if found.bare else found.reason,)


def _beside(neighbours: tuple[Neighbour, ...], axis: int | None) -> Neighbour | None:
    """The linear map that alone stands beside the norm, on its channel axis."""
    if len(neighbours) != 1 or neighbours[0].through:
        return None
    (only,) = neighbours
    return (
        only if only.kind in ("conv", "linear") and axis is not None and only.feature_axis == axis else None
    )


def _of_the_node(site: Site) -> Iterator[str]:
    if len(site.calls) > 1:
        yield f"the norm is shared: it runs {len(site.calls)} times in a forward"
    if site.mode_eval == "batch":
        yield "the norm takes batch statistics in eval mode, a fold would put the stored ones in their place"


def _of_the_layer(layer: Neighbour, where: str, shift: float) -> Iterator[str]:
    """Of a node, whose weight can be written anew where it is one of the graph's."""
    name = layer.path or "the model"
    if where == "before" and layer.consumers > 1:
        yield f"the output of {name} has {layer.consumers} readers, and the others want it as it is"
    if where == "after" and layer.padded:
        now = f"up to {number(shift)}" if shift else "0 now, but training moves it"
        yield f"{layer.op} of {name} fills in zeros, where the norm's shift ({now}) would be missing"
    if not layer.rewritable:
        yield f"the weight of {name} is computed in the graph"
    elif layer.weight_uses > 1:
        yield f"the weight of {name} is shared: it is used {layer.weight_uses} times in a forward"
