"""Layers with stored statistics: which statistics normalize, and what moves."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from normscope.functional import normalize
from normscope.kernels import composite
from normscope.nn.float32_statistics import Float32Statistics
from normscope.nn.masking import filled
from normscope.spec import NormSpec, RunningState


def momentum_of(layer: Any) -> float | None:
    """The momentum of the layer's specification: None, the average of all batches, where something counts them."""
    if layer.momentum is None:
        return None if layer.num_batches_tracked is not None else 0.0  # uncounted, nothing moves
    return float(layer.momentum)


def by_batch_or_stored(
    layer: Any,
    input: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    fill: str,
) -> Tensor:
    """As torch's batch norm decides: by the batch in training and where nothing is stored, by what is stored else.

    What is stored follows in training where ``layer.track_running_stats`` is set, and the counter with it. Under a mask
    without a True element nothing moves.
    """
    names = getattr(layer, "statistics", Float32Statistics.statistics)
    mean, var = getattr(layer, names[0]), getattr(layer, names[1])
    counter = layer.num_batches_tracked if layer.training and layer.track_running_stats else None
    state = None
    if mean is not None and var is not None and (layer.track_running_stats or not layer.training):
        state = RunningState(mean, var)
    training = layer.training or mean is None or var is None
    if layer.momentum is None and counter is not None and state is not None:
        if is_compiling():  # the counter is no number in a program
            fraction = 1.0 / (1.0 + counter.double())
            y = composite.normalize(input, spec, weight, bias, running=state, mask=mask, momentum=fraction)
        else:
            state.batches = int(counter)
            y = normalize(input, spec, weight, bias, running=state, mask=mask)
    else:
        y = normalize(input, spec, weight, bias, running=state, training=training, mask=mask)
    if counter is not None:
        counter.add_(int(input.numel() > 0) if mask is None else mask.any())
    return y if mask is None else filled(y, spec, bias, mask, fill)
