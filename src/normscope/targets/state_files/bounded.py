"""Reading files that nobody vouches for: ordinary files only, never more bytes than were asked for, bounded JSON."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from normscope.errors import BadTarget, told

JSON_BYTES = 32 * 2**20
JSON_PARTS = 4_000_000
"""commas and brackets: each makes an object, so they bound memory where bytes do not (``[[],[],...``)"""


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """The file and its size. A pipe or a device, which could block or never end, is refused; links are followed.

    Raises:
        BadTarget: it is missing, no ordinary file, or may not be read.
    """
    try:
        # O_NONBLOCK: opening a pipe must not wait for a writer
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise BadTarget(f"there is no file {path}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadTarget(f"{path} cannot be opened: {told(error)}") from None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise BadTarget(f"{path} is no ordinary file")
        yield file, status.st_size


def exactly(file: BinaryIO, offset: int, count: int, path: Path) -> bytes:
    """``count`` bytes from ``offset``.

    Raises:
        BadTarget: the file ends before.
    """
    try:
        file.seek(offset)
        data = file.read(count)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise BadTarget(f"{path} cannot be read: {told(error)}") from None
    if len(data) != count:
        raise BadTarget(f"{path} is truncated: {count} bytes expected at {offset}, {len(data)} are there")
    return data


def parsed(text: bytes, what: str) -> Any:
    """JSON, strictly: UTF-8, no name twice, no NaN, bounded in size and depth.

    Raises:
        BadTarget: for anything else.
    """
    if len(text) > JSON_BYTES:
        raise BadTarget(f"{what} has {len(text)} bytes; at most {JSON_BYTES} are read")
    parts = sum(text.count(sign) for sign in (b",", b"[", b"{"))
    if parts > JSON_PARTS:
        raise BadTarget(f"{what} has {parts} parts; at most {JSON_PARTS} are read")
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise BadTarget(f"{what} is nested too deeply") from None
    except ValueError as error:  # also UnicodeDecodeError and integers of thousands of digits
        raise BadTarget(f"{what} is not the JSON it should be: {told(error)}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice[:80]!r} stands twice")
    return found


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def whole(value: Any, most: int) -> bool:
    """A non-negative integer, no bool, at most ``most``.

    >>> whole(3, 5), whole(True, 5), whole(2.0, 5), whole(-1, 5), whole(6, 5)
    (True, False, False, False, False)
    """
    return type(value) is int and 0 <= value <= most
