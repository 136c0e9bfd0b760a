"""Spatially adaptive norm (SPADE): batch or instance norm whose gain and bias are computed for every position.

    y = (1 + scale) * (x - mean) / sqrt(var + eps) + shift

scale and shift have the shape of x. They come with the call, or are made of a map of labels: brought to the size of x
(nearest), a convolution and ReLU, and of these a convolution each. Mean and biased variance are those of batch norm,
with running statistics, or of instance norm. Park et al. 2019, https://arxiv.org/abs/1903.07291, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from normscope.errors import BadInput
from normscope.functional import normalize
from normscope.nn.arguments import on_axis_1, positive_eps, sizes
from normscope.nn.conditional_batch_norm import GivenAffineBatchNorm
from normscope.nn.masking import Lengths, not_packed
from normscope.nn.modulation import GivenAffine, modulated_leaf
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, Unscriptable
from normscope.spec import NormSpec, families


class _Maps(GivenAffine):
    """Mixin: scale and shift of each position, and where they come from. The names are those of the paper's code."""

    num_features: int
    offset = 1.0
    mlp_shared: nn.Sequential | None
    mlp_gamma: nn.Conv2d | None
    mlp_beta: nn.Conv2d | None

    def _set_maps(
        self, label_channels: int | None, hidden: int, kernel_size: int, device: Any, dtype: Any
    ) -> None:
        self.mlp_shared = self.mlp_gamma = self.mlp_beta = None
        if label_channels is None:
            return
        name = type(self).__name__
        (labels,) = sizes(
            name, "label_channels", label_channels, "It is the number of channels of the label map."
        )
        (width,) = sizes(name, "hidden", hidden, "The paper's is 128.")
        (kernel,) = sizes(name, "kernel_size", kernel_size, "The paper's is 3.")
        if kernel % 2 == 0:
            raise BadInput(
                f"{name} needs an odd kernel_size, to keep sizes; got {kernel_size!r}. The paper's is 3."
            )

        def convolution(channels: int, out: int) -> nn.Conv2d:
            return nn.Conv2d(channels, out, kernel, padding=kernel // 2, device=device, dtype=dtype)

        self.mlp_shared = nn.Sequential(convolution(labels, width), nn.ReLU())
        self.mlp_gamma = convolution(width, self.num_features)
        self.mlp_beta = convolution(width, self.num_features)

    def _reset_maps(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                module.reset_parameters()

    def forward(
        self,
        input: Tensor,
        labels: Tensor | None = None,
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
                self, input, fill, labels=labels, scale=scale, shift=shift, mask=mask, lengths=lengths
            )
        not_packed(self, input, fill)
        self._check_shape(input)
        scale, shift = self._maps(input, labels, scale, shift)
        return self._modulate(input, scale, shift, mask, lengths, fill)

    def _maps(
        self, input: Tensor, labels: Tensor | None, scale: Tensor | None, shift: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        name = type(self).__name__
        if self.mlp_shared is None or self.mlp_gamma is None or self.mlp_beta is None:
            if labels is not None or scale is None or shift is None:
                raise BadInput(
                    f"{name} was made without label_channels and takes scale= and shift=. Pass both, or make the layer "
                    "for label maps."
                )
        elif labels is None or scale is not None or shift is not None:
            raise BadInput(
                f"{name} makes scale and shift of the label map and takes that alone. Pass layer(x, labels)."
            )
        else:
            first = self.mlp_shared[0]
            assert isinstance(first, nn.Conv2d)
            if labels.dim() != 4 or labels.shape[:2] != (input.shape[0], first.in_channels):
                raise BadInput(
                    f"{name} takes a label map (N, {first.in_channels}, H, W) with a map for every sample of an input "
                    f"{tuple(input.shape)}; got shape {tuple(labels.shape)}. Classes are one-hot channels."
                )
            if labels.dtype != first.weight.dtype and not torch.is_autocast_enabled(labels.device.type):
                raise BadInput(
                    f"{name} takes a label map in the dtype of its convolutions, {first.weight.dtype}; got "
                    f"{labels.dtype}. Use labels.to(layer.mlp_gamma.weight.dtype)."
                )
            # an empty batch has no map to resize
            fits = labels.shape[2:] == input.shape[2:]
            near = labels if fits else interpolate(labels, size=input.shape[2:], mode="nearest")
            made = self.mlp_shared(near)
            scale, shift = self.mlp_gamma(made), self.mlp_beta(made)
        for what, tensor in (("scale", scale), ("shift", shift)):
            if tensor.shape != input.shape:
                raise BadInput(
                    f"{name} takes a {what} of the shape of its input, {tuple(input.shape)}; got "
                    f"{tuple(tensor.shape)}. Where it is one for all positions, use ConditionalBatchNorm2d."
                )
        return scale, shift


class SpatiallyAdaptiveBatchNorm2d(_Maps, GivenAffineBatchNorm):  # type: ignore[misc]  # another forward
    """SPADE over batch norm, of inputs (N, C, H, W).

    Arguments: num_features; and by name
        label_channels: channels of the label map that scale and shift are made of; None: they come with the call.
        hidden=128; kernel_size=3: of the convolutions.
        eps=1e-5; momentum=0.1 (None: the plain average of all batches); track_running_stats=True; device, dtype;
        float32_statistics=True: running statistics stay float32 in a half module.
    Called ``layer(x, labels)``, or ``layer(x, scale=scale, shift=shift)``. With ``mask=`` or ``lengths=`` (along the
    last axis) statistics are over the elements that count, and the output is 0 elsewhere.
    Shapes: labels (N, label_channels, any H, any W); scale and shift as x; statistics (C,). Input and output float16,
    bfloat16, float32 or float64. State dict: running_mean, running_var, num_batches_tracked, and of the paper's code
    ``mlp_shared.0``, ``mlp_gamma`` and ``mlp_beta``; its ``param_free_norm.running_mean`` and so on are loaded too.

    Raises BadInput (a ValueError) where the input has another number of axes or channels, where what came with it is
    not what the layer was made for, where training sees one value a channel, or where eps is 0 or less.

    >>> import torch
    >>> norm = SpatiallyAdaptiveBatchNorm2d(3, label_channels=5, hidden=8)
    >>> norm(torch.randn(2, 3, 4, 4), torch.randn(2, 5, 16, 16)).shape
    torch.Size([2, 3, 4, 4])
    >>> norm.spec.stats, norm.spec.weight
    ('b c ... -> c', 'b c ...')
    """

    _ndim = (4, 4)
    _affine_on = "b c ..."

    def __init__(
        self,
        num_features: int,
        *,
        label_channels: int | None = None,
        hidden: int = 128,
        kernel_size: int = 3,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        float32_statistics: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, track_running_stats, device, dtype, float32_statistics)
        self._set_maps(label_channels, hidden, kernel_size, device, dtype)

    def reset_parameters(self) -> None:
        """Convolutions and running statistics as new."""
        super().reset_parameters()
        self._reset_maps()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            theirs = f"{prefix}param_free_norm.{name}"
            if theirs in state_dict:
                state_dict[prefix + name] = state_dict.pop(theirs)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return self._said_shared() + ("" if self.float32_statistics else ", float32_statistics=False")


class SpatiallyAdaptiveInstanceNorm2d(Unscriptable, _Maps):
    """SPADE over instance norm, of inputs (N, C, H, W).

    Arguments: num_features; and by name label_channels=None; hidden=128; kernel_size=3; eps=1e-5; device, dtype.
    Called, and with shapes and errors, as `SpatiallyAdaptiveBatchNorm2d`; it has no statistics to store.

    >>> import torch
    >>> norm = SpatiallyAdaptiveInstanceNorm2d(1)
    >>> x, scale = torch.tensor([[[[1.0, 3.0]]]]), torch.tensor([[[[0.0, 1.0]]]])
    >>> norm(x, scale=scale, shift=torch.zeros(1, 1, 1, 2)).round(decimals=3)
    tensor([[[[-1.,  2.]]]])
    """

    def __init__(
        self,
        num_features: int,
        *,
        label_channels: int | None = None,
        hidden: int = 128,
        kernel_size: int = 3,
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        (self.num_features,) = sizes(name, "num_features", num_features, "Give the size of axis 1.")
        self.eps = positive_eps(name, eps)
        self._set_maps(label_channels, hidden, kernel_size, device, dtype)

    def reset_parameters(self) -> None:
        """Convolutions as new."""
        self._reset_maps()

    def _check_shape(self, x: Tensor) -> None:
        on_axis_1(type(self).__name__, x, self.num_features, "H, W")

    def _norm(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return normalize(x, _spec(self.eps, False), mask=mask)

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(float(self.eps), True)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.num_features}, eps={self.eps}"


@remembered
def _spec(eps: float, affine: bool) -> NormSpec:
    bare = families.instance_norm(eps=eps, ndim=(4, 4))
    if not affine:
        return bare
    return bare.replace(weight="b c ...", bias="b c ...", source="input", weight_offset=1.0)
