"""The native library that this process uses: found, checked, chosen once, at import; and what `status` says of it.

A library is used where the CPU can run its instruction set and its own answers are right: the ABI number, the layout of
the structs, a small normalization forward and backward. Each that is not used has its reason; with none, all goes
through plain PyTorch. ``NORMSCOPE_KERNELS`` chooses: ``auto`` (default), ``avx512``, ``avx2``, ``base``, or ``torch``.

Children of fork() run the kernels on one thread where the parent had several, since OpenMP's workers stay behind.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch  # first: the libraries run on the threads of the OpenMP library that it loads

from normscope.errors import BadInput, told
from normscope.kernels import build
from normscope.kernels.self_test import self_test
from normscope.kernels.structs import ABI, NsCall, layout

SWITCH = "NORMSCOPE_KERNELS"
REMEDY = f"to compile it here: {build.HOW}"


@dataclass(frozen=True)
class Library:
    isa: str
    path: Path
    functions: ctypes.CDLL

    def run(self, call: NsCall) -> int:
        """``ns_run``: an NsResult."""
        return int(self.functions.ns_run(ctypes.byref(call)))

    def text(self, function: str) -> str:
        """What a function without arguments that returns text says."""
        return bytes(getattr(self.functions, function)()).decode(errors="replace")


class Unusable(Exception):
    """Says why a library is not used."""


def cpu_features(told_in: str = "/proc/cpuinfo") -> frozenset[str]:
    """Of the first CPU, as Linux names them; it leaves out those whose registers the system does not save."""
    try:
        with open(told_in, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, words = line.partition(":")
                if name.strip() == "flags":
                    return frozenset(words.split())
    except OSError:
        pass
    return frozenset()


def wanted() -> str:
    """The switch.

    Raises BadInput where it is none of its words.
    """
    value = os.environ.get(SWITCH, "").strip().lower() or "auto"
    words = ("auto", *build.NEEDS, "torch")
    if value not in words:
        raise BadInput(
            f"{SWITCH} must be one of {', '.join(words)}; got {value!r}. Unset it to let Normscope choose."
        )
    return value


def choose(folder: Path, wish: str, features: Collection[str]) -> tuple[Library | None, dict[str, str]]:
    """The fastest library in ``folder`` that runs here, and for each instruction set not used, why not."""
    chosen, reasons = None, {}
    for isa in build.instruction_sets():
        if wish == "torch" or wish not in ("auto", isa):
            reasons[isa] = f"{SWITCH}={wish}"
        elif missing := [feature for feature in build.NEEDS[isa] if feature not in features]:
            reasons[isa] = f"this CPU has no {', '.join(missing)}"
        elif not (folder / build.file_name(isa)).exists():
            said = build.outcome(folder, isa)
            known = said if said.startswith("not built") else "the file is not there"
            reasons[isa] = f"{known} ({REMEDY})"
        elif chosen:
            reasons[isa] = f"{chosen.isa} is faster"
        else:
            try:
                chosen = load(isa, folder / build.file_name(isa))
            except Unusable as why:
                reasons[isa] = str(why)
    if wish not in ("auto", "torch", *build.instruction_sets()):
        reasons[wish] = "not of this kind of machine"
    return chosen, reasons


def load(isa: str, path: Path) -> Library:
    """Raises Unusable where it is not what this version of Normscope needs, or computes wrongly."""
    try:
        if not build.intact(path):
            raise Unusable(f"the file is damaged: its checksum is not that of its build ({REMEDY})")
        functions = ctypes.CDLL(str(path))
        if (abi := functions.ns_abi()) != ABI:
            raise Unusable(f"has interface {abi} where {ABI} is needed ({REMEDY})")
        functions.ns_run.argtypes = [ctypes.POINTER(NsCall)]
        functions.ns_struct_layout.argtypes = [ctypes.POINTER(ctypes.c_int64)]
        for name in ("ns_isa", "ns_compiler", "ns_pool"):
            getattr(functions, name).restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise Unusable(f"cannot be loaded: {told(error)} ({REMEDY})") from error

    library = Library(isa, path, functions)
    library.text("ns_pool")  # found now, so that children of a later fork() are told that it stays behind
    if library.text("ns_isa") != isa:
        raise Unusable(f"was compiled for {library.text('ns_isa')} ({REMEDY})")
    expected = layout()
    numbers = (ctypes.c_int64 * 128)()
    if expected != numbers[: functions.ns_struct_layout(numbers)]:
        raise Unusable(f"lays its structs out otherwise than ctypes does ({REMEDY})")
    if wrong := self_test(library.run):
        raise Unusable(f"computes wrongly: {wrong} ({REMEDY})")
    return library


LIBRARY, REASONS = choose(Path(__file__).parent, wanted(), cpu_features())
if LIBRARY is None and wanted() not in ("auto", "torch"):
    warnings.warn(
        f"{SWITCH}={wanted()} cannot be had, plain PyTorch runs: {REASONS.get(wanted(), 'not of this machine')}",
        RuntimeWarning,
        stacklevel=2,
    )

registered = "none"
"""how the operators reach the library: "dispatcher shim", "ctypes" or "none"; operators write it"""


def run(call: NsCall) -> int:
    """Runs one call and returns its NsResult.

    Raises RuntimeError where there is no library.
    """
    if LIBRARY is None:
        raise RuntimeError("there are no native kernels here: print(normscope.kernels.status()) says why")
    return LIBRARY.run(call)


# In the words of dispatch.py, which decides.
ELSEWHERE = {
    "plain PyTorch": (
        "torch.func, forward mode, second derivatives; masks of each channel, whitening, renormalization and other "
        "specifications that normscope.kernels.layout.call() calls unserved; integer and complex numbers"
    ),
    "PyTorch's own kernels": "other devices than the CPU; export by torch.jit and to ONNX",
}


@dataclass(frozen=True)
class Status:
    """Which native kernels run in this process and why; ``str`` is made to be read."""

    isa: str
    """the instruction set that runs, "" for none"""
    path: Path | None
    compiler: str
    registered: str
    """how operators reach the library: "dispatcher shim", "ctypes" or "none\""""
    threads: int
    """of PyTorch, which the kernels use too"""
    pool: str
    """the OpenMP library whose threads they are, "" where there is none: then one thread"""
    not_used: dict[str, str] = field(default_factory=dict)
    """instruction set -> why"""
    elsewhere: dict[str, str] = field(default_factory=dict)
    """path -> what takes it although there are native kernels"""

    def __str__(self) -> str:
        if self.isa:
            pool = f"{self.threads}, of {self.pool}" if self.pool else "1, no OpenMP library was found"
            lines = [
                f"native kernels: {self.isa}, compiled by {self.compiler}",
                f"  file: {self.path}",
                f"  operators: {self.registered}",
                f"  threads: {pool}",
            ]
        else:
            lines = ["native kernels: none, everything runs in plain PyTorch"]
        for why in dict.fromkeys(self.not_used.values()):
            isas = ", ".join(isa for isa, reason in self.not_used.items() if reason == why)
            lines.append(f"  {isas}: not used, {why}")
        if self.isa:
            lines += [f"  {path}: {what}" for path, what in self.elsewhere.items()]
        return "\n".join(lines)


def status() -> Status:
    return Status(
        isa=LIBRARY.isa if LIBRARY else "",
        path=LIBRARY.path if LIBRARY else None,
        compiler=LIBRARY.text("ns_compiler") if LIBRARY else "",
        registered=registered,
        threads=torch.get_num_threads(),
        pool=LIBRARY.text("ns_pool") if LIBRARY else "",
        not_used=dict(REASONS),
        elsewhere=dict(ELSEWHERE),
    )
