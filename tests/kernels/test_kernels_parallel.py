"""``native/parallel.hpp``: each task once, on PyTorch's threads, serial where there must be one; scratch memory."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # first, for its OpenMP library
from hypothesis import given
from hypothesis import strategies as st

from normscope.kernels import build

SOURCE = r"""
#include <sched.h>
#include <chrono>
#include <thread>
#include "parallel.hpp"

extern "C" {
#define OPEN __attribute__((visibility("default")))

// Counts the runs of each task; the task `failing` reports that there is no memory.
OPEN int count(int64_t tasks, int threads, int64_t failing, int32_t *runs) {
  return ns::parallel_for(tasks, threads, [&](int64_t task) -> int {
    ++runs[task];
    return task == failing ? NS_NO_MEMORY : NS_DONE;
  });
}

// How many of `threads` tasks ran at one time: each waits until all have begun, for at most `ms`.
OPEN int together(int threads, int ms) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
  std::atomic<int> begun{0}, most{0};
  ns::parallel_for(threads, threads, [&](int64_t) {
    ++begun;
    while (begun < threads && std::chrono::steady_clock::now() < end) sched_yield();
    most = begun.load() == threads && std::chrono::steady_clock::now() < end ? threads : 1;
  });
  return most;
}

// In how many of 2 tasks of a loop a loop inside of it left its thread.
OPEN int left_inside() {
  std::atomic<int> left{0};
  ns::parallel_for(2, 2, [&](int64_t) {
    const auto here = pthread_self();
    ns::parallel_for(64, 2, [&](int64_t) { if (!pthread_equal(here, pthread_self())) left = 1; });
  });
  return left;
}

OPEN const char *pool() { return ns::Pool::get().file(); }

OPEN int misaligned(int64_t bytes) {
  ns::Scratch memory(static_cast<std::size_t>(bytes));
  if (!memory) return -1;
  char *begin = memory.as<char>();
  for (int64_t i = 0; i < bytes; ++i) begin[i] = 1;  // all of it is there
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(begin) % 64);
}

OPEN int none_for(std::size_t bytes) { return !ns::Scratch(bytes); }

// Whether two blocks of a scope are apart, and the next scope gets one of them again.
OPEN int reused(int64_t bytes) {
  void *first, *second;
  {
    ns::Scratch a(bytes), b(bytes);
    first = a.as<void>(), second = b.as<void>();
    if (!first || first == second) return -1;
  }
  ns::Scratch again(bytes);
  return again.as<void>() == first || again.as<void>() == second;
}
}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        compiler = build.find_compiler()
    except build.NoCompiler as why:
        pytest.skip(str(why))
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "test.cpp").write_text(SOURCE)
    flags = ["-Wall", "-Wextra", "-Werror", f"-I{build.SOURCES}"]
    _, error = compiler.make(str(folder / "test.cpp"), folder / "test.so", flags)
    assert not error, error
    return folder / "test.so"


def load(path: Path) -> ctypes.CDLL:
    native = ctypes.CDLL(str(path))
    native.count.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_int32)]
    native.pool.restype = ctypes.c_char_p
    native.misaligned.argtypes = native.reused.argtypes = [ctypes.c_int64]
    native.none_for.argtypes = [ctypes.c_size_t]
    return native


@pytest.fixture(scope="module")
def native(path: Path) -> ctypes.CDLL:
    return load(path)


@pytest.fixture
def pool(native: ctypes.CDLL) -> str:
    name = bytes(native.pool()).decode()
    if not name:
        pytest.skip("PyTorch has no OpenMP library here whose threads could be used")
    return name


@given(tasks=st.integers(0, 300), threads=st.integers(-1, 5))
def test_every_task_runs_once(native: ctypes.CDLL, tasks: int, threads: int) -> None:
    runs = (ctypes.c_int32 * tasks)()
    assert native.count(tasks, threads, -1, runs) == 0
    assert list(runs) == [1] * tasks


@given(data=st.data(), tasks=st.integers(1, 300), threads=st.integers(1, 3))
def test_a_failure_is_returned_and_ends_the_loop(
    native: ctypes.CDLL, data: st.DataObject, tasks: int, threads: int
) -> None:
    failing = data.draw(st.integers(0, tasks - 1))
    runs = (ctypes.c_int32 * tasks)()
    assert native.count(tasks, threads, failing, runs) == 2
    assert runs[failing] == 1
    assert max(runs) == 1
    if threads == 1:
        assert list(runs) == [1] * (failing + 1) + [0] * (tasks - failing - 1)


def test_two_threads_run_at_one_time(native: ctypes.CDLL, pool: str) -> None:
    assert native.together(2, 20_000) == 2


def test_the_threads_are_those_of_pytorch(native: ctypes.CDLL, pool: str) -> None:
    own = Path(torch.__file__).parent.resolve()
    if not list(own.glob("lib/lib*omp*")):
        pytest.skip("this PyTorch brings no OpenMP library of its own")
    assert Path(pool).resolve().is_relative_to(own)


def test_a_loop_inside_of_a_loop_stays_on_its_thread(native: ctypes.CDLL) -> None:
    assert native.left_inside() == 0


FORK = """
import ctypes, os, signal, sys, torch
native = ctypes.CDLL(sys.argv[1])
if sys.argv[2] == "started":
    assert native.together(2, 20_000) == 2
child = os.fork()
if child == 0:
    signal.alarm(30)  # ends a child that waits for ever
    os._exit(native.together(2, 300 if sys.argv[2] == "started" else 20_000))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), native.together(2, 20_000))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize(("before", "in_child"), [("started", 1), ("fresh", 2)])
def test_a_forked_child_does_not_wait_for_threads_that_it_lost(
    path: Path, pool: str, before: str, in_child: int
) -> None:
    """One thread where the parent had a pool, which stays behind; else a pool of its own. The parent keeps its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, str(path), before],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == f"{in_child} 2\n", done.stderr


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4096, 100_003, 1 << 20, (1 << 20) + 1, 1 << 24])
def test_scratch_is_aligned(native: ctypes.CDLL, size: int) -> None:
    assert native.misaligned(size) == 0
    assert native.misaligned(size) == 0  # and again, from what was kept


@pytest.mark.parametrize("size", [1 << 62, (1 << 64) - 1, (1 << 64) - 64])
def test_scratch_that_is_not_to_be_had(native: ctypes.CDLL, size: int) -> None:
    assert native.none_for(size) == 1


def test_scratch_of_a_small_call_is_kept_for_the_next(native: ctypes.CDLL) -> None:
    for size in (64, 4096, 65_536, 1 << 20):  # each too large for what the last one left
        assert native.reused(size) == 1


def test_no_compiler_warns(path: Path) -> None:
    """Of any instruction set, about any source."""
    flags = ["-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    for source in build.SOURCES.glob("*.cpp"):
        _, error = build.find_compiler().compile(source.name, path.parent / "none", flags)
        assert not error, source


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_nothing_else_is_exported(path: Path) -> None:
    """A C++ library inside of ours must not stand in for PyTorch's."""
    done = subprocess.run(
        ["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    functions = {"count", "together", "left_inside", "pool", "misaligned", "none_for", "reused"}
    assert names <= functions | {"_init", "_fini"}, names - functions
    assert functions <= names
