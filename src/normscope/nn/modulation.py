"""Gain and bias that are computed: what adaptive, conditional and spatially adaptive norms share.

    y = (offset + scale) * (x - mean) / denominator + shift

scale and shift come with the call, or are made of a condition that comes with it: by a linear layer of K features, or
by a table of classes. ``modulation`` is that layer; its 2 C outputs are first all scales, then all shifts. What the
scale counts from is 1 (``offset``), as in DiT and SPADE; FiLM's, which counts from 0, takes ``offset=0.0``.

Half types are computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from normscope.errors import BadInput
from normscope.kernels import dispatch
from normscope.kernels.elementary import HALF
from normscope.nn.arguments import sizes
from normscope.nn.masking import Lengths, known_fill, not_packed, valid
from normscope.nn.torch_tools import Proxy, leaf


class GivenAffine(nn.Module):
    """Base of layers whose scale and shift are no parameters."""

    offset: float
    _time = -1
    """the axis that lengths run along"""

    def _check_shape(self, x: Tensor) -> None:
        """Raise BadInput where x is no input of this layer."""
        raise NotImplementedError

    def _norm(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The norm alone; 0 where the mask is False."""
        raise NotImplementedError

    def _modulate(
        self,
        input: Tensor,
        scale: Tensor,
        shift: Tensor,
        mask: Tensor | None,
        lengths: Lengths | None,
        fill: str,
    ) -> Tensor:
        """Scale and shift broadcast to the input."""
        counts = None
        if mask is not None or lengths is not None:
            counts = valid(type(self).__name__, input, mask, lengths, time=self._time)
        return modulated(input, lambda x: self._norm(x, counts), scale, shift, self.offset, counts, fill)


