"""Layer norm: every position by its mean and variance over the last axes.

    y = weight * (x - mean) / sqrt(var + eps) + bias

var is the biased variance. Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450, equation 4.
"""

from __future__ import annotations

from torch import Tensor, nn

from normscope.functional import layer_norm
from normscope.nn.arguments import last_sizes
from normscope.nn.masking import by_element, is_packed, masked_leaf, normalize_masked
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, is_scripting, method
from normscope.spec import NormSpec, families
from normscope.spec.axes import last_axes


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last axes: a ``torch.nn.LayerNorm``.

    Arguments: torch's, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, device, dtype.
    Shapes: input (..., *normalized_shape), parameters ``normalized_shape``. Input and output float16, bfloat16,
    float32 or float64; the parameters may have another dtype.

    Raises RuntimeError where the input does not end in ``normalized_shape``, as torch does. For the channels of an
    input (N, C, ...) there is `ChannelsFirstLayerNorm`.

    >>> import torch
    >>> norm = LayerNorm(4)
    >>> norm
    LayerNorm((4,), eps=1e-05, elementwise_affine=True...)
    >>> norm(torch.tensor([[1e6, 1e6, 1e6, 1e6]])).tolist()
    [[0.0, 0.0, 0.0, 0.0]]
    >>> norm.spec.stats, norm.spec.eps
    ('... d -> ...', 1e-05)
    """

    __jit_unused_properties__ = ("spec",)
    _scripted = method("_scripted", nn.LayerNorm.forward)

    def forward(
        self, input: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, fill: str = "zero"
    ) -> Tensor:
        """Statistics of each position, in training as in evaluation. Masks: see `normscope.nn.masking`; lengths run
        along axis 1.
        """
        if is_scripting():
            return self._scripted(input)
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        if is_packed(self, input, mask, lengths, fill):
            return by_element(input, self.forward)
        if mask is not None or lengths is not None:
            last_sizes("LayerNorm", input, self.normalized_shape)
            return normalize_masked(
                self, input, mask, lengths, fill, time=1, axes=2 + len(self.normalized_shape)
            )
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(
            len(self.normalized_shape), float(self.eps), self.weight is not None, self.bias is not None
        )


@remembered
def _spec(axes: int, eps: float, weight: bool, bias: bool) -> NormSpec:
    return families.layer_norm(last_axes(axes), eps=eps, weight=weight, bias=bias)
