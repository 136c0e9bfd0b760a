"""Layer norm over the channels of every position of (N, C, ...), the parameters on the channels.

    y[n, c, p] = weight[c] * (x[n, c, p] - mean[n, p]) / sqrt(var[n, p] + eps) + bias[c]

var is the biased variance over the C channels. The channels-first form in ConvNeXt: Liu et al. 2022,
https://arxiv.org/abs/2201.03545, section 2.6, whose eps is 1e-6.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from normscope.errors import BadInput
from normscope.functional import normalize
from normscope.nn.arguments import positive_eps, sizes
from normscope.nn.masking import by_element, is_packed, masked_leaf, normalize_masked
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, Unscriptable
from normscope.spec import NormSpec, families


class ChannelsFirstLayerNorm(Unscriptable, nn.LayerNorm):
    """Layer norm over axis 1: a ``torch.nn.LayerNorm`` by class, parameters and state dict, at another place.

    Arguments: num_channels; eps=1e-6; elementwise_affine, whether there are parameters; bias, whether a bias is among
    them; device, dtype.
    Shapes: input (N, C, ...) of any number of positions, contiguous or channels-last; parameters (C,). Input and
    output float16, bfloat16, float32 or float64.

    Raises BadInput (a ValueError) where num_channels is below 1, eps is 0 or less, or axis 1 has another size.

    >>> import torch
    >>> norm = ChannelsFirstLayerNorm(3)
    >>> norm
    ChannelsFirstLayerNorm(3, eps=1e-06, elementwise_affine=True, bias=True)
    >>> x = torch.randn(2, 3, 5, 5)
    >>> last = torch.nn.functional.layer_norm(x.permute(0, 2, 3, 1), (3,), eps=1e-6).permute(0, 3, 1, 2)
    >>> torch.allclose(norm(x), last, atol=1e-5)
    True
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        shape = sizes("ChannelsFirstLayerNorm", "num_channels", num_channels, "Give the size of axis 1.")
        eps = positive_eps("ChannelsFirstLayerNorm", eps)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)

    def forward(
        self, input: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, fill: str = "zero"
    ) -> Tensor:
        """Statistics of each position, in training as in evaluation. Masks: see `normscope.nn.masking`;
        lengths run along the last axis.
        """
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        if is_packed(self, input, mask, lengths, fill):
            return by_element(input, self.forward)
        (channels,) = self.normalized_shape
        if input.dim() < 2 or input.shape[1] != channels:
            raise BadInput(
                f"ChannelsFirstLayerNorm was made for an input (N, {channels}, ...); got an input of shape "
                f"{tuple(input.shape)}. For channels in the last axis use LayerNorm({channels})."
            )
        if mask is not None or lengths is not None:
            return normalize_masked(self, input, mask, lengths, fill)
        return normalize(input, self.spec, self.weight, self.bias)

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(float(self.eps), self.weight is not None, self.bias is not None)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return (
            f"{self.normalized_shape[0]}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, "
            f"bias={self.bias is not None}"
        )


@remembered
def _spec(eps: float, weight: bool, bias: bool) -> NormSpec:
    return families.channels_first_layer_norm(eps=eps, weight=weight, bias=bias)
