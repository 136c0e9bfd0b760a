"""``model.safetensors.index.json``: which file of its own folder holds which tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from normscope.doctor.stored_state import Stored
from normscope.doctor.wording import listed, plural
from normscope.errors import BadTarget
from normscope.targets.state_files.bounded import JSON_BYTES, exactly, opened, parsed

INDEX = ".index.json"
SHARDS = 4096

Reader = Callable[[Path], tuple[dict[str, Stored], list[str]]]


def shards(index: Path, read: Reader) -> tuple[dict[str, Stored], list[str]]:
    """The tensors that the index lists, each from the file it names, and notes.

    A shard is a plain file name: nothing that leads out of the folder is followed. (A link *in* the folder is the
    work of whoever made the folder, such as the cache of a model hub, and is.)

    Raises:
        BadTarget: the index is broken, names a file elsewhere, or lists what a shard does not hold.
    """
    with opened(index) as (file, size):
        if size > JSON_BYTES:
            raise BadTarget(f"{index} has {size} bytes; at most {JSON_BYTES} are read")
        content = parsed(exactly(file, 0, size, index), str(index))
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places or not all(type(name) is str for name in places.values()):
        raise BadTarget(f"{index} has no weight_map from tensor names to file names")
    listing: dict[str, list[str]] = {}
    for tensor, name in places.items():
        listing.setdefault(name, []).append(tensor)
    if len(listing) > SHARDS:
        raise BadTarget(f"{index} names {len(listing)} files; at most {SHARDS} are read")
    tensors: dict[str, Stored] = {}
    notes: list[str] = []
    for name, wanted in sorted(listing.items()):
        held, said = read(_beside(index, name))
        notes += said
        lost = [tensor for tensor in wanted if tensor not in held]
        if lost:
            raise BadTarget(f"{index}: {name} lacks {listed([t[:80] for t in lost])}")
        if len(held) > len(wanted):
            notes.append(
                f"{name} holds {plural(len(held) - len(wanted), 'tensor')} that the index does not list"
            )
        tensors |= {tensor: held[tensor] for tensor in wanted}
    return {name: tensors[name] for name in places}, notes


def _beside(index: Path, name: str) -> Path:
    plain = name not in ("", ".", "..") and not any(sign in name for sign in "/\\:\0")
    if not plain or name.lower().endswith(INDEX):
        raise BadTarget(
            f"{index} names the file {name[:80]!r}; only plain names in its own folder are followed"
        )
    return index.parent / name
