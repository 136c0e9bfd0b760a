"""Reader for the layers of ``normscope.nn``: each says its own specification; the modes are those of its kind.

A subclass is read as the layer that it inherits from where it overrides nothing that computes, as with torch.nn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from normscope.reading.base import Reader, Reading, qualified_name
from normscope.reading.by_class import refuse
from normscope.reading.torch_nn import check_ndim, kinds, refuse_overrides, tensors_of

if TYPE_CHECKING:
    from normscope.spec import NormSpec


def _read(obj: Any, input_ndim: int | None) -> Reading | None:
    from torch.nn.modules.batchnorm import _NormBase

    import normscope.nn as own
    from normscope.nn.batch_state import BatchState
    from normscope.nn.batch_whitening import BatchWhiteningState

    home = next((cls for cls in type(obj).__mro__ if getattr(own, cls.__name__, None) is cls), None)
    if home in (None, own.TLU):  # an activation
        return None
    refuse_overrides(obj, home)
    if why := getattr(obj, "outside_family", ""):
        refuse(obj, why)
    if isinstance(obj, (BatchState, BatchWhiteningState)):
        return _of_batches(obj, input_ndim)
    if isinstance(obj, _NormBase):  # batch and instance norm: what is stored and when it moves is torch's
        like = next(cls for cls in home.__mro__ if cls in kinds())
        reading = kinds()[like](obj, input_ndim)
        return replace(reading, synchronized=True) if isinstance(obj, own.SyncBatchNorm) else reading
    spec: NormSpec = obj.spec
    low, high = spec.ndim or (spec.pattern.min_ndim, None)
    check_ndim(obj, input_ndim, low, high)
    mode = "frozen" if isinstance(obj, own.FrozenBatchNorm) else "input"
    return Reading(spec, qualified_name(type(obj)), tensors_of(obj), mode, mode, mode)


def _of_batches(obj: Any, input_ndim: int | None) -> Reading:
    """Layers that torch lacks, with state: by the batch in training, by what is stored in evaluation."""
    spec: NormSpec = obj.spec
    check_ndim(obj, input_ndim, *spec.ndim or (2, None))
    stored = obj.running_mean is not None
    later = "running" if stored else "batch"
    moves = stored and obj.track_running_stats
    tensors = tensors_of(obj)
    if stored:
        second = obj.statistics[1]  # the variance, or a matrix of each group
        tensors[second] = getattr(obj, second)
    if hasattr(obj, "by_step"):  # what it multiplies by is made of its parameters
        made = zip(("weight", "bias"), obj.by_step(), strict=True)
        learned = obj.scale.requires_grad
        tensors |= {name: t.detach().requires_grad_(learned) for name, t in made if t is not None}
    return Reading(
        spec,
        qualified_name(type(obj)),
        tensors,
        "batch" if obj.training else later,
        "batch",
        later,
        ("train",) if moves else (),
        synchronized=getattr(obj, "group", None) is not None,
    )


READER = Reader(
    needs="normscope.nn",
    knows=(
        "normscope.nn.BatchNorm1d/2d/3d",
        "normscope.nn.SyncBatchNorm",
        "normscope.nn.BatchRenorm1d/2d/3d",
        "normscope.nn.GhostBatchNorm1d/2d/3d",
        "normscope.nn.BatchWhitening",
        "normscope.nn.IterNorm",
        "normscope.nn.GroupWhitening",
        "normscope.nn.WeightStandardization",
        "normscope.nn.InstanceNorm1d/2d/3d",
        "normscope.nn.LayerNorm",
        "normscope.nn.ChannelsFirstLayerNorm",
        "normscope.nn.GroupNorm",
        "normscope.nn.RMSNorm",
        "normscope.nn.ScaleNorm",
        "normscope.nn.PixelNorm",
        "normscope.nn.L2Norm",
        "normscope.nn.FrozenBatchNorm",
        "normscope.nn.ThresholdBatchNorm1d/2d/3d",
        "normscope.nn.ThresholdLayerNorm",
        "normscope.nn.ThresholdGroupNorm",
        "normscope.nn.ThresholdRMSNorm",
        "normscope.nn.BatchNormThroughTime1d/2d/3d",
        "normscope.nn.TemporalEffectiveBatchNorm1d/2d/3d",
        "normscope.nn.AdaptiveLayerNorm",
        "normscope.nn.AdaptiveInstanceNorm",
        "normscope.nn.AdaptiveGroupNorm",
        "normscope.nn.ConditionalBatchNorm1d/2d/3d",
        "normscope.nn.SpatiallyAdaptiveBatchNorm2d",
        "normscope.nn.SpatiallyAdaptiveInstanceNorm2d",
        "normscope.nn.FilterResponseNorm1d/2d",
    ),
    read=_read,
)
