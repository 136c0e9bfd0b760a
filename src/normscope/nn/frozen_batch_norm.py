"""Frozen batch norm: batch norm by stored statistics, in training as in evaluation, nothing of which ever moves.

    y = weight * (x - running_mean) / sqrt(running_var + eps) + bias

As in detection models fine-tuned with small batches: He et al. 2017, https://arxiv.org/abs/1703.06870;
torchvision.ops.FrozenBatchNorm2d.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normscope.errors import BadInput
from normscope.functional import batch_norm
from normscope.nn.arguments import positive_eps, sizes
from normscope.nn.float32_statistics import Float32Statistics
from normscope.nn.masking import by_element, is_packed, masked_leaf, normalize_valid, valid
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, Unscriptable
from normscope.spec import NormSpec, RunningState, families


class FrozenBatchNorm(Unscriptable, Float32Statistics):
    """Batch norm of (N, C, ...) whose four vectors are buffers: no optimizer and no batch moves them.

    Arguments: num_features; eps=1e-5; device, dtype; and ``float32_statistics=True``: running statistics stay float32
    in a half module.
    Shapes: the buffers weight, bias, running_mean and running_var (C,). Input and output float16, bfloat16, float32
    or float64. Loads the state dicts of batch norms and of torchvision's FrozenBatchNorm2d, with or without
    num_batches_tracked, which means nothing here and is dropped. It is no ``torch.nn.BatchNorm2d`` by class, so that
    code which freezes, converts or synchronizes batch norms leaves it alone.

    Raises BadInput (a ValueError) where num_features is below 1, eps is 0 or less, or axis 1 has another size.

    >>> import torch
    >>> frozen = FrozenBatchNorm(3)
    >>> frozen.load_state_dict(torch.nn.BatchNorm2d(3).state_dict())
    <All keys matched successfully>
    >>> frozen, len(list(frozen.parameters())), frozen(torch.ones(2, 3, 4, 4)).shape
    (FrozenBatchNorm(3, eps=1e-05), 0, torch.Size([2, 3, 4, 4]))
    """

    __constants__ = ("eps", "num_features")
    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
        *,
        float32_statistics: bool = True,
    ) -> None:
        super().__init__()
        (self.num_features,) = sizes(
            "FrozenBatchNorm", "num_features", num_features, "Give the size of axis 1."
        )
        self.eps = positive_eps("FrozenBatchNorm", eps)
        self.float32_statistics = float32_statistics
        for name, start in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((self.num_features,), start, device=device, dtype=dtype))
        self._keep_statistics()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(
        self, input: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, fill: str = "zero"
    ) -> Tensor:
        """The stored statistics, in training as in evaluation. Masks: see `normscope.nn.masking`; lengths run along
        the last axis.
        """
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        if is_packed(self, input, mask, lengths, fill):
            return by_element(input, self.forward)
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise BadInput(
                f"FrozenBatchNorm was made for an input (N, {self.num_features}, ...); got an input of shape "
                f"{tuple(input.shape)}. For one sample use x.unsqueeze(0)."
            )
        if mask is not None or lengths is not None:
            counts = valid("FrozenBatchNorm", input, mask, lengths)
            state = RunningState(self.running_mean, self.running_var)
            return normalize_valid(
                input, self.spec, self.weight, self.bias, counts, fill, running=state, training=False
            )
        return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(float(self.eps))

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        kept = "" if self.float32_statistics else ", float32_statistics=False"
        return f"{self.num_features}, eps={self.eps}{kept}"


@remembered
def _spec(eps: float) -> NormSpec:
    return families.batch_norm(eps=eps, momentum=0.0)
