"""Adaptive group norm: group norm whose gain and bias are computed for every sample.

    y = (offset + scale) * (x - mean) / sqrt(var + eps) + shift

Mean and biased variance of each group of a sample's channels run over its positions too. Dhariwal and Nichol 2021,
https://arxiv.org/abs/2105.05233, section 3 (AdaGN). With as many groups as channels it is instance norm: of a style
vector by a linear layer as in StyleGAN, Karras et al. 2019, https://arxiv.org/abs/1812.04948, and of a table of styles
the conditional instance norm of Dumoulin et al. 2017, https://arxiv.org/abs/1610.07629.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normscope.errors import BadInput
from normscope.functional import normalize
from normscope.nn.arguments import on_axis_1, positive_eps, sizes
from normscope.nn.modulation import Modulated
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Unscriptable
from normscope.spec import NormSpec, families


class AdaptiveGroupNorm(Unscriptable, Modulated):
    """Group norm with scale and shift of every sample and channel.

    Arguments: num_groups, num_channels (equal: instance norm); and by name
        condition_features: K, where ``modulation`` makes scale and shift of a condition by a linear layer.
        classes: their number, where it makes them of a class, by a table.
        eps=1e-5; offset=1.0, what the scale counts from; zero=True: ``modulation`` starts so that the layer is group
        norm alone; device, dtype.
    Called ``layer(x, condition)`` with either of the first two, and else ``layer(x, scale=scale, shift=shift)``. With
    ``mask=`` or ``lengths=`` (along the last axis) the output is 0 where an element does not count.
    Shapes: x (N, C, ...); condition (N, K) or, of classes, (N,); scale and shift (N, C). Input and output float16,
    bfloat16, float32 or float64.

    Raises BadInput (a ValueError) where a size is below 1, the channels do not divide into the groups, eps is 0 or
    less, x has other channels, or what came with x is not what the layer was made for.

    >>> import torch
    >>> norm = AdaptiveGroupNorm(2, 4, condition_features=8)
    >>> norm(torch.randn(3, 4, 5, 5), torch.randn(3, 8)).shape
    torch.Size([3, 4, 5, 5])
    >>> norm.spec.stats, norm.spec.weight, norm.spec.source
    ('b (g c) ... -> b g', 'b (g c)', 'input')
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        *,
        condition_features: int | None = None,
        classes: int | None = None,
        eps: float = 1e-5,
        offset: float = 1.0,
        zero: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        (self.num_groups,) = sizes(
            name, "num_groups", num_groups, "1 is layer norm over channels and positions."
        )
        (self.num_channels,) = sizes(name, "num_channels", num_channels, "Give the size of axis 1.")
        if self.num_channels % self.num_groups:
            raise BadInput(
                f"{name} cuts the channels into equal groups; got {num_channels} channels and {num_groups} groups. "
                "Take a number of groups that divides the channels."
            )
        self.eps = positive_eps(name, eps)
        self._set_modulation(self.num_channels, condition_features, classes, zero, offset, device, dtype)

    def reset_parameters(self) -> None:
        """``modulation`` as new."""
        self._reset_modulation()

    def _check_shape(self, x: Tensor) -> None:
        on_axis_1(type(self).__name__, x, self.num_channels)

    def _norm(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return normalize(x, _spec(self.num_groups, self.eps, 1.0, False), mask=mask)

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(self.num_groups, float(self.eps), self.offset, True)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        said = [f"{self.num_groups}, {self.num_channels}", f"eps={self.eps}", self._said_modulation()]
        return ", ".join(text for text in said if text)


@remembered
def _spec(groups: int, eps: float, offset: float, affine: bool) -> NormSpec:
    bare = families.group_norm(groups, eps=eps, weight=False, bias=False)
    if not affine:
        return bare
    return bare.replace(weight="b (g c)", bias="b (g c)", source="input", weight_offset=offset)
