"""Normalization layers: each family one file, with its formula; drop-in for torch.nn where torch has the layer.

What torch.nn has keeps its constructor arguments, state dict, ``repr``, errors and class (each layer is a subclass of
torch's, so that ``isinstance`` tests of optimizers, weight-decay filters and converters hold); what it computes runs
through `normscope.functional`. Every normalization has a ``spec``: what it computes, exactly.

Two things differ from torch.nn, both on purpose: running statistics stay float32 in a module cast to a half type
(``float32_statistics=False`` turns that off), and RMSNorm and the layers that torch does not have refuse sizes below 1,
an eps of 0 or less, and an input of another size, saying what came and what to do.

torch.compile and torch.export take every layer, and torch.fx traces it as one call. torch.jit.script takes the layers
that torch.nn has too, and compiles torch's own code for them, which on CPUs takes no float32 statistics beside half
parameters (``float32_statistics=False`` leaves them half). The others raise BadInput when scripted.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "BatchNorm1d": "batch_norm",
    "BatchNorm2d": "batch_norm",
    "BatchNorm3d": "batch_norm",
    "BatchRenorm1d": "batch_renorm",
    "BatchRenorm2d": "batch_renorm",
    "BatchRenorm3d": "batch_renorm",
    "BatchWhitening": "batch_whitening",
    "IterNorm": "iter_norm",
    "WeightStandardization": "standardized_weight",
    "weight_standardization": "standardized_weight",
    "remove_weight_standardization": "standardized_weight",
    "GroupWhitening": "group_whitening",
    "GhostBatchNorm1d": "ghost_batch_norm",
    "GhostBatchNorm2d": "ghost_batch_norm",
    "GhostBatchNorm3d": "ghost_batch_norm",
    "SyncBatchNorm": "sync_batch_norm",
    "accumulating": "accumulation",
    "FrozenBatchNorm": "frozen_batch_norm",
    "InstanceNorm1d": "instance_norm",
    "InstanceNorm2d": "instance_norm",
    "InstanceNorm3d": "instance_norm",
    "GroupNorm": "group_norm",
    "LayerNorm": "layer_norm",
    "ChannelsFirstLayerNorm": "channels_first_layer_norm",
    "RMSNorm": "rms_norm",
    "ScaleNorm": "scale_norm",
    "PixelNorm": "pixel_norm",
    "L2Norm": "l2_norm",
    "ThresholdBatchNorm1d": "threshold_batch_norm",
    "ThresholdBatchNorm2d": "threshold_batch_norm",
    "ThresholdBatchNorm3d": "threshold_batch_norm",
    "ThresholdLayerNorm": "threshold_layer_norm",
    "ThresholdGroupNorm": "threshold_layer_norm",
    "ThresholdRMSNorm": "threshold_layer_norm",
    "BatchNormThroughTime1d": "batch_norm_through_time",
    "BatchNormThroughTime2d": "batch_norm_through_time",
    "BatchNormThroughTime3d": "batch_norm_through_time",
    "TemporalEffectiveBatchNorm1d": "temporal_effective_batch_norm",
    "TemporalEffectiveBatchNorm2d": "temporal_effective_batch_norm",
    "TemporalEffectiveBatchNorm3d": "temporal_effective_batch_norm",
    "AdaptiveGroupNorm": "adaptive_group_norm",
    "AdaptiveInstanceNorm": "adaptive_instance_norm",
    "AdaptiveLayerNorm": "adaptive_layer_norm",
    "ConditionalBatchNorm1d": "conditional_batch_norm",
    "ConditionalBatchNorm2d": "conditional_batch_norm",
    "ConditionalBatchNorm3d": "conditional_batch_norm",
    "SpatiallyAdaptiveBatchNorm2d": "spatially_adaptive_norm",
    "SpatiallyAdaptiveInstanceNorm2d": "spatially_adaptive_norm",
    "FilterResponseNorm1d": "filter_response_norm",
    "FilterResponseNorm2d": "filter_response_norm",
    "TLU": "filter_response_norm",
    "DynamicTanh": "dynamic_tanh",
}

if TYPE_CHECKING:
    from normscope.nn.accumulation import accumulating as accumulating
    from normscope.nn.adaptive_group_norm import AdaptiveGroupNorm as AdaptiveGroupNorm
    from normscope.nn.adaptive_instance_norm import AdaptiveInstanceNorm as AdaptiveInstanceNorm
    from normscope.nn.adaptive_layer_norm import AdaptiveLayerNorm as AdaptiveLayerNorm
    from normscope.nn.batch_norm import BatchNorm1d as BatchNorm1d
    from normscope.nn.batch_norm import BatchNorm2d as BatchNorm2d
    from normscope.nn.batch_norm import BatchNorm3d as BatchNorm3d
    from normscope.nn.batch_norm_through_time import BatchNormThroughTime1d as BatchNormThroughTime1d
    from normscope.nn.batch_norm_through_time import BatchNormThroughTime2d as BatchNormThroughTime2d
    from normscope.nn.batch_norm_through_time import BatchNormThroughTime3d as BatchNormThroughTime3d
    from normscope.nn.batch_renorm import BatchRenorm1d as BatchRenorm1d
    from normscope.nn.batch_renorm import BatchRenorm2d as BatchRenorm2d
    from normscope.nn.batch_renorm import BatchRenorm3d as BatchRenorm3d
    from normscope.nn.batch_whitening import BatchWhitening as BatchWhitening
    from normscope.nn.channels_first_layer_norm import ChannelsFirstLayerNorm as ChannelsFirstLayerNorm
    from normscope.nn.conditional_batch_norm import ConditionalBatchNorm1d as ConditionalBatchNorm1d
    from normscope.nn.conditional_batch_norm import ConditionalBatchNorm2d as ConditionalBatchNorm2d
    from normscope.nn.conditional_batch_norm import ConditionalBatchNorm3d as ConditionalBatchNorm3d
    from normscope.nn.dynamic_tanh import DynamicTanh as DynamicTanh
    from normscope.nn.filter_response_norm import TLU as TLU
    from normscope.nn.filter_response_norm import FilterResponseNorm1d as FilterResponseNorm1d
    from normscope.nn.filter_response_norm import FilterResponseNorm2d as FilterResponseNorm2d
    from normscope.nn.frozen_batch_norm import FrozenBatchNorm as FrozenBatchNorm
    from normscope.nn.ghost_batch_norm import GhostBatchNorm1d as GhostBatchNorm1d
    from normscope.nn.ghost_batch_norm import GhostBatchNorm2d as GhostBatchNorm2d
    from normscope.nn.ghost_batch_norm import GhostBatchNorm3d as GhostBatchNorm3d
    from normscope.nn.group_norm import GroupNorm as GroupNorm
    from normscope.nn.group_whitening import GroupWhitening as GroupWhitening
    from normscope.nn.instance_norm import InstanceNorm1d as InstanceNorm1d
    from normscope.nn.instance_norm import InstanceNorm2d as InstanceNorm2d
    from normscope.nn.instance_norm import InstanceNorm3d as InstanceNorm3d
    from normscope.nn.iter_norm import IterNorm as IterNorm
    from normscope.nn.l2_norm import L2Norm as L2Norm
    from normscope.nn.layer_norm import LayerNorm as LayerNorm
    from normscope.nn.pixel_norm import PixelNorm as PixelNorm
    from normscope.nn.rms_norm import RMSNorm as RMSNorm
    from normscope.nn.scale_norm import ScaleNorm as ScaleNorm
    from normscope.nn.spatially_adaptive_norm import (
        SpatiallyAdaptiveBatchNorm2d as SpatiallyAdaptiveBatchNorm2d,
    )
    from normscope.nn.spatially_adaptive_norm import (
        SpatiallyAdaptiveInstanceNorm2d as SpatiallyAdaptiveInstanceNorm2d,
    )
    from normscope.nn.standardized_weight import WeightStandardization as WeightStandardization
    from normscope.nn.standardized_weight import (
        remove_weight_standardization as remove_weight_standardization,
    )
    from normscope.nn.standardized_weight import weight_standardization as weight_standardization
    from normscope.nn.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from normscope.nn.temporal_effective_batch_norm import (
        TemporalEffectiveBatchNorm1d as TemporalEffectiveBatchNorm1d,
    )
    from normscope.nn.temporal_effective_batch_norm import (
        TemporalEffectiveBatchNorm2d as TemporalEffectiveBatchNorm2d,
    )
    from normscope.nn.temporal_effective_batch_norm import (
        TemporalEffectiveBatchNorm3d as TemporalEffectiveBatchNorm3d,
    )
    from normscope.nn.threshold_batch_norm import ThresholdBatchNorm1d as ThresholdBatchNorm1d
    from normscope.nn.threshold_batch_norm import ThresholdBatchNorm2d as ThresholdBatchNorm2d
    from normscope.nn.threshold_batch_norm import ThresholdBatchNorm3d as ThresholdBatchNorm3d
    from normscope.nn.threshold_layer_norm import ThresholdGroupNorm as ThresholdGroupNorm
    from normscope.nn.threshold_layer_norm import ThresholdLayerNorm as ThresholdLayerNorm
    from normscope.nn.threshold_layer_norm import ThresholdRMSNorm as ThresholdRMSNorm

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'normscope.nn' has no attribute {name!r}")
    value = getattr(import_module(f"normscope.nn.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
