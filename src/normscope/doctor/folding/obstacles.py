"""The linear maps beside a norm, or why it cannot be folded into them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normscope.doctor.folding.linear_map import LinearMap
from normscope.doctor.tracing.ops import DROPOUTS, SLICES
from normscope.doctor.wording import listed, number

if TYPE_CHECKING:
    from normscope.doctor.folding.holdings import Holdings
    from normscope.doctor.folding.unseen import Unseen
    from normscope.doctor.site import Neighbour, Site

PASSED = DROPOUTS | SLICES
"""what a norm's gain and shift go past on their way to a reader: dropout does nothing in evaluation"""
PLAIN = (torch.Tensor, nn.Parameter)
Layer = nn.Linear | nn.modules.conv._ConvNd


@dataclass(frozen=True)
class Obstacle:
    """Why a fold would change the function."""

    reason: str
    shared: tuple[str, ...] = ()
    """names that would need copies of their own, where that takes the obstacle away"""
    bare: bool = False
    """the reason lacks its subject, the norm"""


def tampered(module: nn.Module, name: str) -> str:
    """Why another input or output of this module would be seen; "" where nobody looks."""
    if module._forward_hooks or module._forward_pre_hooks:
        return f"{name} has forward hooks, which would see other tensors"
    if "forward" in vars(module):
        return f"the forward of {name} was replaced"
    if "parametrizations" in module._modules:
        return f"the parameters of {name} are parametrized"
    return ""


@dataclass(frozen=True)
class Surroundings:
    """A model's names, how often each of its layers ran, and who reads what unseen."""

    holdings: Holdings
    runs: Counter[int]
    """id of a module -> calls in the forward"""
    unseen: Unseen

    def behind(self, site: Site, axis: int | None, *, bias: bool) -> LinearMap | Obstacle:
        """The one map whose output is the norm's input."""
        call = site.calls[0]
        if len(call.fed_by) != 1:
            feeders = listed([_told(one) for one in call.fed_by]) or "nothing that was followed"
            return Obstacle(f"its input is made of {feeders}")
        (one,) = call.fed_by
        if one.kind not in ("conv", "linear"):
            return Obstacle(f"its input comes from {_told(one)}")
        stands = [op for op in one.through[::-1] if op not in DROPOUTS]
        if stands:
            return Obstacle(f"{listed(stands)} stands between {_told(one)} and it")
        if axis is None or one.feature_axis != axis:
            return Obstacle(f"its statistics do not lie on the features that {_told(one)} makes")
        if one.consumers > 1:
            return Obstacle(
                f"the output of {_told(one)} has {one.consumers} readers, and the others want it as it is"
            )
        made = self._map(one, call.shape[axis], bias=bias, whole=True)
        assert site.module is not None
        if isinstance(made, LinearMap) and (seen := self.unseen.of_layer(one.weight, site.module)):
            return Obstacle(seen.format(f"the output of {_told(one)}"))
        return made

    def ahead(
        self, site: Site, axis: int | None, *, shift: float | None, identity: bool
    ) -> tuple[LinearMap, ...] | Obstacle:
        """All the maps that read the norm's output, where nothing else reads it.

        ``shift``: the largest there is, None where the norm can have none; 0 counts as one, so that a fresh model
        folds as a trained one. ``identity``: the norm would return its input.
        """
        found: list[LinearMap] = []
        weights: set[int] = set()
        call = site.calls[0]
        if not call.feeds:
            return Obstacle("nothing reads its output")
        for one in call.feeds:
            padding = _padding_layer(one)
            if one.kind == "output":
                return Obstacle("the model returns its output")
            if one.kind not in ("conv", "linear") and padding is None:
                return Obstacle(f"{_told(one)} reads its output, which is no linear layer or convolution")
            stands = [op for op in one.through if op not in PASSED]
            if stands:
                return Obstacle(f"{listed(stands)} stands between it and {_told(one)}")
            features = one.feature_axis if padding is None else len(call.shape) - padding.weight.dim() + 1
            if axis is None or features != axis:
                return Obstacle(f"its gain does not lie on the features that {_told(one)} reads")
            if one.padded and shift is not None:
                return Obstacle(_border(one, shift))
            made = self._map(one, call.shape[axis], bias=shift is not None, whole=False)
            if isinstance(made, Obstacle):
                return made
            found.append(made)
            weights.add(id(one.weight if padding is None else padding.weight))
        assert site.module is not None
        if seen := self.unseen.of_norm(site.module, weights, identity=identity):
            return Obstacle(seen.format("its output"))
        return tuple(found)

    def _map(self, one: Neighbour, size: int, *, bias: bool, whole: bool) -> LinearMap | Obstacle:
        """``size``: features of the norm. ``bias``: the fold adds to it. ``whole``: it scales the output, and with it
        a bias that is there."""
        name = _told(one)
        module, layer = one.module, _padding_layer(one)
        weight, held_bias, uses = one.weight, one.bias, one.weight_uses
        if layer is not None:
            weight, held_bias, uses = layer.weight, layer.bias, self.runs[id(layer)]
            weight = weight if self.holdings.names(weight) else None
        if weight is None or module is None:
            return Obstacle(
                f"the weight of {name} is computed in the forward (parametrized, standardized or packed)"
            )
        if one.kind == "linear" and (weight.dim() != 2 or weight.shape[int(whole == one.transposed)] != size):
            return Obstacle(
                f"the weight of {name}, {tuple(weight.shape)}, is not one matrix over {size} features"
            )
        own = isinstance(module, Layer) and getattr(module, "weight", None) is weight
        paths = self.holdings.paths(module)
        if own and len(paths) > 1:
            return Obstacle(f"{name} is registered under {len(paths)} names", tuple(paths[1:]))
        for what, tensor in (("weight", weight), ("bias", held_bias)):
            if tensor is not None and (found := self._tied(f"the {what} of {name}", tensor)):
                return found
        uses = max(uses, self.runs[id(module)] if own else 0)
        if uses > 1:
            return Obstacle(f"the weight of {name} is used {uses} times in a forward")
        for what, tensor in (("weight", weight), ("bias", held_bias)):
            if tensor is not None and (read := self.unseen.of_held(tensor)):
                return Obstacle(read.format(f"the {what} of {name}"))
        if seen := tampered(module, one.path or "the model"):
            return Obstacle(seen)
        if held_bias is None and (bias or whole) and (not own or getattr(module, "bias", None) is not None):
            return Obstacle(f"{name} is a call of a function, whose bias is out of reach")
        takes_bias = own and "bias" in _names_in(type(module).forward)
        if held_bias is None and bias and not takes_bias:
            return Obstacle(f"the forward of {type(module).__name__} at {one.path} takes no bias")
        (weight_name,) = self.holdings.names(weight)
        return LinearMap(
            path=paths[0],
            op=one.op if layer is None else f"conv{weight.dim() - 2}d",
            weight=weight_name,
            bias=self.holdings.names(held_bias)[0] if held_bias is not None else _beside(weight_name),
            has_bias=held_bias is not None,
            features=_features(module) if takes_bias else 0,
            transposed=one.transposed,
            padded=one.padded,
        )

    def _tied(self, what: str, tensor: torch.Tensor) -> Obstacle | None:
        names = self.holdings.names(tensor)
        if type(tensor) not in PLAIN:
            return Obstacle(f"{what} is a {type(tensor).__name__}")
        if not names:
            return Obstacle(f"{what} is neither a parameter nor a buffer of the model")
        if len(names) > 1:
            return Obstacle(f"{what} is tied: it is {' and '.join(names)}", tuple(names[1:]))
        if not self.holdings.alone(tensor):
            return Obstacle(f"{what} shares its memory with another tensor of the model")
        return None


