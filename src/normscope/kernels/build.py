"""Compiles ``native/`` once for each instruction set: what installing runs, and ``python -m normscope.kernels.build``.

Imports the standard library only, since at install time there is nothing else. A missing or failing compiler is no
error: what was run and what became of it is written beside the libraries, where `normscope.kernels.status` reads it.

Never ``-ffast-math``: linking with it makes every thread of the process flush denormal numbers to zero, and compiling
with it drops the handling of NaN. ``CXXFLAGS`` is not read, so that neither can come from there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

SOURCES = Path(__file__).parent / "native"
RECORD = "_native_build.txt"
HOW = "python -m normscope.kernels.build"
SWITCH = "NORMSCOPE_BUILD"  # the instruction sets to compile at install, or "none"; all where it is not set
SEAL = b"normscope"  # behind every library, and a checksum behind it

# instruction set -> (its compiler flags, what the CPU must have, as Linux calls it); the fastest first
AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
X86 = {
    "avx512": (*(f"-m{feature}" for feature in AVX512), "-mprefer-vector-width=512"),
    "avx2": tuple(f"-m{feature}" for feature in AVX2),
}
NEEDS = {"avx512": AVX512, "avx2": AVX2, "base": ()}

FLAGS = (
    *("-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    "-Wno-psabi",  # no vector crosses a library's border
)
LINUX = ("-ldl", "-Wl,--exclude-libs,ALL")
STATIC = (
    "-static-libstdc++",
    "-static-libgcc",
)  # one library for all distributions, and apart from PyTorch's copy


def file_name(isa: str) -> str:
    # not "….so": Python would take it for an extension module
    return f"_native_{isa}.so.1"


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """Those of this kind of machine, the fastest first, with their flags."""
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return {**(X86 if x86 else {}), "base": ()}


def level(isa: str, source: str) -> str:
    """How much is optimized: all of it takes minutes to compile. A baseline beside better sets is for CPUs older than
    2013; float16 and float64 are rare on CPUs, and lose some percent."""
    if isa == "base" and len(instruction_sets()) > 1:
        return "-O1"
    return "-O2" if source in ("run_float16.cpp", "run_float64.cpp") else "-O3"


def build(folder: Path, isas: Iterable[str] = ()) -> dict[str, str]:
    """Compiles all instruction sets, or those named, into ``folder``; what became of each, as written into `RECORD`.

    That is "built from DIGEST" or "not built: why", and below it what was run. A library of the same digest is left as
    it is; one that an earlier build left and this one could not make is removed: it may be of other sources.
    """
    flags = {isa: known for isa, known in instruction_sets().items() if not isas or isa in isas}
    wish = os.environ.get(SWITCH, "").replace(",", " ").split()
    left = (
        {}
        if isas or not wish
        else {isa: f"not built: {SWITCH}={' '.join(wish)}" for isa in flags if isa not in wish}
    )
    folder = folder.resolve()  # the compiler runs where the sources are
    folder.mkdir(parents=True, exist_ok=True)
    record = _record(folder)
    flags = {isa: known for isa, known in flags.items() if isa not in left}
    try:
        results = left | (_build(find_compiler(), flags, folder) if flags else {})
    except NoCompiler as missing:
        results = left | dict.fromkeys(flags, f"not built: {missing}")
    for isa, result in results.items():
        if not result.startswith("built"):
            (folder / file_name(isa)).unlink(missing_ok=True)
    lines = (f"{isa}: {result}\n" for isa, result in {**record, **results}.items())
    (folder / RECORD).write_text("".join(lines), encoding="utf-8")
    return results


def _build(compiler: Compiler, flags: dict[str, tuple[str, ...]], folder: Path) -> dict[str, str]:
    """Every source for every instruction set at once, on all cores; then one library of each set."""
    sources = sorted(path.name for path in SOURCES.glob("*.cpp"))
    version = compiler.version()
    results, compiled = {}, {}
    with TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for isa in flags:
            made_of = f"built from {_digest(version, isa, flags[isa], compiler)}"
            if (folder / file_name(isa)).exists() and outcome(folder, isa) == made_of:
                results[isa] = _record(folder)[isa]
            else:
                into = [Path(objects, f"{isa}-{source}.o") for source in sources]
                jobs = [
                    pool.submit(compiler.compile, source, to, (level(isa, source), *flags[isa]))
                    for source, to in zip(sources, into, strict=True)
                ]
                compiled[isa] = (made_of, into, jobs)
        for isa, (made_of, into, jobs) in compiled.items():
            steps = [job.result() for job in jobs]
            if not any(step.error for step in steps):
                # Beside its place, then moved: a process that runs the old library keeps it.
                new = folder / f"{file_name(isa)}.{os.getpid()}"
                steps.append(compiler.link(into, new))
                if not steps[-1].error:
                    seal(new)
                    new.replace(folder / file_name(isa))
            failed = next((step for step in steps if step.error), None)
            told = f"not built: {failed.error}" if failed else made_of
            run = [failed] if failed else steps
            results[isa] = "\n    ".join([told, *(shlex.join(step.command) for step in run)])
    return {isa: results[isa] for isa in flags}


def _digest(version: str, isa: str, flags: tuple[str, ...], compiler: Compiler) -> str:
    """Of everything that a library is made of."""
    digest = hashlib.sha256(repr((version, compiler, FLAGS, flags, SEAL)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(level(isa, path.name).encode())
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def seal(library: Path) -> None:
    """Write the checksum of a library behind it, where no loader looks: loading a file that was cut off kills the
    process."""
    checksum = zlib.crc32(library.read_bytes())
    with library.open("ab") as file:
        file.write(SEAL + checksum.to_bytes(4, "little"))


def intact(library: Path) -> bool:
    """Whether a library is what was sealed.

    Raises OSError where it cannot be read.
    """
    content = library.read_bytes()
    body, end = content[: -len(SEAL) - 4], content[-len(SEAL) - 4 :]
    return end == SEAL + zlib.crc32(body).to_bytes(4, "little")


def outcome(folder: Path, isa: str) -> str:
    """What the last build in ``folder`` said of an instruction set, "" where there was none."""
    return _record(folder).get(isa, "").partition("\n")[0]


def _record(folder: Path) -> dict[str, str]:
    try:
        text = (folder / RECORD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    found = re.findall(r"^(\w+): (.*(?:\n .*)*)$", text, re.MULTILINE)
    return {isa: result for isa, result in found if isa in NEEDS}


class NoCompiler(Exception):
    """Says why."""


class Step(NamedTuple):
    command: list[str]
    error: str
    """what went wrong, or "\""""


