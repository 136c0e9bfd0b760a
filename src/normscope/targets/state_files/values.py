"""Bytes of a file as a tensor: which dtypes there are, how many bytes each takes, and how large a read may be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from normscope.errors import BadTarget
from normscope.targets.state_files.bounded import exactly, opened

if TYPE_CHECKING:
    import torch

BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16, "complex32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
LARGEST_READ = 64 * 2**20
"""bytes of one tensor of a norm; layer norms over whole images stay below"""
INT64 = 2**63 - 1


def read(
    path: Path, offset: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """The tensor that begins at byte ``offset`` of the file; strides in elements, all at least 0.

    Raises:
        BadTarget: the file has become shorter, or the tensor is larger than a norm's.
    """
    import torch

    span = extent(shape, strides) * BYTES[dtype]
    if span > LARGEST_READ:
        raise BadTarget(f"{path}: a tensor of {span} bytes is larger than any norm's; it is not read")
    with opened(path) as (file, _):
        data = bytearray(exactly(file, offset, span, path))
    flat = torch.frombuffer(data, dtype=getattr(torch, dtype)) if data else torch.empty(0)
    return flat.as_strided(shape, strides).contiguous() if data else flat.reshape(shape)


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last.

    >>> extent((2, 3), (3, 1)), extent((4,), (2,)), extent((0, 5), (5, 1)), extent((), ())
    (6, 7, 0, 1)
    """
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor without gaps.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
