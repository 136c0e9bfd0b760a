"""Keep large freed blocks in the process: an opt-in for CPU work on large tensors.

glibc takes each block above its mmap threshold (at most 32 MiB, which it adapts) from the system and gives it back on
free, so that every output of a layer is faulted in anew, page by page: 16,384 faults for 64 MiB, which take several
times longer than normalizing it. Below a raised threshold a freed block is kept and used again.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

MIB = 2**20
SETTINGS = {
    # name: (number in malloc.h, value)
    "M_MMAP_THRESHOLD": (-3, 1024 * MIB),
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),
    "M_TOP_PAD": (-2, 256 * MIB),
}


@dataclass(frozen=True)
class AllocatorTuning:
    """What `tune_allocator` did. True where something was set."""

    set: dict[str, int] = field(default_factory=dict)
    """glibc's name of each value that is in force now, in bytes"""
    refused: tuple[str, ...] = ()
    """values that this version of glibc did not take"""
    reason: str = ""
    """why nothing was set, "" where something was"""

    def __bool__(self) -> bool:
        return bool(self.set)

    def __str__(self) -> str:
        if not self.set:
            return f"nothing was set: {self.reason}"
        said = ", ".join(f"{name} {value / MIB:.0f} MiB" for name, value in self.set.items())
        refused = f"; glibc refused {', '.join(self.refused)}" if self.refused else ""
        return f"freed blocks stay in the process: {said}{refused}"


def tune_allocator() -> AllocatorTuning:
    """Let glibc reuse freed blocks of up to 1 GiB, instead of returning each to the system.

    Sets M_MMAP_THRESHOLD to 1 GiB, M_TRIM_THRESHOLD to 2 GiB and M_TOP_PAD to 256 MiB, for the whole process and until
    it ends; they cannot be taken back. Nothing of this happens on import. The cost: memory that was used once is not
    returned to the system, so that the process stays at its peak, and blocks of different sizes can fragment it.
    Blocks that are in use already are not touched: call it early. Tensors on other devices are not concerned.

    Returns what was set. Nothing is, and ``reason`` says why, where the C library is not glibc (macOS, Windows, musl)
    or another allocator stands in for its malloc (jemalloc, tcmalloc, mimalloc), which keeps blocks by rules of its
    own.

    >>> import normscope
    >>> tuning = normscope.tune_allocator()  # doctest: +SKIP
    >>> print(tuning)  # doctest: +SKIP
    freed blocks stay in the process: M_MMAP_THRESHOLD 1024 MiB, M_TRIM_THRESHOLD 2048 MiB, M_TOP_PAD 256 MiB

    Source: mallopt(3) of the GNU C library; the same values can be given to a new process as MALLOC_MMAP_THRESHOLD_,
    MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_.
    """
    reason = _not_glibc() or _another_malloc()
    if reason:
        return AllocatorTuning(reason=reason)
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    done = {name: value for name, (number, value) in SETTINGS.items() if mallopt(number, value) == 1}
    refused = tuple(name for name in SETTINGS if name not in done)
    return AllocatorTuning(done, refused, "" if done else f"glibc refused {', '.join(refused)}")


def _not_glibc() -> str:
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else None
    except (ValueError, OSError):  # musl does not know the name
        library = None
    return "" if library else f"the C library is not glibc ({sys.platform}), whose settings these are"


class _Found(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _another_malloc() -> str:
    """Who serves malloc in this process, where it is not libc itself."""
    process, found = ctypes.CDLL(None), _Found()
    address = ctypes.cast(process.malloc, ctypes.c_void_p)
    process.dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Found))
    if not process.dladdr(address, ctypes.byref(found)) or not found.file:
        return "the library that serves malloc cannot be found"
    file = Path(os.fsdecode(found.file)).name
    return "" if file.startswith(("libc.so", "libc-")) else f"malloc is served by {file}, not by glibc"
