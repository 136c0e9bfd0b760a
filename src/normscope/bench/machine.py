"""The machine a table was made on: what its numbers hold for."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNKNOWN_CACHE = 32 * 2**20
"""bytes: a common size, where the system does not say"""


@dataclass(frozen=True)
class Machine:
    """``kernels`` is what ``normscope.kernels.status()`` says: the instruction set in use, or why none is."""

    system: str
    cpu: str
    cores: int
    last_level_cache: int
    memory: int
    threads: int
    python: str
    torch: str
    normscope: str
    kernels: str
    allocator: str


def describe(allocator: str) -> Machine:
    import normscope
    from normscope import kernels

    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        cpu=cpu_model(),
        cores=os.cpu_count() or 1,
        last_level_cache=last_level_cache(),
        memory=memory()[0],
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        normscope=normscope.__version__,
        kernels=str(kernels.status()),
        allocator=allocator,
    )


def cpu_model() -> str:
    names = re.findall(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), flags=re.M)
    return names[0] if names else platform.processor() or platform.machine()


def last_level_cache(caches: Path = CACHES) -> int:
    """Bytes of the largest cache that core 0 reads through; 32 MiB where the system does not say."""
    sizes = [_size(_text(entry)) for entry in sorted(caches.glob("index*/size"))]
    return max(sizes, default=0) or UNKNOWN_CACHE


def memory() -> tuple[int, int]:
    """Bytes of memory: all, and what a new allocation can have."""
    known = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text(Path("/proc/meminfo")), flags=re.M))
    if "MemAvailable" in known:
        return 1024 * int(known["MemTotal"]), 1024 * int(known["MemAvailable"])
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        total = 8 * 2**30
    return total, total // 2


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    return int(found[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[found[2]] if found else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
