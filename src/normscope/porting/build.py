"""The torch layer that computes what a specification says, on inputs whose channels stand where torch has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from normscope.errors import BadInput
from normscope.porting.norms import STORED
from normscope.reading import UnknownNormalization
from normscope.spec.align import expand
from normscope.spec.pattern import ELLIPSIS

if TYPE_CHECKING:
    from normscope.spec import NormSpec

Order = tuple[int, ...]
"""of axes: the input of the torch layer is ``x.permute(order)``"""


@dataclass(frozen=True)
class Plan:
    """A class of torch.nn or normscope.nn with its arguments."""

    name: str
    arguments: tuple[Any, ...]
    settings: dict[str, Any]
    order: Order
    parameters: tuple[int, ...]
    """the shape of its weight and bias"""
    turned: Order = ()
    """how the axes of a parameter are permuted; () not at all"""


def plan(spec: NormSpec, shape: tuple[int, ...], *, frozen: bool, channels_first: bool) -> Plan:
    """Which layer, on inputs of this shape in the source. Raises UnknownNormalization where torch has none."""
    n, roles = len(shape), _roles(spec, len(shape))
    kept = [axis for axis, role in enumerate(roles) if role == "kept"]
    erased = [axis for axis, role in enumerate(roles) if role == "erased"]
    eps = {"eps": spec.eps}
    last = erased == list(range(n - len(erased), n)) and not spec.running
    if spec.eps_at == "max" and spec.scale == "l2" and len(erased) == 1 and spec.weight is None:
        return Plan("L2Norm", (), {"dim": erased[0], **eps}, tuple(range(n)), ())
    if spec.eps_at != "variance" or spec.correction or spec.whiten or spec.center != (spec.scale == "std"):
        _none(spec, "no layer divides so")
    if not spec.center:
        if spec.scale != "rms" or not last or channels_first or not _on(spec, erased, n):
            _none(spec, "RMSNorm takes the mean square over the last axes")
        sizes = shape[n - len(erased) :]
        return Plan("RMSNorm", (sizes,), eps, tuple(range(n)), sizes)
    if spec.running is not None:
        if len(kept) != 1 or n > 5:
            _none(spec, "BatchNorm1d to BatchNorm3d store statistics of one axis, the channels")
        name = "FrozenBatchNorm" if frozen else f"BatchNorm{max(n - 2, 1)}d"
        settings = eps if frozen else {**eps, "momentum": spec.running.momentum}
        return Plan(name, (shape[kept[0]],), settings, _first(kept[0], n), (shape[kept[0]],))
    if "grouped" in roles and kept == [0]:
        channel = roles.index("grouped")
        groups = spec.sizes.get("g") or shape[channel] // spec.sizes["c"]
        return Plan("GroupNorm", (groups, shape[channel]), eps, _first(channel, n), (shape[channel],))
    if len(kept) == 2 and kept[0] == 0 and 3 <= n <= 5 and not last and _on(spec, kept[1:], n):
        return Plan(f"InstanceNorm{n - 2}d", (shape[kept[1]],), eps, _first(kept[1], n), (shape[kept[1]],))
    if "grouped" in roles or not _on(spec, erased, n):
        return _one_group(spec, shape, roles)
    return _layer(spec, shape, erased, last, channels_first)


def _layer(
    spec: NormSpec, shape: tuple[int, ...], erased: list[int], last: bool, channels_first: bool
) -> Plan:
    n, eps = len(shape), {"eps": spec.eps}
    if len(erased) == 1 and (not last or (channels_first and n > 2)):
        return Plan(
            "ChannelsFirstLayerNorm", (shape[erased[0]],), eps, _first(erased[0], n), (shape[erased[0]],)
        )
    if not last or (channels_first and len(erased) != n - 1):
        _none(spec, "LayerNorm takes the last axes, ChannelsFirstLayerNorm the channels")
    sizes = shape[n - len(erased) :]
    if channels_first and n > 2:
        turned = (len(sizes) - 1, *range(len(sizes) - 1))
        sizes = tuple(sizes[axis] for axis in turned)
        return Plan("LayerNorm", (sizes,), eps, _first(n - 1, n), sizes, turned)
    return Plan("LayerNorm", (sizes,), eps, tuple(range(n)), sizes)


def _one_group(spec: NormSpec, shape: tuple[int, ...], roles: list[str]) -> Plan:
    """Over all of a sample with parameters on one axis: a group norm of one group."""
    n = len(shape)
    places = {where for where in (spec.weight, spec.bias) if where is not None}
    axes = [axis for axis, group in enumerate(expand(spec.pattern, n)) if " ".join(group) in places]
    if roles != ["kept", *["erased"] * (n - 1)] or len(axes) != 1 or len(places) != 1:
        _none(spec, "no layer of torch has its parameters on those axes")
    (channel,) = axes
    return Plan("GroupNorm", (1, shape[channel]), {"eps": spec.eps}, _first(channel, n), (shape[channel],))


def made(
    spec: NormSpec, plan: Plan, tensors: Mapping[str, Tensor], layers: str
) -> tuple[nn.Module, list[str]]:
    """The layer with its tensors, and what was added to it."""
    import normscope.nn

    home: Any = nn if layers == "torch" else normscope.nn
    make = getattr(home, plan.name, None)
    if make is None:
        raise BadInput(f"torch.nn has no {plan.name}. Port with layers='normscope', which has.")
    settings, notes = dict(plan.settings), []
    held = dict(tensors)
    affine = spec.weight is not None or spec.bias is not None
    if plan.name.startswith(("BatchNorm", "InstanceNorm", "GroupNorm")):
        settings["affine"] = affine
    elif plan.name.endswith("LayerNorm") or plan.name == "RMSNorm":
        settings["elementwise_affine"] = affine
    if spec.running is not None and plan.name.startswith("BatchNorm") and layers != "torch":
        settings["running_correction"] = int(spec.running.correction)
    layer: nn.Module = make(*plan.arguments, **settings)
    if affine and spec.weight is None and plan.name != "FrozenBatchNorm":
        like = held["bias"]
        held["weight"] = torch.ones(plan.parameters, dtype=like.dtype)
        notes.append(
            "it has no weight, and torch no bias without one: a weight of ones that takes no gradient"
        )
    for name in ("weight", "bias", *STORED):
        _put(layer, name, held.get(name), plan)
    if affine and spec.weight is None and isinstance(layer.weight, nn.Parameter):
        layer.weight.requires_grad_(False)
    return layer, notes


def _put(layer: nn.Module, name: str, tensor: Tensor | None, plan: Plan) -> None:
    if name not in layer._parameters and name not in layer._buffers:
        return
    if tensor is None:
        if name == "bias" and layer._parameters.get(name) is not None:
            layer.register_parameter(name, None)
        return
    wanted = plan.parameters
    if plan.turned and tensor.dim() == len(plan.turned):
        tensor = tensor.permute(plan.turned).contiguous()
    if tensor.numel() != torch.Size(wanted).numel():
        raise BadInput(
            f"{name} has shape {tuple(tensor.shape)}, and a {plan.name} on this input takes {wanted}. Pass "
            "input_shape, the sizes of an input of the source."
        )
    tensor = tensor.reshape(wanted)
    if name in layer._parameters:
        layer.register_parameter(name, nn.Parameter(tensor))
    else:
        setattr(layer, name, tensor)


def _roles(spec: NormSpec, ndim: int) -> list[str]:
    """Of each input axis: kept, erased, or grouped, which is partly both."""
    kept = set(spec.pattern.kept)
    roles = []
    for group in expand(spec.pattern, ndim):
        stays = [(ELLIPSIS if name.startswith(ELLIPSIS) else name) in kept for name in group]
        roles.append("kept" if all(stays) else "grouped" if any(stays) else "erased")
    return roles


def _on(spec: NormSpec, axes: list[int], ndim: int) -> bool:
    """Whether all parameters live on these axes, in order."""
    groups = expand(spec.pattern, ndim)
    own = " ".join(groups[axis][0] for axis in axes)
    return all(where in (None, own) for where in (spec.weight, spec.bias))


def _first(channel: int, ndim: int) -> Order:
    """The order that brings an axis to place 1."""
    others = [axis for axis in range(ndim) if axis != channel]
    return (others[0], channel, *others[1:]) if ndim > 1 else (channel,)


def _none(spec: NormSpec, why: str) -> NoReturn:
    raise UnknownNormalization(
        f"no layer of torch.nn or normscope.nn computes {spec.stats!r} as it is here ({why}). "
        "normscope.normalize(x, spec, weight, bias) computes any."
    )
