"""Normalizations as functions: any specification, and the named ones with PyTorch's own signatures.

`batch_norm`, `layer_norm`, `group_norm`, `instance_norm` and `rms_norm` take the arguments of their namesakes in
torch.nn.functional, mean the same, and raise the same errors: a call that is not plainly regular goes to the namesake
itself, which raises or knows better. What differs is how exact they are (see `normscope.kernels`) and how fast.

With ``out=`` the layer, RMS and group norms write their result into a given tensor, for inference.
"""

from __future__ import annotations

from normscope.functional.channels import batch_norm, group_norm, instance_norm
from normscope.functional.general import normalize
from normscope.functional.positions import layer_norm, rms_norm
from normscope.functional.residual import add_layer_norm, add_rms_norm
from normscope.functional.unit import l2_norm, pixel_norm, scale_norm

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm",
    "group_norm",
    "instance_norm",
    "l2_norm",
    "layer_norm",
    "normalize",
    "pixel_norm",
    "rms_norm",
    "scale_norm",
]
