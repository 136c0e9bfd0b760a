"""Compiles ``native/`` once for each instruction set: what installing runs, and ``python -m normscope.kernels.build``.

Imports the standard library only, since at install time there is nothing else. A missing or failing compiler is no
error: what was run and what became of it is written beside the libraries, where `normscope.kernels.status` reads it.

Never ``-ffast-math``: linking with it makes every thread of the process flush denormal numbers to zero, and compiling
with it drops the handling of NaN. ``CXXFLAGS`` is not read, so that neither can come from there.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "native"
RECORD = "_native_build.txt"
HOW = "python -m normscope.kernels.build"

# instruction set -> (its compiler flags, what the CPU must have, as Linux calls it); the fastest first
AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
X86 = {
    "avx512": (*(f"-m{feature}" for feature in AVX512), "-mprefer-vector-width=512"),
    "avx2": tuple(f"-m{feature}" for feature in AVX2),
}
NEEDS = {"avx512": AVX512, "avx2": AVX2, "base": ()}

FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    "-Wno-psabi",  # no vector crosses a library's border
)
LINUX = ("-ldl", "-Wl,--exclude-libs,ALL")
STATIC = (
    "-static-libstdc++",
    "-static-libgcc",
)  # one library for all distributions, and apart from PyTorch's copy


def file_name(isa: str) -> str:
    return f"_native_{isa}.so"


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """Those of this kind of machine, the fastest first, with their flags."""
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return {**(X86 if x86 else {}), "base": ()}


def build(folder: Path, isas: Iterable[str] = ()) -> dict[str, str]:
    """Compiles all instruction sets, or those named, into ``folder``; what became of each, as written into `RECORD`.

    That is "built" or "not built: why", and in a second line what was run. Libraries that an earlier build left and
    this one could not make are removed: they may be of other sources.
    """
    flags = {isa: known for isa, known in instruction_sets().items() if not isas or isa in isas}
    folder = folder.resolve()  # the compiler runs where the sources are
    folder.mkdir(parents=True, exist_ok=True)
    try:
        compiler = find_compiler()
    except NoCompiler as missing:
        results = dict.fromkeys(flags, f"not built: {missing}")
    else:
        with ThreadPoolExecutor(len(flags)) as pool:
            results = dict(
                zip(flags, pool.map(lambda isa: _compile(compiler, isa, folder), flags), strict=True)
            )
    for isa, result in results.items():
        if not result.startswith("built"):
            (folder / file_name(isa)).unlink(missing_ok=True)
    record = {**_record(folder), **results}
    (folder / RECORD).write_text(
        "".join(f"{isa}: {result}\n" for isa, result in record.items()), encoding="utf-8"
    )
    return results


def outcome(folder: Path, isa: str) -> str:
    """What the last build in ``folder`` said of an instruction set, "" where there was none."""
    return _record(folder).get(isa, "").partition("\n")[0]


def _record(folder: Path) -> dict[str, str]:
    try:
        text = (folder / RECORD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    found = re.findall(r"^(\w+): (.*(?:\n .*)?)$", text, re.MULTILINE)
    return {isa: result for isa, result in found if isa in NEEDS}


class NoCompiler(Exception):
    """Says why."""


class Compiler(NamedTuple):
    command: list[str]
    link: tuple[str, ...]

    def make(self, sources: Iterable[str], flags: Iterable[str], library: Path) -> tuple[list[str], str]:
        """The command that was run, and what went wrong, or ""."""
        command = [*self.command, *FLAGS, *flags, *sources, "-o", str(library), *self.link]
        return command, _run(command)


def find_compiler() -> Compiler:
    """The first of ``$CXX``, g++, clang++ and c++ that makes a library.

    Raises NoCompiler where none does.
    """
    if sys.platform == "win32":
        raise NoCompiler(
            "the kernels use vector types of GCC and Clang, and on Windows neither is looked for"
        )
    if not (SOURCES / "kernels.cpp").is_file():
        raise NoCompiler(f"there is no {SOURCES / 'kernels.cpp'}")
    link = LINUX if sys.platform.startswith("linux") else ()
    failed = []
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        command = shlex.split(name)
        if not command:
            continue
        if not shutil.which(command[0]):
            failed.append(f"{name} is not there")
            continue
        for compiler in (Compiler(command, (*link, *STATIC)), Compiler(command, link)):
            error = _try(compiler)
            if not error:
                return compiler
        failed.append(f"{name} compiles nothing: {error}")
    raise NoCompiler(f"no C++ compiler ({'; '.join(failed)})")


def _try(compiler: Compiler) -> str:
    """Why it cannot make a library, or "": where libstdc++ is not there to be linked statically, say."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cpp")
        source.write_text("#include <atomic>\n")
        return compiler.make([str(source)], (), Path(folder, "empty.so"))[1]


def _compile(compiler: Compiler, isa: str, folder: Path) -> str:
    """Compiles beside the place and moves there: a process that runs the old library keeps it."""
    new = folder / f"{file_name(isa)}.{os.getpid()}"
    command, error = compiler.make(
        sorted(path.name for path in SOURCES.glob("*.cpp")), instruction_sets()[isa], new
    )
    if not error:
        new.replace(folder / file_name(isa))
    new.unlink(missing_ok=True)
    return f"{f'not built: {error}' if error else 'built'}\n    {shlex.join(command)}"


def _run(command: list[str]) -> str:
    """What went wrong, in a line, or ""."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=1800, cwd=SOURCES
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("collect2:")] or ["no message"]
    told = next((line for line in lines if "error" in line), lines[0])
    return f"exit code {done.returncode}: {told.strip()[:400]}"


if __name__ == "__main__":
    built = build(Path(__file__).parent, sys.argv[1:])
    print("\n".join(f"{isa}: {result}" for isa, result in built.items()))
    sys.exit(not all(result.startswith("built") for result in built.values()))
