"""Batch norm: every channel by its mean and variance over samples and positions.

    y = weight * (x - mean) / sqrt(var + eps) + bias

Training normalizes by the batch: var is the biased variance, sum((x - mean)^2) / M over the M elements of a channel.
Running statistics follow, run <- (1 - momentum) run + momentum batch, the variance with M / (M - 1); evaluation
normalizes by them. Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167, algorithms 1 and 2. With
``running_correction=0`` the variance is stored as it is, over M, as Keras, Flax and ONNX store it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from normscope.errors import BadInput
from normscope.functional import batch_norm, normalize
from normscope.nn.float32_statistics import Float32Statistics
from normscope.nn.masking import by_element, is_packed, masked_leaf, valid
from normscope.nn.optional_bias import OptionalBias
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, Unsynchronized, is_scripting, method, refuse_script
from normscope.nn.tracked import by_batch_or_stored, momentum_of
from normscope.spec import NormSpec, RunningState, families


class _BatchNorm(Unsynchronized, Float32Statistics, OptionalBias, nn.modules.batchnorm._BatchNorm):
    """What the three share; they differ in the number of axes they take."""

    __jit_unused_properties__ = ("spec", "_synchronized")
    _scripted = method("_scripted", nn.modules.batchnorm._BatchNorm.forward)
    _ndim: tuple[int, int | None]
    running_correction = 1

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        float32_statistics: bool = True,
        running_correction: int = 1,
    ) -> None:
        if running_correction not in (0, 1):
            raise BadInput(
                f"the stored variance is over M - running_correction, which is 0 or 1; got {running_correction!r}. "
                "PyTorch's is 1, that of Keras and Flax 0."
            )
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._set_bias(bias)
        self.float32_statistics = float32_statistics
        self.running_correction = running_correction
        self._keep_statistics()

    def forward(
        self, input: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, fill: str = "zero"
    ) -> Tensor:
        """The batch's statistics in training and where none are stored, the stored ones else. Masks: see
        `normscope.nn.masking`; lengths run along the last axis.
        """
        if is_scripting():
            return self._scripted(input)
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        if is_packed(self, input, mask, lengths, fill):
            return by_element(input, self.forward)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if mask is not None or lengths is not None:
            counts = valid(type(self).__name__, input, mask, lengths)
            return by_batch_or_stored(self, input, self.spec, self.weight, self.bias, counts, fill)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)  # a batch without samples too, as in torch
            if self.momentum is None:  # the plain average of all batches so far
                momentum = 1.0 / float(self.num_batches_tracked)
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        stored = self.track_running_stats or not self.training
        if self.running_correction == 0 and by_batch and stored and self.running_mean is not None:
            state = RunningState(self.running_mean, self.running_var)
            if self.momentum is None and self.num_batches_tracked is not None:
                state.batches = int(self.num_batches_tracked) - 1
            return normalize(input, self.spec, self.weight, self.bias, running=state)
        return batch_norm(
            input,
            self.running_mean if stored else None,
            self.running_var if stored else None,
            self.weight,
            self.bias,
            by_batch,
            momentum,
            self.eps,
        )

    @property
    def _synchronized(self) -> str:  # type: ignore[override]  # torch's batch norm over ranks stores over M - 1
        return "keeps running_correction=0" if self.running_correction == 0 else ""

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(
            float(self.eps),
            momentum_of(self),
            self.weight is not None,
            self.bias is not None,
            self.running_mean is not None,
            self._ndim,
            self.running_correction,
        )

    def __prepare_scriptable__(self) -> _BatchNorm:
        if self.running_correction != 1:
            refuse_script(self)
        return self

    def extra_repr(self) -> str:
        """As torch's, with what differs from the defaults named after it."""
        return super().extra_repr() + ("" if self.running_correction == 1 else ", running_correction=0")


@remembered
def _spec(
    eps: float,
    momentum: float | None,
    weight: bool,
    bias: bool,
    running: bool,
    ndim: tuple[int, int | None],
    correction: int,
) -> NormSpec:
    return families.batch_norm(
        eps=eps,
        momentum=momentum,
        weight=weight,
        bias=bias,
        running=running,
        running_correction=correction,
        ndim=ndim,
    )


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """Batch norm of inputs (N, C) or (N, C, L): a ``torch.nn.BatchNorm1d``.

    Arguments: torch's, num_features, eps=1e-5, momentum=0.1 (None: the plain average of all batches), affine=True,
    track_running_stats=True, device, dtype, bias=True; ``float32_statistics=True``: running statistics stay
    float32 in a half module; and ``running_correction=1``: the stored variance is over M - 1 as in torch, with 0 over
    M, as Keras and Flax go on.
    Shapes: parameters and statistics (C,). Input and output float16, bfloat16, float32 or float64.

    Raises ValueError where the input has another number of axes, where training sees one value a channel, or where
    eps is not positive in training, as torch does.

    >>> import torch
    >>> norm = BatchNorm1d(2).bfloat16()
    >>> norm, norm.weight.dtype, norm.running_var.dtype
    (BatchNorm1d(2, eps=1e-05, momentum=0.1, affine=True, ...), torch.bfloat16, torch.float32)
    >>> x = torch.tensor([[1.0, 5.0], [3.0, 5.0]], dtype=torch.bfloat16)
    >>> norm(x).tolist(), norm.running_mean.tolist()
    ([[-1.0, 0.0], [1.0, 0.0]], [0.20000000298023224, 0.5])
    """

    _ndim = (2, 3)


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """Batch norm of inputs (N, C, H, W), contiguous or channels-last: a ``torch.nn.BatchNorm2d``.

    Arguments, shapes and errors as `BatchNorm1d`.

    >>> import torch
    >>> norm = BatchNorm2d(3)
    >>> norm.spec.stats, norm.spec.eps, norm.spec.running.momentum
    ('b c ... -> c', 1e-05, 0.1)
    >>> norm(torch.randn(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    """

    _ndim = (4, 4)


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """Batch norm of inputs (N, C, D, H, W): a ``torch.nn.BatchNorm3d``.

    Arguments, shapes and errors as `BatchNorm1d`.

    >>> import torch
    >>> BatchNorm3d(3)(torch.full((2, 3, 4, 4, 4), 1e6)).abs().max()
    tensor(0., grad_fn=<MaxBackward1>)
    """

    _ndim = (5, 5)
