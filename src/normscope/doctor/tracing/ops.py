"""Torch operations by name and role: one name for each, however it was written, and what it does to features."""

from __future__ import annotations

from functools import cache
from typing import Any

SAME = {
    "iadd": "add",
    "radd": "add",
    "isub": "sub",
    "subtract": "sub",
    "rsub": "sub",
    "imul": "mul",
    "rmul": "mul",
    "multiply": "mul",
    "itruediv": "div",
    "idiv": "div",
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "rtruediv": "rdiv",
    "ipow": "pow",
    "float_power": "pow",
    "rmatmul": "matmul",
    "clip": "clamp",
    "absolute": "abs",
    "neg": "neg",
    "concat": "cat",
    "concatenate": "cat",
    "convolution": "conv",
    "unsafe_view": "view",
    "reshape_alias": "view",
    "to_copy": "to",
    "linalg_norm": "norm",
    "linalg_vector_norm": "norm",
    "vector_norm": "norm",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "numpy_T": "T",
}


@cache
def op_name(func: Any) -> str:
    """Name of a torch function without its form: ``add`` for ``Tensor.add_``, ``+``, ``+=`` and ``aten.add.Tensor``.

    >>> import torch
    >>> op_name(torch.Tensor.add_), op_name(torch.Tensor.__radd__), op_name(torch.ops.aten.add.Tensor)
    ('add', 'add', 'add')
    """
    name = str(getattr(func, "__name__", type(func).__name__))
    if name == "__get__":  # a property such as Tensor.T
        name = str(getattr(func.__self__, "__name__", name))
    name = name.split(".")[0].strip("_")
    return SAME.get(name, name)


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CASTS = words("to type type_as float double half bfloat16 contiguous clone detach data alias")
"""the same values in the same places, up to rounding"""

VIEWS = CASTS | words(
    "view reshape view_as reshape_as permute transpose t T mT H mH adjoint movedim flatten ravel unflatten squeeze "
    "unsqueeze expand expand_as broadcast_to lift_fresh"
)
"""the same values in other places"""

SLICES = words("getitem select narrow slice chunk split split_with_sizes unsafe_chunk unbind tensor_split")
"""some of the values"""

ACTIVATIONS = words(
    "relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu swish mish hardswish hardsigmoid hardtanh sigmoid tanh "
    "softplus softsign logsigmoid log_sigmoid tanhshrink hardshrink softshrink threshold exp exp2 expm1 log log1p log2 "
    "log10 sin cos erf abs sign sqrt rsqrt square reciprocal neg round floor ceil positive nan_to_num"
)
ARITHMETIC = words(
    "add sub mul div rdiv pow rpow clamp clamp_min clamp_max maximum minimum where masked_fill addcmul addcdiv lerp "
    "fma"
)
ELEMENTWISE = ACTIVATIONS | ARITHMETIC

DROPOUTS = words("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout")
"""whole channels too: the probability is the second argument of each"""

ATTENTIONS = words(
    "scaled_dot_product_attention multi_head_attention_forward native_multi_head_attention flex_attention "
    "scaled_dot_product_flash_attention scaled_dot_product_flash_attention_for_cpu "
    "scaled_dot_product_efficient_attention scaled_dot_product_attention_math"
)

KEEP_PLACES = words(
    "pad interpolate constant_pad_nd reflection_pad1d reflection_pad2d replication_pad2d upsample_nearest2d "
    "upsample_bilinear2d softmax log_softmax roll flip cumsum masked_fill setitem copy"
)
"""other values, but every axis keeps its meaning"""

MEANS = words("mean nanmean amax")


def role_of(name: str) -> str:
    """view | slice | elementwise | dropout, or the kind of a neighbour: conv, linear, embedding, attention, pool,
    concat, other.

    >>> role_of("permute"), role_of("gelu"), role_of("adaptive_avg_pool2d"), role_of("sort")
    ('view', 'elementwise', 'pool', 'other')
    """
    return _ROLES.get(name) or ("pool" if "_pool" in name else "other")


_ROLES = {
    **dict.fromkeys(VIEWS, "view"),
    **dict.fromkeys(SLICES, "slice"),
    **dict.fromkeys(ELEMENTWISE, "elementwise"),
    **dict.fromkeys(DROPOUTS, "dropout"),
    **dict.fromkeys(ATTENTIONS, "attention"),
    **dict.fromkeys(MEANS, "pool"),
    **dict.fromkeys(("conv", "conv1d", "conv2d", "conv3d"), "conv"),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), "conv"),
    **dict.fromkeys(("linear", "addmm", "mm", "matmul"), "linear"),
    **dict.fromkeys(("embedding", "embedding_bag"), "embedding"),
    **dict.fromkeys(("cat", "stack", "hstack", "vstack", "dstack"), "concat"),
}
