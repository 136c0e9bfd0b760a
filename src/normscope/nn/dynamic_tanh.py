"""Dynamic Tanh (DyT): what stands in a transformer in place of its norms, without any statistic.

    y = weight * tanh(alpha * x) + bias

alpha is one learned number; weight and bias are of the features. It is no normalization: every element is mapped on its
own. It is the control of a study that asks what normalization is for. Zhu, Chen, He, LeCun and Liu 2025, Transformers
without Normalization, https://arxiv.org/abs/2503.10622, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import BadInput
from normscope.nn.arguments import floating, last_sizes, on_axis_1, sizes
from normscope.nn.masking import by_element, is_packed, masked_leaf
from normscope.nn.torch_tools import Proxy, Unscriptable


class DynamicTanh(Unscriptable):
    """Dynamic Tanh, with the arguments and the state dict of the paper's code.

    Arguments: normalized_shape, the size of the features; channels_last=True, or False where they are on axis 1;
    alpha_init_value=0.5, what alpha starts at; device, dtype.
    Shapes: input (..., *normalized_shape), with ``channels_last=False`` (N, C, ...); alpha (1,), weight and bias
    ``normalized_shape``. Input and output float16, bfloat16, float32 or float64; half types are computed in float32.

    Raises BadInput (a ValueError) where a size is below 1, alpha_init_value is not finite, or the input has other
    features. It has no ``spec``, and `normscope.spec_of` says why.

    >>> import torch
    >>> DynamicTanh(2)(torch.tensor([[0.0, 100.0]])).tolist()
    [[0.0, 1.0]]
    >>> sorted(DynamicTanh(2).state_dict())
    ['alpha', 'bias', 'weight']
    """

    outside_family = "is no normalization: weight * tanh(alpha * x) + bias maps every element on its own"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        channels_last: bool = True,
        alpha_init_value: float = 0.5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        fix = "Give the sizes of the features, such as x.shape[-1]."
        self.normalized_shape = sizes("DynamicTanh", "normalized_shape", normalized_shape, fix)
        if not channels_last and len(self.normalized_shape) > 1:
            raise BadInput(
                "DynamicTanh has one axis of features where channels_last=False; got normalized_shape="
                f"{normalized_shape!r}. Give the size of axis 1."
            )
        if not math.isfinite(alpha_init_value):
            raise BadInput(
                f"DynamicTanh needs a finite alpha_init_value; got {alpha_init_value!r}. The paper's is 0.5."
            )
        self.channels_last = channels_last
        self.alpha_init_value = alpha_init_value
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1, bias 0, and alpha as it was given."""
        nn.init.constant_(self.alpha, self.alpha_init_value)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Element by element, in training as in evaluation."""
        if isinstance(input, Proxy):
            return masked_leaf(self, input, None, None, "zero")
        if is_packed(self, input):
            return by_element(input, self.forward)
        floating("DynamicTanh", input)
        beside = self.normalized_shape
        if self.channels_last:
            last_sizes("DynamicTanh", input, self.normalized_shape)
        else:
            on_axis_1("DynamicTanh", input, beside[0])
            beside = (*beside, *[1] * (input.dim() - 2))
        dtype = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
        alpha, weight, bias = (each.to(dtype) for each in (self.alpha, self.weight, self.bias))
        y = torch.addcmul(bias.view(beside), torch.tanh(alpha * input.to(dtype)), weight.view(beside))
        return y.to(input.dtype)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return (
            f"{self.normalized_shape}, channels_last={self.channels_last}, "
            f"alpha_init_value={self.alpha_init_value}"
        )
