"""Conditional batch norm: batch norm whose gain and bias are computed for every sample, from its class or a vector.

    y = (offset + scale) * (x - mean) / sqrt(var + eps) + shift

Statistics are those of batch norm: of the batch in training, stored ones, which follow them, in evaluation. A table of
classes, as in class-conditional generators, or a linear layer of a vector, as in de Vries et al. 2017,
https://arxiv.org/abs/1707.00683, section 3 (whose gain that all samples share is the bias of the linear layer). FiLM,
Perez et al. 2018, https://arxiv.org/abs/1709.07871, on a batch norm without gain and bias is this layer:
``offset=0.0``, and its gamma and beta as scale and shift.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normscope.errors import BadInput
from normscope.nn.batch_state import BatchState
from normscope.nn.modulation import GivenAffine, Modulated
from normscope.nn.remembered import remembered
from normscope.nn.tracked import by_batch_or_stored, momentum_of
from normscope.spec import NormSpec, families


class GivenAffineBatchNorm(BatchState, GivenAffine):
    """Base of batch norms without a weight and bias of their own: their statistics and their specification."""

    _affine_on: str
    """axes of scale and shift"""

    def __init__(
        self,
        num_features: int,
        eps: float,
        momentum: float | None,
        track_running_stats: bool,
        device: Any,
        dtype: Any,
        float32_statistics: bool,
    ) -> None:
        shared: dict[str, Any] = {"bias": False, "float32_statistics": float32_statistics}
        super().__init__(num_features, eps, momentum, False, track_running_stats, device, dtype, **shared)

    def _norm(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.training and mask is None and x.numel() == x.shape[1]:
            raise BadInput(
                f"{type(self).__name__} in training takes the variance of more than one value a channel; got an input "
                f"of shape {tuple(x.shape)}. Use a larger batch (drop_last=True in the loader), or eval()."
            )
        return by_batch_or_stored(self, x, self._spec_on(None), None, None, mask, "zero")

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return self._spec_on(self._affine_on)

    def _spec_on(self, affine: str | None) -> NormSpec:
        return _spec(
            float(self.eps),
            momentum_of(self),
            self.running_mean is not None,
            self._ndim,
            affine,
            self.offset,
        )

    def _said_shared(self) -> str:
        said = f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"
        if not self.track_running_stats:
            said += ", track_running_stats=False"
        return said


@remembered
def _spec(
    eps: float,
    momentum: float | None,
    running: bool,
    ndim: tuple[int, int],
    affine: str | None,
    offset: float,
) -> NormSpec:
    bare = families.batch_norm(
        eps=eps, momentum=momentum, weight=False, bias=False, running=running, ndim=ndim
    )
    if affine is None:
        return bare
    return bare.replace(weight=affine, bias=affine, source="input", weight_offset=offset)


class _ConditionalBatchNorm(Modulated, GivenAffineBatchNorm):  # type: ignore[misc]  # another forward
    """What the three share; they differ in the number of axes they take."""

    _affine_on = "b c"

    def __init__(
        self,
        num_features: int,
        *,
        condition_features: int | None = None,
        classes: int | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        offset: float = 1.0,
        zero: bool = True,
        device: Any = None,
        dtype: Any = None,
        float32_statistics: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, track_running_stats, device, dtype, float32_statistics)
        self._set_modulation(self.num_features, condition_features, classes, zero, offset, device, dtype)

    def reset_parameters(self) -> None:
        """``modulation`` and running statistics as new."""
        super().reset_parameters()
        if "modulation" in self._modules:
            self._reset_modulation()

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        said = [self._said_shared(), self._said_modulation()]
        said += ["float32_statistics=False"] * (not self.float32_statistics)
        return ", ".join(text for text in said if text)


class ConditionalBatchNorm1d(_ConditionalBatchNorm):
    """Conditional batch norm of inputs (N, C) or (N, C, L).

    Arguments: num_features; and by name
        condition_features: K, where ``modulation`` makes scale and shift of a condition by a linear layer.
        classes: their number, where it makes them of a class, by a table.
        eps=1e-5; momentum=0.1 (None: the plain average of all batches); track_running_stats=True; offset=1.0, what the
        scale counts from; zero=True: ``modulation`` starts so that the layer is batch norm alone; device, dtype;
        float32_statistics=True: running statistics stay float32 in a half module.
    Called ``layer(x, condition)`` with either of the first two, and else ``layer(x, scale=scale, shift=shift)``. With
    ``mask=`` or ``lengths=`` (along the last axis) statistics are over the elements that count, the output 0 elsewhere.
    Shapes: condition (N, K) or, of classes, (N,); scale and shift (N, C), statistics (C,). Input and output float16,
    bfloat16, float32 or float64. The state dict is that of ``torch.nn.BatchNorm1d(affine=False)``, with
    ``modulation.weight`` (2 C, K) and ``modulation.bias``, or of classes ``modulation.weight`` (classes, 2 C).

    Raises BadInput (a ValueError) where the input has another number of axes or channels, where what came with it is
    not what the layer was made for, where training sees one value a channel, or where eps is 0 or less.

    >>> import torch
    >>> norm = ConditionalBatchNorm1d(1)
    >>> x, scale, shift = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [1.0]]), torch.zeros(2, 1)
    >>> norm(x, scale=scale, shift=shift).round(decimals=3).tolist()
    [[-1.0], [2.0]]
    >>> sorted(ConditionalBatchNorm1d(3, classes=10).state_dict())
    ['modulation.weight', 'num_batches_tracked', 'running_mean', 'running_var']
    """

    _ndim = (2, 3)


class ConditionalBatchNorm2d(_ConditionalBatchNorm):
    """Conditional batch norm of inputs (N, C, H, W), contiguous or channels-last.

    Arguments, shapes and errors as `ConditionalBatchNorm1d`.

    >>> import torch
    >>> norm = ConditionalBatchNorm2d(3, classes=10)
    >>> norm(torch.randn(2, 3, 4, 4), torch.tensor([7, 0])).shape
    torch.Size([2, 3, 4, 4])
    >>> norm.spec.stats, norm.spec.weight, norm.spec.source
    ('b c ... -> c', 'b c', 'input')
    """

    _ndim = (4, 4)


class ConditionalBatchNorm3d(_ConditionalBatchNorm):
    """Conditional batch norm of inputs (N, C, D, H, W).

    Arguments, shapes and errors as `ConditionalBatchNorm1d`.

    >>> import torch
    >>> norm = ConditionalBatchNorm3d(3, condition_features=5)
    >>> norm(torch.randn(2, 3, 4, 4, 4), torch.randn(2, 5)).shape
    torch.Size([2, 3, 4, 4, 4])
    """

    _ndim = (5, 5)
