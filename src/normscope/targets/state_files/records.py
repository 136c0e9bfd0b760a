"""The records of a zip archive that ``torch.save`` wrote: stored as they are, one after the other."""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from normscope.errors import BadTarget, told
from normscope.targets.state_files.bounded import exactly

DIRECTORY_BYTES, RECORDS = 16 * 2**20, 100_000
END, END64, LOCAL = b"PK\x05\x06", b"PK\x06\x06", b"PK\x03\x04"
LOCAL_BYTES = 30


@dataclass(frozen=True)
class Record:
    path: Path
    header: int
    size: int
    end: int
    """the first byte that belongs to another record"""
    packed: bool = False
    """compressed or encrypted, as a script's code may be"""

    def start(self, file: BinaryIO) -> int:
        """Its first byte of data, behind a header of its own.

        Raises:
            BadTarget: the header is none, the data do not fit before the next record, or would have to be unpacked.
        """
        if self.packed:
            raise BadTarget(
                f"{self.path}: a record of its archive is compressed or encrypted, which torch.save never does; it is "
                "not unpacked"
            )
        head = exactly(file, self.header, LOCAL_BYTES, self.path)
        name, extra = struct.unpack("<HH", head[26:30])
        start: int = self.header + LOCAL_BYTES + name + extra
        if head[:4] != LOCAL or start + self.size > self.end:
            raise BadTarget(f"{self.path}: a record of its archive is damaged, or reaches into the next one")
        return start


def records(path: Path, file: BinaryIO, size: int) -> dict[str, Record]:
    """Name -> record.

    Raises:
        BadTarget: no archive; a directory out of bounds; overlapping or repeated records.
    """
    directory = _directory(path, file, size)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    except Exception as error:  # a damaged directory can fail in any way
        raise BadTarget(f"{path} is broken or of another format: {told(error)}") from None
    found: dict[str, Record] = {}
    ends = [*(entry.header_offset for entry in entries), directory][1:]
    for entry, end in zip(entries, ends, strict=True):
        where = f"{path}: the record {entry.filename[:80]!r} of its archive"
        if entry.filename in found:
            raise BadTarget(f"{where} stands there twice")
        if entry.header_offset < 0 or entry.header_offset + LOCAL_BYTES + entry.compress_size > end:
            raise BadTarget(f"{where} is damaged, or reaches into the next one")
        packed = entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size
        found[entry.filename] = Record(
            path, entry.header_offset, entry.file_size, end, packed or bool(entry.flag_bits & 1)
        )
    return found


def _directory(path: Path, file: BinaryIO, size: int) -> int:
    """First byte of the directory, which is bounded before it is read.

    Raises:
        BadTarget: there is none, or it is larger than that of a state dict.
    """
    tail_at = max(0, size - 2**16 - 22)
    tail = exactly(file, tail_at, size - tail_at, path)
    place = tail.rfind(END)
    if place < 0 or len(tail) - place < 22:
        raise BadTarget(f"{path} is broken: its archive has no end; was it copied whole?")
    start: int
    count, length, start = struct.unpack("<HLL", tail[place + 10 : place + 20])
    wide = tail.rfind(END64, 0, place)
    if wide >= 0 and place - wide >= 56:
        count, length, start = struct.unpack("<QQQ", tail[wide + 32 : wide + 56])
    if count > RECORDS or length > DIRECTORY_BYTES:
        raise BadTarget(
            f"{path}: the directory of its archive claims {count} records in {length} bytes; at most {RECORDS} in "
            f"{DIRECTORY_BYTES} are read"
        )
    if start + length > size:
        raise BadTarget(f"{path} is broken: the directory of its archive lies beyond its end")
    return start