class Compiler(NamedTuple):
    command: list[str]
    libraries: tuple[str, ...]

    def compile(self, source: str, target: Path, flags: Iterable[str]) -> Step:
        return self._run(*FLAGS, *flags, "-c", source, "-o", str(target))

    def link(self, objects: Iterable[Path], target: Path) -> Step:
        return self._run("-shared", "-pthread", *map(str, objects), "-o", str(target), *self.libraries)

    def make(self, source: str, target: Path, flags: Iterable[str] = ()) -> Step:
        """A library of one source."""
        return self._run("-O2", *FLAGS, *flags, "-shared", source, "-o", str(target), *self.libraries)

    def version(self) -> str:
        done = subprocess.run([*self.command, "--version"], capture_output=True, text=True, errors="replace")
        return done.stdout

    def _run(self, *arguments: str) -> Step:
        command = [*self.command, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=1800, cwd=SOURCES
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Step(command, f"{type(error).__name__}: {error}")
        if done.returncode == 0:
            return Step(command, "")
        lines = [line for line in done.stderr.splitlines() if not line.startswith("collect2:")]
        told = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        return Step(command, f"exit code {done.returncode}: {told.strip()[:400]}")


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
    libraries = LINUX if sys.platform.startswith("linux") else ()
    failed = []
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        command = shlex.split(name)
        if not command:
            continue
        if not shutil.which(command[0]):
            failed.append(f"{name} is not there")
            continue
        for compiler in (Compiler(command, (*libraries, *STATIC)), Compiler(command, libraries)):
            error = _try(compiler)
            if not error:
                return compiler
        failed.append(f"{name} compiles nothing: {error}")
    raise NoCompiler(f"no C++ compiler ({'; '.join(failed)})")


def _try(compiler: Compiler) -> str:
    """Why it cannot make a library, or "": where libstdc++ is not there to be linked statically, say."""
    with TemporaryDirectory() as folder:
        source = Path(folder, "empty.cpp")
        source.write_text("#include <atomic>\n")
        return compiler.make(str(source), Path(folder, "empty.so")).error


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=HOW,
        description="Compile the native kernels in place; takes a minute or so for each instruction set. $CXX names "
        "the compiler, else g++, clang++ or c++.",
    )
    parser.add_argument("isa", nargs="*", help=f"of {', '.join(instruction_sets())}; all if none is named")
    isas = parser.parse_args().isa
    if unknown := sorted(set(isas) - set(instruction_sets())):
        parser.error(f"no instruction set {', '.join(unknown)} on this kind of machine")
    print(f"compiling {', '.join(isas or instruction_sets())} ...", flush=True)
    built = build(Path(__file__).parent, isas or instruction_sets())
    print("\n".join(f"{isa}: {result}" for isa, result in built.items()))
    return int(not all(result.startswith("built") for result in built.values()))


if __name__ == "__main__":
    sys.exit(main())
