"""Kernels: any specification in plain PyTorch, and the common ones in C++ at the speed of memory.

Light: nothing is loaded before it is used.

>>> from normscope import kernels
>>> kernels.status().threads > 0
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normscope.kernels.library import Status


def status() -> Status:
    """Which native kernels run here and why, as data; ``print`` it to read it.

    Source: `normscope.kernels.library`, which chooses, and ``_native_build.txt`` beside it, which the build wrote.
    """
    from normscope.kernels import library
    from normscope.kernels import ops as _registered  # noqa: F401  (operators tell the library how they reach it)

    return library.status()
