"""Freed blocks are kept: counted in page faults, in processes of their own, since it cannot be taken back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import normscope
from normscope import allocator

needs_glibc = pytest.mark.skipif(bool(allocator._not_glibc()), reason="these are settings of glibc")


def child(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    return done.stdout.strip()


FAULTS = """
import resource, torch, normscope
{tune}
x = torch.ones(16 * 2**20)  # 64 MiB
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for repetition in range(30):
    if repetition == 20:  # until then small blocks settle between the large ones
        before = faults()
    y = x + 1
    del y
print(faults() - before)
"""


@needs_glibc
def test_repeated_outputs_of_64_mib_are_not_faulted_in_again() -> None:
    plain = int(child(FAULTS.format(tune="")))
    tuned = int(child(FAULTS.format(tune="assert normscope.tune_allocator()")))
    # ten times 64 MiB are 163,840 pages of 4 KiB, or 320 where the system gives pages of 2 MiB
    assert plain >= 320
    assert tuned < plain / 10


@needs_glibc
def test_it_says_what_it_set() -> None:
    code = "import normscope; t = normscope.tune_allocator(); print(bool(t), t.set, t.refused, [t.reason]); print(t)"
    assert child(code).splitlines() == [
        "True {'M_MMAP_THRESHOLD': 1073741824, 'M_TRIM_THRESHOLD': 2147483647, 'M_TOP_PAD': 268435456} () ['']",
        "freed blocks stay in the process: "
        "M_MMAP_THRESHOLD 1024 MiB, M_TRIM_THRESHOLD 2048 MiB, M_TOP_PAD 256 MiB",
    ]


@needs_glibc
def test_importing_everything_sets_nothing() -> None:
    load = "for name in normscope.__all__: getattr(normscope, name)"
    assert int(child(FAULTS.format(tune=load))) >= 320


def test_another_c_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    tuning = normscope.tune_allocator()
    assert not tuning
    assert str(tuning) == ("nothing was set: the C library is not glibc (darwin), whose settings these are")


@needs_glibc
def test_a_preloaded_allocator_is_told(tmp_path: Path) -> None:
    compiler = (
        shutil.which("cc") or shutil.which("gcc") or pytest.skip("no C compiler to build an allocator with")
    )
    source, library = tmp_path / "own.c", tmp_path / "libownmalloc.so"
    # an allocator that never frees is enough to stand in for glibc's
    source.write_text(
        "#include <stddef.h>\n#include <string.h>\n#include <sys/mman.h>\n"
        "static char *at, *end;\n"
        "void *malloc(size_t n) { n = (n + 31) & ~(size_t)15; if (at + n > end) { size_t m = n + (1 << 24);\n"
        "  at = mmap(0, m, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); end = at + m; }\n"
        "  *(size_t *)at = n - 16; char *p = at + 16; at += n; return p; }\n"
        "void free(void *p) { (void)p; }\n"
        "void *calloc(size_t a, size_t b) { return memset(malloc(a * b), 0, a * b); }\n"
        "void *realloc(void *p, size_t n) { void *q = malloc(n); if (p) { size_t m = ((size_t *)p)[-2];\n"
        "  memcpy(q, p, m < n ? m : n); } return q; }\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    said = child(
        "from normscope import allocator; print(allocator.tune_allocator())", LD_PRELOAD=str(library)
    )
    assert said == "nothing was set: malloc is served by libownmalloc.so, not by glibc"


@pytest.mark.parametrize(
    ("taken", "told"),
    [
        ((-1, -2), "freed blocks stay in the process: M_TRIM_THRESHOLD 2048 MiB, M_TOP_PAD 256 MiB; "
         "glibc refused M_MMAP_THRESHOLD"),
        ((), "nothing was set: glibc refused M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD"),
    ],
    ids=["one", "all"],
)  # fmt: skip
def test_values_that_glibc_refuses_are_told(
    monkeypatch: pytest.MonkeyPatch, taken: tuple[int, ...], told: str
) -> None:
    class Process:
        def __init__(self, name: None) -> None:
            def mallopt(number: int, value: int) -> int:
                return int(number in taken)  # a glibc before 2.35 takes no mmap threshold above 32 MiB

            self.mallopt = mallopt

    monkeypatch.setattr(allocator, "_not_glibc", lambda: "")
    monkeypatch.setattr(allocator, "_another_malloc", lambda: "")
    monkeypatch.setattr(allocator.ctypes, "CDLL", Process)
    tuning = allocator.tune_allocator()
    assert str(tuning) == told
    assert bool(tuning) == bool(taken)
