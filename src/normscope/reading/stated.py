"""Reader for modules that say themselves what they are: by a method ``__normscope__(input_ndim) -> Reading``."""

from __future__ import annotations

from typing import Any

from normscope.reading.base import Reader, Reading


def _read(obj: Any, input_ndim: int | None) -> Reading | None:
    stated = getattr(type(obj), "__normscope__", None)
    return None if stated is None else stated(obj, input_ndim)


READER = Reader(needs="torch", knows=("modules with a method __normscope__",), read=_read)
