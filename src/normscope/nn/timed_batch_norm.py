"""Batch norms of inputs with time steps: what tdBN, BNTT and TEBN share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from normscope.nn.arguments import sizes
from normscope.nn.batch_state import BatchState
from normscope.nn.masking import Lengths, masked_leaf, not_packed
from normscope.nn.remembered import remembered
from normscope.nn.time_steps import TimeSteps
from normscope.nn.torch_tools import Proxy
from normscope.nn.tracked import by_batch_or_stored, momentum_of
from normscope.spec import NormSpec, families


class TimedBatchNorm(TimeSteps, BatchState):
    """Base of `ThresholdBatchNorm1d`, `BatchNormThroughTime1d`, `TemporalEffectiveBatchNorm1d` and their kind."""

    _family: str
    """of `normscope.families`"""
    _same_steps = True
    """an input has as many time steps as the layer was made for"""

    def __init__(
        self,
        num_features: int,
        eps: float,
        momentum: float | None,
        affine: bool,
        track_running_stats: bool,
        device: Any,
        dtype: Any,
        *,
        layout: str,
        steps: int | None,
        bias: bool,
        float32_statistics: bool,
    ) -> None:
        sizes(type(self).__name__, "num_features", num_features, "Give the number of channels.")
        shared: dict[str, Any] = {"bias": bias, "float32_statistics": float32_statistics}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **shared)
        self._set_layout(layout, steps)

    def forward(
        self,
        input: Tensor,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        fill: str = "zero",
    ) -> Tensor:
        """The statistics of the batch in training, the stored ones in evaluation. Masks: see `normscope.nn.masking`;
        lengths count time steps.
        """
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        not_packed(self, input, fill)
        self._check_axes(input, self.num_features, self.steps if self._same_steps else None)
        counts = self._counts(input, mask, lengths)
        return by_batch_or_stored(self, input, *self._computed(), counts, fill)

    def _computed(self) -> tuple[NormSpec, Tensor | None, Tensor | None]:
        """A specification that says what `forward` computes, and the weight and bias that it has."""
        return self._spec(True), self.weight, self.bias

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return self._spec(True)

    def _spec(self, split: bool) -> NormSpec:
        """``split``: as `TimeSteps._pattern` takes it."""
        return timed_spec(self._family, *self._numbers(), *self._pattern(split), self._rank)

    def _numbers(self) -> tuple[float, float | None, bool, bool, bool]:
        """eps, momentum, and whether there are weight, bias and statistics."""
        parts = (self.weight, self.bias, self.running_mean)
        weight, bias, running = (part is not None for part in parts)
        return float(self.eps), momentum_of(self), weight, bias, running


@remembered
def timed_spec(
    family: str,
    eps: float,
    momentum: float | None,
    weight: bool,
    bias: bool,
    running: bool,
    layout: str,
    steps: int | None,
    ndim: tuple[int, int | None],
    gain: float | None = None,
) -> NormSpec:
    """The specification that ``family`` of normscope.families makes of the rest, ``gain`` where it has one."""
    make: Callable[..., NormSpec] = getattr(families, family)
    spec = make(
        *(() if gain is None else (gain,)),
        eps=eps,
        momentum=momentum,
        weight=weight,
        bias=bias,
        running=running,
        layout=layout,
        steps=steps,
    )
    return spec.replace(ndim=ndim)
