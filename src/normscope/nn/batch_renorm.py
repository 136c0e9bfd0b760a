"""Batch renormalization: batch norm corrected towards the stored statistics, which evaluation normalizes by.

    y = weight * (r (x - mean) / s + d) + bias,    s = sqrt(var + eps), var biased
    r = s / S clipped to [1 / r_max, r_max],   d = (mean - running_mean) / S clipped to [-d_max, d_max]

S = sqrt(running_var + eps), read before the batch moves it. No gradient goes through r and d; mean and s have theirs.
Where nothing is clipped, training gives what evaluation by the same stored statistics gives, so that a small batch, or
one of few classes, trains the network that is deployed; with r_max = 1 and d_max = 0 it is batch norm.

Running statistics follow, run <- (1 - momentum) run + momentum batch. With ``averages="denominator"``, as in the paper,
what follows is S, by s, and running_var is S^2 - eps; with ``"variance"`` running_var follows the variance with
M / (M - 1), as in torch's batch norm. Ioffe 2017, https://arxiv.org/abs/1702.03275, algorithm 1; section 4.1 has the
schedule.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normscope.errors import BadInput
from normscope.functional.renormalized import batch_renorm
from normscope.kernels import composite
from normscope.kernels.elementary import wide
from normscope.nn.batch_state import BatchState
from normscope.nn.remembered import remembered
from normscope.spec import NormSpec, RunningState, families

Limit = float | tuple[float, float, int, int]
"""a number, or (from, to, step, step): constant up to one step, a straight line to the other, constant after"""
R_MAX: Limit = (1.0, 3.0, 5_000, 40_000)
D_MAX: Limit = (0.0, 5.0, 5_000, 25_000)
"""as in the paper"""


class _BatchRenorm(BatchState):
    """What the three share; they differ in the number of axes they take."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.01,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        r_max: Limit = R_MAX,
        d_max: Limit = D_MAX,
        averages: str = "denominator",
        bias: bool = True,
        float32_statistics: bool = True,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            True,
            device,
            dtype,
            bias=bias,
            float32_statistics=float32_statistics,
        )
        name = type(self).__name__
        self.r_max, self.d_max = _limit(name, "r_max", r_max, 1.0), _limit(name, "d_max", d_max, 0.0)
        if averages not in ("denominator", "variance"):
            raise BadInput(
                f"{name} averages the 'denominator' (as the paper) or the 'variance' (as torch's batch norm); got "
                f"{averages!r}. Leave it at 'denominator'."
            )
        self.averages = averages

    def _by_batch(self, input: Tensor, mask: Tensor | None) -> Tensor:
        mean, var, counter = self.running_mean, self.running_var, self.num_batches_tracked
        name = type(self).__name__
        if mean is None or var is None or counter is None:
            raise BadInput(
                f"{name} reads running_mean, running_var and num_batches_tracked in training as in evaluation; one is "
                "None. Keep them, or use BatchNorm."
            )
        if input.numel() == input.shape[1]:
            raise BadInput(
                f"{name} in training takes the variance of more than one value a channel; got an input of shape "
                f"{tuple(input.shape)}. Use a larger batch (drop_last=True in the loader), or eval()."
            )
        follows = self.track_running_stats
        state = RunningState(mean, var) if follows else RunningState(mean.clone(), var.clone())
        steps = counter.to(wide(input))
        momentum = 1.0 / (1.0 + steps) if self.momentum is None else self.momentum
        limits = (_at(self.r_max, steps), _at(self.d_max, steps))
        weight, bias = self.weight, self.bias
        if mask is None and input.numel() and _alike(input, weight, bias):
            y = batch_renorm(
                input,
                weight,
                bias,
                state,
                eps=self.eps,
                momentum=momentum,
                limits=limits,
                averages=self.averages,
            )
        else:
            spec = self._spec_with(_last(self.r_max), _last(self.d_max))
            y = composite.normalize(
                input, spec, weight, bias, running=state, mask=mask, momentum=momentum, limits=limits
            )
        if follows:
            counter.add_(state.batches)  # 0 where a mask left nothing to follow
        return y

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes and its counter as they are now."""
        counter = self.num_batches_tracked
        steps = 0 if counter is None or counter.is_meta else int(counter)
        return self._spec_with(_at(self.r_max, steps), _at(self.d_max, steps))

    def _spec_with(self, r_max: float, d_max: float) -> NormSpec:
        return _spec(
            float(self.eps),
            None if self.momentum is None else float(self.momentum),
            self.weight is not None,
            self.bias is not None,
            self._ndim,
            self.averages,
            r_max,
            d_max,
        )

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return self._said(r_max=self.r_max, d_max=self.d_max, averages=self.averages)


@remembered
def _spec(
    eps: float,
    momentum: float | None,
    weight: bool,
    bias: bool,
    ndim: tuple[int, int],
    averages: str,
    r_max: float,
    d_max: float,
) -> NormSpec:
    return families.batch_renorm(
        r_max, d_max, eps=eps, momentum=momentum, weight=weight, bias=bias, ndim=ndim, averages=averages
    )


def _alike(input: Tensor, *parameters: Tensor | None) -> bool:
    """Of one dtype, in which gain and r may be multiplied: half types are computed in float32."""
    return input.dtype in (torch.float32, torch.float64) and all(
        parameter is None or parameter.dtype == input.dtype for parameter in parameters
    )


def _limit(layer: str, name: str, given: Any, least: float) -> Limit:
    """``given`` as a number or a schedule. Raises BadInput where it is neither, or below ``least``."""
    fix = f"Write a number such as {least + 2:g}, or (from, to, step, step) such as {R_MAX if least else D_MAX}."
    try:
        values = [float(v) for v in given] if isinstance(given, (tuple, list)) else [float(given)]
    except (TypeError, ValueError):
        values = []
    steps = values[2:]
    bounded = len(values) == 1 or (len(values) == 4 and all(math.isfinite(v) for v in values))
    if not bounded or not min(values[:2]) >= least or (steps and not 0 <= steps[0] < steps[1]):
        raise BadInput(
            f"{layer} takes {name} of {least:g} or more, or a schedule of four numbers whose steps rise; got "
            f"{given!r}. {fix}"
        )
    return values[0] if len(values) == 1 else (values[0], values[1], int(steps[0]), int(steps[1]))


def _last(limit: Limit) -> float:
    return limit[1] if isinstance(limit, tuple) else limit


def _at(limit: Limit, steps: Any) -> Any:
    """The limit after ``steps`` batches: of a schedule a number or a tensor, as they are."""
    if not isinstance(limit, tuple):
        return limit
    start, end, first, last = limit
    passed = (steps - first) / (last - first)
    passed = passed.clamp(0.0, 1.0) if isinstance(passed, Tensor) else min(max(passed, 0.0), 1.0)
    return start + (end - start) * passed


class BatchRenorm1d(_BatchRenorm):
    """Batch renormalization of inputs (N, C) or (N, C, L).

    Arguments: num_features; eps=1e-5; momentum=0.01, the paper's (None: the plain average of all batches);
    affine=True; device, dtype; and by name
        r_max, d_max: the limits of r and d. A number (``math.inf`` clips nothing), or (from, to, step, step): from one
            value up to the first step, on a straight line to the other at the second, and that after. A step is a
            batch that ``num_batches_tracked`` counted. By default (1, 3, 5000, 40000) and (0, 5, 5000, 25000), as in
            the paper: the first 5000 steps are batch norm.
        averages: ``"denominator"`` or ``"variance"``, see the head of this file.
        bias=True; float32_statistics=True: running statistics stay float32 in a half module.
    Called with ``mask=``, ``lengths=`` or a packed sequence: statistics are over the elements that count, the output is
    0 elsewhere.
    Shapes: parameters and statistics (C,). Input and output float16, bfloat16, float32 or float64. The state dict is
    that of ``torch.nn.BatchNorm1d``, both ways. It is no ``torch.nn.BatchNorm1d`` by class, but of its base class.

    Raises BadInput (a ValueError) where the input has another number of axes or channels, where training sees one value
    a channel, where eps is 0 or less or a limit is none.

    >>> import torch
    >>> norm = BatchRenorm1d(1, r_max=float("inf"), d_max=float("inf"))
    >>> x = torch.tensor([[1.0], [3.0]])  # mean 2, deviation 1; stored are 0 and 1
    >>> norm(x).round(decimals=4).tolist(), round(norm.running_mean.item(), 4)
    ([[1.0], [3.0]], 0.02)
    """

    _ndim = (2, 3)


class BatchRenorm2d(_BatchRenorm):
    """Batch renormalization of inputs (N, C, H, W), contiguous or channels-last.

    Arguments, shapes and errors as `BatchRenorm1d`.

    >>> norm = BatchRenorm2d(3)
    >>> norm.spec.running.renorm
    (1.0, 0.0)
    >>> norm.num_batches_tracked.fill_(22_500)
    tensor(22500)
    >>> norm.spec.running.renorm
    (2.0, 4.375)
    """

    _ndim = (4, 4)


class BatchRenorm3d(_BatchRenorm):
    """Batch renormalization of inputs (N, C, D, H, W).

    Arguments, shapes and errors as `BatchRenorm1d`.

    >>> import torch
    >>> BatchRenorm3d(3, r_max=3, d_max=5)(torch.randn(2, 3, 4, 4, 4)).shape
    torch.Size([2, 3, 4, 4, 4])
    """

    _ndim = (5, 5)
