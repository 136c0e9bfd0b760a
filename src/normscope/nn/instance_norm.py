"""Instance norm: every channel of every sample by its mean and variance over positions.

    y = weight * (x - mean) / sqrt(var + eps) + bias

var is the biased variance. With ``track_running_stats=True`` the mean over samples of the batch's statistics is
stored (the variance with M / (M - 1)), and evaluation normalizes by it. Ulyanov, Vedaldi and Lempitsky 2016,
https://arxiv.org/abs/1607.08022, equation 2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from normscope.functional import instance_norm
from normscope.nn.float32_statistics import Float32Statistics
from normscope.nn.masking import by_sequence, is_packed, masked_leaf, normalize_valid, valid
from normscope.nn.optional_bias import OptionalBias
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, is_scripting, method
from normscope.spec import NormSpec, RunningState, families


class _InstanceNorm(Float32Statistics, OptionalBias, nn.modules.instancenorm._InstanceNorm):
    """What the three share; they differ in the number of axes they take. torch's own forward checks the input."""

    __jit_unused_properties__ = ("spec",)
    _torch_forward = method("_torch_forward", nn.modules.instancenorm._InstanceNorm.forward)
    _torch_apply = method("_torch_apply", nn.modules.instancenorm._InstanceNorm._apply_instance_norm)
    _ndim: int
    """of batched inputs"""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        float32_statistics: bool = True,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,  # type: ignore[arg-type]  # torch's annotation lacks None, its code does not
            affine,
            track_running_stats,
            device=device,
            dtype=dtype,
        )
        self._set_bias(bias)
        self.float32_statistics = float32_statistics
        self._keep_statistics()

    def forward(
        self, input: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, fill: str = "zero"
    ) -> Tensor:
        """The statistics of each sample's channels, or the stored ones in evaluation where they are tracked. Masks: see
        `normscope.nn.masking`; lengths run along the last axis.
        """
        if is_scripting():
            return self._torch_forward(input)
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        if is_packed(self, input, mask, lengths, fill):
            return by_sequence(input, self.forward)
        if mask is not None or lengths is not None:
            return self._masked(input, mask, lengths, fill)
        return self._torch_forward(input)

    def _masked(self, input: Tensor, mask: Tensor | None, lengths: Tensor | None, fill: str) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if input.dim() < self._ndim:
            one = mask if mask is None else mask.unsqueeze(0)
            return self._masked(input.unsqueeze(0), one, lengths, fill).squeeze(0)
        counts = valid(type(self).__name__, input, mask, lengths)
        state = None
        if self.running_mean is not None and self.running_var is not None:
            state = RunningState(self.running_mean, self.running_var)
        by_batch = self.training or not self.track_running_stats
        return normalize_valid(
            input, self.spec, self.weight, self.bias, counts, fill, running=state, training=by_batch
        )

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        if is_scripting():
            return self._torch_apply(input)
        return instance_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
        )

    @property
    def spec(self) -> NormSpec:
        """What the layer computes of batched inputs, from its attributes as they are now."""
        return _spec(
            float(self.eps),
            0.0 if self.momentum is None else float(self.momentum),
            self.weight is not None,
            self.bias is not None,
            self.running_mean is not None,
            self._ndim,
        )


@remembered
def _spec(eps: float, momentum: float, weight: bool, bias: bool, running: bool, ndim: int) -> NormSpec:
    return families.instance_norm(
        eps=eps, momentum=momentum, weight=weight, bias=bias, running=running, ndim=(ndim, ndim)
    )


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """Instance norm of inputs (N, C, L), or (C, L) for one sample: a ``torch.nn.InstanceNorm1d``.

    Arguments: torch's, num_features, eps=1e-5, momentum=0.1, affine=False, track_running_stats=False, device, dtype,
    bias=True; and ``float32_statistics=True``: running statistics stay float32 in a half module.
    Shapes: parameters and statistics (C,). Input and output float16, bfloat16, float32 or float64.

    Raises ValueError where the input has another number of axes or, with parameters, of channels, and where a set has
    one element, as torch does.

    >>> import torch
    >>> InstanceNorm1d(2)(torch.tensor([[[1.0, 3.0], [7.0, 7.0]]])).round(decimals=3)
    tensor([[[-1.,  1.],
             [ 0.,  0.]]])
    """

    _ndim = 3


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """Instance norm of inputs (N, C, H, W), or (C, H, W) for one sample: a ``torch.nn.InstanceNorm2d``.

    Arguments, shapes and errors as `InstanceNorm1d`.

    >>> print(InstanceNorm2d(3, affine=True).spec)
    b c ... -> b c; rank 4; centered; std, biased; eps 1e-05 inside the root; weight c; bias c
    """

    _ndim = 4


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """Instance norm of inputs (N, C, D, H, W), or (C, D, H, W) for one sample: a ``torch.nn.InstanceNorm3d``.

    Arguments, shapes and errors as `InstanceNorm1d`.

    >>> import torch
    >>> InstanceNorm3d(3)(torch.randn(2, 3, 4, 4, 4)).mean((2, 3, 4)).abs().max() < 1e-6
    tensor(True)
    """

    _ndim = 5
