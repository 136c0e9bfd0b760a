"""``.safetensors``: eight bytes of header length, a JSON header, tensors without gaps.

Read here and not by its library, so that a header is bounded before it is parsed, the reason for a refusal is our
own, and a tensor costs one read of its own bytes.
"""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path
from typing import Any

from normscope.doctor.stored_state import Stored
from normscope.errors import BadTarget
from normscope.targets.state_files.bounded import JSON_BYTES, exactly, opened, parsed, whole
from normscope.targets.state_files.values import BYTES, INT64, read, row_major

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip
SUBBYTE = ("F4", "F6_E2M3", "F6_E3M2")
"""no norm is kept in these; their sizes are not checked"""
RANK = 64


def read_header(path: Path) -> tuple[dict[str, Stored], Any]:
    """Every tensor of the file, by name, and the file's metadata as it stands there; values are read when asked for.

    Raises:
        BadTarget: the file is no safetensors file, is truncated, or its header contradicts itself.
    """
    with opened(path) as (file, size):
        if size < 8:
            raise BadTarget(f"{path} is too short for a safetensors file: {size} bytes")
        (length,) = struct.unpack("<Q", exactly(file, 0, 8, path))
        if length > size - 8 or length > JSON_BYTES:
            raise BadTarget(
                f"{path} is no safetensors file, or broken: its first bytes ask for a header of {length} bytes; the "
                f"file has {size}, and at most {JSON_BYTES} are read"
            )
        header = parsed(exactly(file, 8, length, path), f"the header of {path}")
    if not isinstance(header, dict):
        raise BadTarget(f"the header of {path} is no object of named tensors")
    start, held = 8 + length, size - 8 - length
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, Stored] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _entry(path, name, entry, held)
        spans.append((begin, end, name))
        if dtype in BYTES:
            tensors[name] = Stored(
                shape, dtype, partial(read, path, start + begin, dtype, shape, row_major(shape))
            )
    _adjoining(path, spans, held)
    return tensors, header.get("__metadata__")


def _entry(path: Path, name: str, entry: Any, held: int) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, first and last byte of one tensor."""
    where = f"{path}: the tensor {name[:80]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise BadTarget(f"{where} needs dtype, shape and data_offsets, and nothing else")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in (*DTYPES, *SUBBYTE):
        raise BadTarget(f"{where} has the dtype {str(kind)[:40]!r}; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > RANK or not all(whole(n, INT64) for n in shape):
        raise BadTarget(f"{where} has a shape that is no list of at most {RANK} whole numbers from 0 on")
    pair = isinstance(offsets, list) and len(offsets) == 2 and all(whole(n, INT64) for n in offsets)
    if not pair or offsets[0] > offsets[1]:
        raise BadTarget(f"{where} has data_offsets that are no pair [begin, end] of whole numbers")
    begin, end = offsets
    if end > held:
        raise BadTarget(f"{where} ends at byte {end} of the data, but the file holds {held}: truncated?")
    dtype = DTYPES.get(kind, kind)
    count = 1
    for length in shape:
        count *= length
    if dtype in BYTES and count * BYTES[dtype] != end - begin:
        raise BadTarget(f"{where} has {end - begin} bytes; its shape and dtype need {count * BYTES[dtype]}")
    return dtype, tuple(shape), begin, end


def _adjoining(path: Path, spans: list[tuple[int, int, str]], held: int) -> None:
    """Raises BadTarget unless the tensors stand one after the other, as the format demands."""
    place = 0
    for begin, end, name in sorted(spans):
        if begin != place:
            fault = "overlaps another one" if begin < place else "leaves a gap before it"
            raise BadTarget(f"{path}: the tensor {name[:80]!r} {fault}")
        place = end
    if place != held:
        raise BadTarget(f"{path}: {held - place} bytes after the last tensor belong to none")