class Modulated(GivenAffine):
    """Mixin: scale and shift of each sample, and where they come from."""

    modulation: nn.Linear | nn.Embedding | None
    zero: bool
    _features = 1
    """the axis of scale and shift in an input"""

    def forward(
        self,
        input: Tensor,
        condition: Tensor | None = None,
        *,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        fill: str = "zero",
    ) -> Tensor:
        """By the statistics of the input, or stored ones. Masks: see `normscope.nn.masking`."""
        if isinstance(input, Proxy):
            return modulated_leaf(
                self, input, fill, condition=condition, scale=scale, shift=shift, mask=mask, lengths=lengths
            )
        not_packed(self, input, fill)
        self._check_shape(input)
        shape, beside = self._shapes(input)
        scale, shift = self._scale_and_shift(condition, scale, shift, shape)
        return self._modulate(input, scale.reshape(beside), shift.reshape(beside), mask, lengths, fill)

    def _shapes(self, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of scale and shift: as they come, and as they stand beside x."""
        beside = [1] * x.dim()
        for axis in (0, self._features):
            beside[axis] = x.shape[axis]
        return (x.shape[0], x.shape[self._features]), tuple(beside)

    def _set_modulation(
        self,
        features: int,
        condition_features: int | None,
        classes: int | None,
        zero: bool,
        offset: float,
        device: Any,
        dtype: Any,
    ) -> None:
        name = type(self).__name__
        if condition_features is not None and classes is not None:
            raise BadInput(
                f"{name} makes scale and shift of a vector (condition_features) or of a class (classes); got "
                f"condition_features={condition_features!r} and classes={classes!r}. Give one of them."
            )
        if not math.isfinite(float(offset)):
            raise BadInput(
                f"{name} needs a finite offset; got {offset!r}. It is 1.0, or 0.0 for FiLM's gain."
            )
        self.offset, self.zero = float(offset), zero
        self.modulation = None
        fix = "It is the size of what the layer is conditioned on."
        if condition_features is not None:
            (size,) = sizes(name, "condition_features", condition_features, fix)
            self.modulation = nn.Linear(size, 2 * features, device=device, dtype=dtype)
        elif classes is not None:
            (size,) = sizes(name, "classes", classes, fix)
            self.modulation = nn.Embedding(size, 2 * features, device=device, dtype=dtype)
        if zero or classes is not None:  # else it is as torch made it
            self._reset_modulation()

    def _reset_modulation(self) -> None:
        """Scale 1 - offset and shift 0 whatever the condition, so that a new layer is the norm alone; with
        ``zero=False`` as torch's layer is made, of a table scales about there and shifts 0.
        """
        if self.modulation is None:
            return
        features = self.modulation.weight.shape[-1 if isinstance(self.modulation, nn.Embedding) else 0] // 2
        with torch.no_grad():
            if isinstance(self.modulation, nn.Embedding):
                self.modulation.weight.zero_()
                scales = self.modulation.weight[:, :features]
                scales.fill_(1 - self.offset) if self.zero else scales.normal_(1 - self.offset, 0.02)
            elif self.zero:
                self.modulation.weight.zero_()
                self.modulation.bias.zero_()
                self.modulation.bias[:features] = 1 - self.offset
            else:
                self.modulation.reset_parameters()

    def _scale_and_shift(
        self, condition: Tensor | None, scale: Tensor | None, shift: Tensor | None, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Both of ``shape``. Raises BadInput where the call gave something else than the layer was made for."""
        name = type(self).__name__
        if self.modulation is None:
            if condition is not None or scale is None or shift is None:
                raise BadInput(
                    f"{name} was made without a condition and takes scale= and shift=; got "
                    f"{_given(condition, scale, shift)}. Pass both, or make the layer with condition_features=."
                )
        elif condition is None or scale is not None or shift is not None:
            raise BadInput(
                f"{name} makes scale and shift of the condition and takes that alone; got "
                f"{_given(condition, scale, shift)}. Pass layer(x, condition)."
            )
        else:
            scale, shift = self._by_condition(condition, shape)
        for what, tensor in (("scale", scale), ("shift", shift)):
            if tuple(tensor.shape) != shape:
                raise BadInput(
                    f"{name} takes a {what} of shape {shape} with this input; got {tuple(tensor.shape)}. It has a "
                    "number for every sample and channel, and no axes of size 1."
                )
        return scale, shift

    def _by_condition(self, condition: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        assert self.modulation is not None
        name = type(self).__name__
        classes = self.modulation.num_embeddings if isinstance(self.modulation, nn.Embedding) else 0
        if isinstance(self.modulation, nn.Embedding):
            wanted, of = shape[:-1], f"classes, whole numbers below {classes},"
        else:
            wanted, of = (*shape[:-1], self.modulation.in_features), "a condition"
        if not isinstance(condition, Tensor):
            raise BadInput(
                f"{name} takes {of} as a tensor of shape {wanted}; got {condition!r}. Use torch.tensor."
            )
        whole = condition.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        fits = whole if classes else condition.is_floating_point()
        if not fits or tuple(condition.shape) != wanted:
            raise BadInput(
                f"{name} takes {of} of shape {wanted} with this input; got {condition.dtype} of shape "
                f"{tuple(condition.shape)}. There is one for every sample."
            )
        if classes:
            condition = condition.long()
            _within(name, condition, classes)
        elif condition.dtype != self.modulation.weight.dtype and not torch.is_autocast_enabled(
            condition.device.type
        ):
            raise BadInput(
                f"{name} takes a condition in the dtype of its modulation, {self.modulation.weight.dtype}; got "
                f"{condition.dtype}. Use condition.to(layer.modulation.weight.dtype)."
            )
        scale, shift = self.modulation(condition).chunk(2, -1)
        return scale, shift

    def _said_modulation(self) -> str:
        """What `extra_repr` ends with."""
        return ", ".join(
            text
            for text, differs in ((f"offset={self.offset}", self.offset != 1), ("zero=False", not self.zero))
            if differs
        )


def modulated(
    input: Tensor,
    norm: Callable[[Tensor], Tensor],
    scale: Tensor,
    shift: Tensor,
    offset: float,
    mask: Tensor | None,
    fill: str,
) -> Tensor:
    """(offset + scale) * norm(input) + shift, in the dtype of ``input``.

    ``norm`` has no gain and no bias, and gives 0 where the mask is False; there 0 stands, or the shift where
    ``fill="bias"``. ``scale`` and ``shift`` broadcast to the input.

    >>> x, one = torch.tensor([[1.0, 3.0]]), torch.ones(1, 1)
    >>> modulated(x, lambda x: x - 2, 4 * one, one, 1.0, None, "zero")
    tensor([[-4.,  6.]])
    """
    known_fill(fill)
    wide = torch.float32 if input.dtype in HALF else input.dtype
    gain, bias = scale.to(wide) + offset, shift.to(wide)
    if mask is not None and gain.shape == input.shape:  # a gain there may be anything
        gain = gain.masked_fill(~mask, 0.0)
        bias = bias if fill == "bias" else bias.masked_fill(~mask, 0.0)
    y = torch.addcmul(bias, norm(input.to(wide)), gain).to(input.dtype)
    return y if mask is None or fill == "bias" else y.masked_fill(~mask, 0.0)


def _within(name: str, ids: Tensor, classes: int) -> None:
    """Raise BadInput where an id is no class; a program, or a function that is being transformed, cannot ask."""
    if not ids.numel() or ids.is_meta or is_compiling() or dispatch.transforming() or dispatch.tracing():
        return
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= classes:
        raise BadInput(
            f"{name} was made for {classes} classes, counted from 0; got class {low if low < 0 else high}. Make the "
            "layer with a larger classes=, or give the unknown ones a class of their own."
        )


def modulated_leaf(layer: nn.Module, input: Any, fill: str, **given: Any) -> Tensor:
    """The call of ``layer`` as one node of the graph that torch.fx traces, with what is not the default."""
    told = {name: value for name, value in given.items() if value is not None}
    return leaf(layer, input, **told, **({} if fill == "zero" else {"fill": fill}))


def _given(condition: Tensor | None, scale: Tensor | None, shift: Tensor | None) -> str:
    named = (("a condition", condition), ("scale", scale), ("shift", shift))
    return " and ".join(name for name, value in named if value is not None) or "neither"
