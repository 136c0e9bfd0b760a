"""Named specifications: every family of normalizations, in PyTorch's conventions unless the name says else.

Out of the family, since no specification can say them: a learned eps, |weight| + eps, norms of another power
than 2, dynamic tanh, and local response norm.
"""

from __future__ import annotations

from normscope.spec.families.batch import batch_renorm, batch_whitening, ghost_batch_norm
from normscope.spec.families.frameworks import (
    flax_batch_norm,
    flax_group_norm,
    flax_instance_norm,
    flax_layer_norm,
    flax_rms_norm,
    keras_batch_normalization,
    keras_group_normalization,
    keras_layer_normalization,
    keras_rms_normalization,
    onnx_batch_normalization,
    onnx_layer_normalization,
    onnx_lp_normalization,
    onnx_mean_variance_normalization,
)
from normscope.spec.families.layers import (
    batch_norm,
    channels_first_layer_norm,
    filter_response_norm,
    group_norm,
    group_whitening,
    instance_norm,
    l2_normalize,
    layer_norm,
    pixel_norm,
    rms_norm,
    scale_norm,
    tf_l2_normalize,
)
from normscope.spec.families.models import (
    bert_layer_norm,
    convnext_layer_norm,
    gemma_rms_norm,
    llama_rms_norm,
    t5_layer_norm,
    vit_layer_norm,
)
from normscope.spec.families.spiking import (
    batch_norm_through_time,
    td_batch_norm,
    td_group_norm,
    td_layer_norm,
    td_rms_norm,
    temporal_effective_batch_norm,
)
from normscope.spec.families.weights import (
    biased_weight_standardization,
    scaled_weight_standardization,
    weight_norm,
    weight_standardization,
)

__all__ = [
    "batch_norm",
    "batch_norm_through_time",
    "batch_renorm",
    "batch_whitening",
    "bert_layer_norm",
    "biased_weight_standardization",
    "channels_first_layer_norm",
    "convnext_layer_norm",
    "filter_response_norm",
    "flax_batch_norm",
    "flax_group_norm",
    "flax_instance_norm",
    "flax_layer_norm",
    "flax_rms_norm",
    "gemma_rms_norm",
    "ghost_batch_norm",
    "group_norm",
    "group_whitening",
    "instance_norm",
    "keras_batch_normalization",
    "keras_group_normalization",
    "keras_layer_normalization",
    "keras_rms_normalization",
    "l2_normalize",
    "layer_norm",
    "llama_rms_norm",
    "onnx_batch_normalization",
    "onnx_layer_normalization",
    "onnx_lp_normalization",
    "onnx_mean_variance_normalization",
    "pixel_norm",
    "rms_norm",
    "scale_norm",
    "scaled_weight_standardization",
    "t5_layer_norm",
    "td_batch_norm",
    "td_group_norm",
    "td_layer_norm",
    "td_rms_norm",
    "temporal_effective_batch_norm",
    "tf_l2_normalize",
    "vit_layer_norm",
    "weight_norm",
    "weight_standardization",
]
