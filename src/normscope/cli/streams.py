"""Standard output and standard error: any encoding, any reader, and nothing but the report in standard output."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Forgiving(io.RawIOBase):
    """A file descriptor that drops what it cannot write: for a ``forgiven`` reason without a word, else told once."""

    def __init__(self, descriptor: int, forgiven: type[OSError]) -> None:
        self._raw = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115
        self._forgiven = forgiven
        self._given_up = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def isatty(self) -> bool:
        return self._raw.isatty()

    def write(self, data: ReadableBuffer, /) -> int | None:
        try:
            if not self._given_up:
                return self._raw.write(data)
        except OSError as error:
            self._given_up = (
                True  # else buffers would try again when the process ends, and change its exit code
            )
            if not isinstance(error, self._forgiven):
                raise OSError(error.errno, error.strerror, "standard output") from error
        return memoryview(data).nbytes


def settle() -> None:
    """Make both streams ready for anything.

    What their encoding cannot say is written as ``\\u2026``. A reader that leaves (``| head -1``), or a stream that
    was closed from the start (``>&-``), changes neither the run nor its exit code.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # was closed: taken, so that no file of the user's gets its number and is printed into
    os.close(descriptor)
    encoding = getattr(sys.stdout, "encoding", "utf-8")
    sys.stdout = _text(1, encoding, BrokenPipeError)
    sys.stderr = _text(2, getattr(sys.stderr, "encoding", "utf-8"), OSError, line_buffering=True)


def claim() -> TextIO:
    """Standard output for the report alone; what anyone else prints goes to standard error from here on.

    The model's code prints where it likes: through ``sys.stdout``, from C, from subprocesses, from buffers that are
    flushed when the process ends. So the file descriptor itself is turned over, and stays so.
    """
    own: TextIO = sys.stdout
    own.flush()
    if isinstance(getattr(getattr(own, "buffer", None), "raw", None), _Forgiving):
        own = _text(os.dup(1), own.encoding, BrokenPipeError)
        os.dup2(2, 1)
    sys.stdout = sys.stderr
    return own


def _text(
    descriptor: int, encoding: str, forgiven: type[OSError], line_buffering: bool = False
) -> io.TextIOWrapper:
    raw = _Forgiving(descriptor, forgiven)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=line_buffering or raw.isatty(),
    )
