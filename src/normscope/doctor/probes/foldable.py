"""``foldable``: which batch norms could be folded into a neighbouring linear map, and what stands in the way of others.

By stored statistics a norm is y = a x + b per channel, with a = gain / sqrt(running variance + eps) and
b = bias - a running mean. It folds into the map before it (W' = a W, and a, b on its bias) or into the map after it
(where that fills in no zeros: at a padded border b would be missing). Candidates are modules with running statistics
whose one neighbour, with nothing but views between, is a convolution or a linear layer on the same axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from normscope.doctor.probes import Probe
from normscope.doctor.sets import denominators, working_eps
from normscope.doctor.wording import number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Call, Neighbour, Site
    from normscope.doctor.subject import Subject

LINEAR = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)


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
        found = (
            _candidate(site) for site in subject.known() if site.kind in ("module", "node") and site.calls
        )
        return [candidate for candidate in found if candidate is not None]


def _candidate(site: Site) -> Candidate | None:
    if not {"running_mean", "running_var"} <= set(site.tensors):
        return None
    call = site.calls[0]
    assert site.spec is not None
    scale, shift = affine(site)
    moved = float(np.abs(shift).max(initial=0.0))
    folds = {fold.into for fold in site.spec.properties().folds if fold.part == "norm"}
    axis = _channels(site, call)
    before = _beside(call.fed_by, axis) if "before" in folds else None
    after = _beside(call.feeds, axis) if "after" in folds else None
    if before is None and after is None:
        return None
    own = tuple(_of_the_norm(site))
    into_before = () if before is None else tuple(_of_the_layer(before, "before", moved))
    into_after = () if after is None else tuple(_of_the_layer(after, "after", moved))
    # into the layer after it only where the one before cannot take it
    where = "before" if before is not None and (not into_before or after is None or into_after) else "after"
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


def affine(site: Site) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """a and b of y = a x + b by the stored statistics of a site that has them."""
    assert site.spec is not None
    mean, variance = site.array("running_mean"), site.array("running_var")
    weight, bias = site.array("weight"), site.array("bias")
    assert mean is not None
    assert variance is not None
    eps = working_eps(site.spec, site.tensors["running_var"].dtype)
    gain = (site.spec.weight_offset + weight if weight is not None else 1.0) * site.spec.gain
    with np.errstate(all="ignore"):
        a: NDArray[np.float64] = gain / denominators(variance, site.spec, eps)
    return a, (0.0 if bias is None else bias) - a * mean


def _channels(site: Site, call: Call) -> int | None:
    """The input axis that the running statistics live on."""
    spec = call.spec or site.spec
    assert spec is not None
    names = set((spec.running_axes or "").replace("(", " ").replace(")", " ").split())
    dims = {axis.dim for axis in spec.bind(call.shape).axes if axis.name in names}
    return dims.pop() if len(dims) == 1 else None


def _beside(neighbours: tuple[Neighbour, ...], axis: int | None) -> Neighbour | None:
    """The linear map that alone stands beside the norm, on its channel axis."""
    if len(neighbours) != 1 or neighbours[0].through:
        return None
    (only,) = neighbours
    return (
        only if only.kind in ("conv", "linear") and axis is not None and only.feature_axis == axis else None
    )


def _of_the_norm(site: Site) -> Iterator[str]:
    if len(site.calls) > 1:
        yield f"the norm is shared: it runs {len(site.calls)} times in a forward"
    elif site.aliases:
        yield f"the norm is registered under {len(site.aliases) + 1} names"
    if site.mode_eval == "batch":
        yield "the norm takes batch statistics in eval mode, a fold would put the stored ones in their place"
    if site.module is not None:
        yield from _tampered(site.module, "the norm")


def _of_the_layer(layer: Neighbour, where: str, shift: float) -> Iterator[str]:
    name = layer.path or "the model"
    if where == "before" and layer.consumers > 1:
        yield f"the output of {name} has {layer.consumers} readers, and the others want it as it is"
    if where == "after" and layer.padded:
        now = f"up to {number(shift)}" if shift else "0 now, but training moves it"
        yield f"{layer.op} of {name} fills in zeros, where the norm's shift ({now}) would be missing"
    if layer.weight is None and not layer.rewritable:
        yield f"the weight of {name} is computed in the forward (parametrized, standardized or packed)"
        return
    if layer.weight_uses > 1:
        yield f"the weight of {name} is shared: it is used {layer.weight_uses} times in a forward"
    if layer.rewritable:
        return
    module = layer.module
    if not isinstance(module, LINEAR) or module.weight is not layer.weight:
        yield f"{layer.op} in {name} is a function call, with no layer of its own to change"
        return
    yield from _tampered(module, name)
    code = getattr(type(module).forward, "__code__", None)
    if module.bias is None and code is not None and "bias" not in code.co_names:
        yield f"{name} is of class {type(module).__name__}, whose forward takes no bias"


def _tampered(module: torch.nn.Module, name: str) -> Iterator[str]:
    if module._forward_hooks or module._forward_pre_hooks:
        yield f"{name} has forward hooks, which would see other tensors"
    if "forward" in vars(module):
        yield f"the forward of {name} was replaced"
    if "parametrizations" in module._modules:
        yield f"the parameters of {name} are parametrized"
