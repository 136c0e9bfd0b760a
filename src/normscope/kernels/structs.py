"""The structs of ``native/normscope.h`` for ctypes, which explains them, and its codes."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_void_p, sizeof

ABI = 2
"""NS_ABI: a library with another number is not used"""

NORM, NORM_BACKWARD, FIXED, FIXED_BACKWARD = range(4)
FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = range(4)
DONE, UNSERVED, NO_MEMORY = range(3)


class NsRecipe(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("axes", "split", "options")),
        *((name, c_double) for name in ("eps", "gain", "offset")),
    ]


class NsCall(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("what", "dtype", "weight_dtype", "stored_dtype", "ndim", "threads")),
        ("recipe", NsRecipe),
        *((name, POINTER(c_int64)) for name in ("sizes", "x_strides", "y_strides")),
        *((name, c_void_p) for name in ("x", "residual", "weight", "bias", "mean", "var", "dy", "dsum")),
        *((name, c_void_p) for name in ("y", "sum", "stats", "dx", "dweight", "dbias", "mask")),
        ("mask_strides", POINTER(c_int64)),
        ("sums", c_void_p),
    ]


def layout() -> list[int]:
    """Sizes and offsets, as ``ns_struct_layout`` gives them."""
    numbers = []
    for struct in (NsRecipe, NsCall):
        numbers += [sizeof(struct), *(getattr(struct, field[0]).offset for field in struct._fields_)]
    return numbers