def both(before: Obstacle, after: Obstacle) -> Obstacle:
    """Why a norm goes neither way."""
    return Obstacle(
        f"not backwards: {before.reason}; not forwards: {after.reason}", before.shared or after.shared
    )


def _told(one: Neighbour) -> str:
    if one.kind == "input":
        return "the model's input"
    path = one.path or "the model"
    return f"{path} ({one.op})" if one.kind != "add" else f"a sum in {path}"


def _padding_layer(one: Neighbour) -> nn.modules.conv._ConvNd | None:
    """The convolution whose own padding, by values of the image, the norm feeds."""
    module = one.module
    pads = one.op == "pad" and isinstance(module, nn.modules.conv._ConvNd) and one.consumers == 1
    return module if pads and module.padding_mode != "zeros" else None  # type: ignore[union-attr,return-value]


def _border(one: Neighbour, shift: float) -> str:
    where = "between the elements and at the border" if one.transposed else "at the border"
    size = f"of up to {number(shift)}" if shift else "(0 with these values)"
    return (
        f"{_told(one)} fills in zeros {where}, where the norm's shift {size} would be missing, and "
        "no bias makes up for that"
    )


def _names_in(forward: Any) -> tuple[str, ...]:
    code = getattr(forward, "__code__", None)
    return ("bias",) if code is None else code.co_names


def _beside(weight: str) -> str:
    """Name of the bias of the module that holds the weight.

    >>> _beside("body.0.weight"), _beside("weight")
    ('body.0.bias', 'bias')
    """
    return ".".join((*weight.split(".")[:-1], "bias"))


def _features(module: nn.Module) -> int:
    return int(getattr(module, "out_features", getattr(module, "out_channels", 0)))
