"""``.pt``, ``.pth``, ``.ckpt``, ``.bin``: what ``torch.save`` wrote, a zip of stored records, or one stream before 1.6.

The pickle is read as a description (see ``descriptions.py``); of the tensors' bytes only those are read that are asked
for. PyTorch's own loader keeps code from running too, but allocates what the file claims.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from normscope.doctor.stored_state import Stored
from normscope.errors import BadTarget
from normscope.targets.state_files.bounded import exactly, opened
from normscope.targets.state_files.descriptions import (
    PICKLE_BYTES,
    STORAGES,
    UNTYPED,
    Broken,
    Described,
    NotPlain,
    Storage,
    Within,
    described,
)
from normscope.targets.state_files.records import Record, records
from normscope.targets.state_files.values import BYTES, extent, read

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
ADVICE = (
    "Files that run code are never loaded: save it again as safetensors, "
    "or with torch.save(model.state_dict(), ...)"
)

Placed = Callable[[Storage], tuple[int, int]]
"""a storage -> its first byte in the file, and how many it has"""


def read_tree(path: Path) -> Any:
    """What the file holds, with :class:`Stored` tensors as leaves.

    Raises:
        BadTarget: the file is missing, broken, or asks for more than plain tensors.
    """
    with opened(path) as (file, size):
        try:
            tree, placed = (_zip if file.read(2) == b"PK" else _stream)(path, file, size)
        except NotPlain as refusal:
            raise BadTarget(
                f"{path} cannot be read as plain tensors (it asks for {refusal}). {ADVICE}"
            ) from None
        except Broken as reason:
            raise BadTarget(f"{path} is broken or of another format: {reason}") from None
    return _with_values(path, tree, placed)


def _zip(path: Path, file: BinaryIO, size: int) -> tuple[Any, Placed]:
    found = records(path, file, size)
    pickles = [name for name in found if name.endswith("/data.pkl") or name == "data.pkl"]
    if len(pickles) != 1:
        raise Broken("its archive holds no data.pkl, as torch.save writes it")
    prefix = pickles[0].removesuffix("data.pkl")
    if any(name.startswith(f"{prefix}code/") for name in found) or f"{prefix}constants.pkl" in found:
        raise BadTarget(
            f"{path} cannot be read as plain tensors (it is a TorchScript archive, which is code). {ADVICE}"
        )
    order = found.get(f"{prefix}byteorder")
    if order is not None and exactly(file, order.start(file), min(order.size, 6), path) != b"little":
        raise Broken("its numbers are not in little-endian order")
    pickle = found[pickles[0]]
    if pickle.size > PICKLE_BYTES:
        raise Broken(f"its data.pkl has {pickle.size} bytes")
    file.seek(pickle.start(file))
    tree = described(Within(file, pickle.size))

    def placed(storage: Storage) -> tuple[int, int]:
        record: Record | None = found.get(f"{prefix}data/{storage.key}")
        if record is None:
            raise Broken(f"its archive lacks the record data/{storage.key[:40]}")
        with opened(path) as (again, _):
            return record.start(again), record.size

    return tree, placed


def _stream(path: Path, file: BinaryIO, size: int) -> tuple[Any, Placed]:
    """Magic number, protocol, system, the pickle, the keys of the storages, and each with its number of elements."""
    file.seek(257)
    if file.read(5) == b"ustar":
        raise Broken("it has the format of PyTorch before 0.1.10")
    file.seek(0)
    reader = Within(file)
    magic = described(reader)
    if magic != MAGIC:
        raise Broken("it does not begin as torch.save writes it")
    if described(reader) != PROTOCOL:
        raise Broken("it has an unknown protocol number")
    system = described(reader)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise Broken("its numbers are not in little-endian order")
    tree = described(reader)
    keys = described(reader)
    if not isinstance(keys, list) or not all(type(key) is str for key in keys):
        raise Broken("its list of storages is damaged")
    order = {key: place for place, key in enumerate(keys)}
    if len(order) != len(keys):
        raise Broken("its list of storages names one twice")
    storages = {storage.key: storage for storage in _storages(tree)}
    starts: dict[str, tuple[int, int]] = {}
    place = file.tell()
    for key in keys:
        storage = storages.get(key)
        width = (
            0 if storage is None else BYTES.get(STORAGES.get(storage.kind, ""), int(storage.kind == UNTYPED))
        )
        if not width:
            break  # what follows cannot be placed; a tensor that needs it is refused
        (count,) = struct.unpack("<q", exactly(file, place, 8, path))
        if count < 0 or place + 8 + count * width > size:
            raise Broken(f"a storage of {count} elements does not fit into the file: truncated?")
        starts[key] = (place + 8, count * width)
        place += 8 + count * width

    def placed(storage: Storage) -> tuple[int, int]:
        if storage.key not in starts:
            raise Broken(f"it lacks the storage {storage.key[:40]!r}")
        return starts[storage.key]

    return tree, placed


def _storages(tree: Any) -> list[Storage]:
    """Every storage of the tree; containers may hold each other."""
    found: list[Storage] = []
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Described):
            found.append(item.storage)
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            waiting += item.values() if isinstance(item, dict) else item
    return found


def _with_values(path: Path, tree: Any, placed: Placed) -> Any:
    """The tree's dictionaries, each tensor with a way to its bytes. A dictionary inside itself ends there."""
    known: dict[int, dict[Any, Any]] = {}

    def leaf(value: Any) -> Any:
        return Stored(value.shape, value.dtype, partial(_read, path, value, placed))

    if isinstance(tree, Described):
        return leaf(tree)
    if not isinstance(tree, dict):
        return tree
    root: dict[Any, Any] = {}
    known[id(tree)] = root
    waiting = [(tree, root)]
    while waiting:
        source, copy = waiting.pop()
        for key, value in source.items():
            if isinstance(value, Described):
                copy[key] = leaf(value)
            elif isinstance(value, dict):
                if id(value) not in known:
                    known[id(value)] = {}
                    waiting.append((value, known[id(value)]))
                copy[key] = known[id(value)]
            else:
                copy[key] = None
    return root


def _read(path: Path, tensor: Described, placed: Placed) -> Any:
    try:
        start, held = placed(tensor.storage)
    except Broken as reason:
        raise BadTarget(f"{path} is broken or of another format: {reason}") from None
    width = BYTES.get(tensor.dtype, 0)
    last = (tensor.offset + extent(tensor.shape, tensor.strides)) * width
    if not width or last > held:
        raise BadTarget(f"{path}: a tensor ends at byte {last} of a storage that has {held}")
    return read(path, start + tensor.offset * width, tensor.dtype, tensor.shape, tensor.strides)
