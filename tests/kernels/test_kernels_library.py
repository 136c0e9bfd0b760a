"""Which library is chosen, and that each that is not says why and leaves a package that works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int64
from pathlib import Path

import pytest
import torch

import normscope.kernels
from normscope.errors import BadInput
from normscope.kernels import build, library
from normscope.kernels.self_test import self_test
from normscope.kernels.structs import DONE, NO_MEMORY, NsCall, NsRecipe, layout

HOME = Path(library.__file__).parent
EVERYTHING = {feature for features in build.NEEDS.values() for feature in features}
REMEDY = "(to compile it here: python -m normscope.kernels.build)"

needs_library = pytest.mark.skipif(library.LIBRARY is None, reason="no native kernels here")


def runnable() -> list[str]:
    """The instruction sets that were compiled and that this CPU has."""
    features = library.cpu_features()
    return [
        isa
        for isa in build.instruction_sets()
        if (HOME / build.file_name(isa)).exists() and features.issuperset(build.NEEDS[isa])
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of what was built."""
    for file in [*HOME.glob(build.file_name("*")), HOME / build.RECORD]:
        shutil.copy(file, tmp_path)
    return tmp_path


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Path]:
    """Compiles a library of a few lines."""
    try:
        compiler = build.find_compiler()
    except build.NoCompiler as why:
        pytest.skip(str(why))

    def make(*sources: str) -> Path:
        """From files of ``native/``, or source text."""
        lines = [f'#include "{source}"' if source.endswith(".cpp") else source for source in sources]
        (tmp_path / "small.cpp").write_text("\n".join(['#include "normscope.h"', *lines, ""]))
        flags = [f"-I{build.SOURCES}"]
        _, error = compiler.make(str(tmp_path / "small.cpp"), tmp_path / build.file_name("base"), flags)
        assert not error
        build.seal(tmp_path / build.file_name("base"))
        return tmp_path

    return make


def test_where_there_is_a_compiler_there_are_kernels() -> None:
    if library.wanted() == "torch":
        pytest.skip("they are switched off")
    try:
        build.find_compiler()
    except build.NoCompiler as why:
        pytest.skip(str(why))
    assert library.LIBRARY is not None, str(normscope.kernels.status())


# ---- choosing


@needs_library
def test_each_instruction_set_removed_in_turn_chooses_the_next(folder: Path) -> None:
    isas = runnable()
    there = f"the file is not there {REMEDY}"

    def choose() -> tuple[library.Library | None, dict[str, str]]:
        chosen, reasons = library.choose(folder, "auto", library.cpu_features())
        return chosen, {isa: reasons[isa] for isa in isas if isa in reasons}

    for i, isa in enumerate(isas):
        chosen, reasons = choose()
        assert chosen is not None
        assert (chosen.isa, chosen.path) == (isa, folder / build.file_name(isa))
        assert reasons == {
            **dict.fromkeys(isas[:i], there),
            **dict.fromkeys(isas[i + 1 :], f"{isa} is faster"),
        }
        chosen.path.unlink()
    assert choose() == (None, dict.fromkeys(isas, there))


@needs_library
def test_each_can_be_asked_for(folder: Path) -> None:
    for isa in runnable():
        chosen, reasons = library.choose(folder, isa, library.cpu_features())
        assert chosen is not None
        assert chosen.isa == isa == chosen.text("ns_isa")
        others = [other for other in build.instruction_sets() if other != isa]
        assert reasons == dict.fromkeys(others, f"NORMSCOPE_KERNELS={isa}")


def test_none_can_be_asked_for(tmp_path: Path) -> None:
    chosen, reasons = library.choose(tmp_path, "torch", EVERYTHING)
    assert chosen is None
    assert reasons == dict.fromkeys(build.instruction_sets(), "NORMSCOPE_KERNELS=torch")


@pytest.mark.parametrize("feature", build.AVX512)
def test_a_cpu_that_lacks_one_feature_is_not_given_what_needs_it(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    _, reasons = library.choose(tmp_path, "auto", EVERYTHING - {feature})
    lacking = f"this CPU has no {feature}"
    there = f"the file is not there {REMEDY}"
    assert reasons == {
        "avx512": lacking,
        "avx2": lacking if feature in build.AVX2 else there,
        "base": there,
    }


def test_what_another_kind_of_machine_has_is_not_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    chosen, reasons = library.choose(tmp_path, "avx2", set())
    assert chosen is None
    assert reasons == {"base": "NORMSCOPE_KERNELS=avx2", "avx2": "not of this kind of machine"}


def test_what_the_build_said_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / build.RECORD).write_text("base: not built: no C++ compiler (g++ is not there)\n")
    _, reasons = library.choose(tmp_path, "auto", set())
    assert reasons["base"] == f"not built: no C++ compiler (g++ is not there) {REMEDY}"


# ---- libraries that cannot be used


def damaged(folder: Path, damage: Callable[[bytes], bytes]) -> str:
    """What is said of a library of ``folder`` whose content was damaged."""
    isa = next((isa for isa in build.instruction_sets() if (folder / build.file_name(isa)).exists()), None)
    if isa is None:
        pytest.skip("nothing is built")
    file = folder / build.file_name(isa)
    content = damage(file.read_bytes())
    file.unlink()  # the folder may hold links to the libraries in use
    file.write_bytes(content)
    _, reasons = library.choose(folder, isa, set(build.NEEDS[isa]))
    return reasons[isa]


DAMAGED = f"the file is damaged: its checksum is not that of its build {REMEDY}"


@pytest.mark.parametrize("kept", [0, 0.1, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_never_loaded(folder: Path, kept: float) -> None:
    assert damaged(folder, lambda content: content[: int(kept * len(content))]) == DAMAGED
    assert damaged(folder, lambda content: content[:-1]) == DAMAGED


def test_a_file_with_one_bit_changed_is_never_loaded(folder: Path) -> None:
    third = slice(100_000, 100_001)

    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[third] = bytes([changed[third][0] ^ 1])
        return bytes(changed)

    assert damaged(folder, flip) == DAMAGED


def test_a_corrupt_file(tmp_path: Path) -> None:
    file = tmp_path / build.file_name("base")
    file.write_bytes(b"not a library" * 100)
    build.seal(file)
    _, reasons = library.choose(tmp_path, "base", set())
    assert reasons["base"].startswith("cannot be loaded: OSError: ")
    assert reasons["base"].endswith(REMEDY)


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    (tmp_path / build.file_name("base")).mkdir()
    _, reasons = library.choose(tmp_path, "base", set())
    assert reasons["base"].startswith("cannot be loaded: IsADirectoryError: ")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(folder: Path) -> None:
    (folder / build.file_name("base")).chmod(0)
    _, reasons = library.choose(folder, "base", set())
    assert "Permission denied" in reasons["base"]


def test_a_library_of_something_else(small: Callable[..., Path]) -> None:
    _, reasons = library.choose(small("int something;"), "base", set())
    assert reasons["base"].startswith("cannot be loaded: AttributeError: ")
    assert "undefined symbol: ns_abi" in reasons["base"]


def test_a_library_of_another_version(small: Callable[..., Path]) -> None:
    folder = small("int ns_abi() { return NS_ABI + 1; }")
    _, reasons = library.choose(folder, "base", set())
    assert reasons["base"] == f"has interface 3 where 2 is needed {REMEDY}"


def test_a_library_of_another_instruction_set(small: Callable[..., Path]) -> None:
    folder = small(
        "about.cpp", 'const char *ns_isa() { return "avx9"; } int ns_run(const NsCall *) { return 0; }'
    )
    _, reasons = library.choose(folder, "base", set())
    assert reasons["base"] == f"was compiled for avx9 {REMEDY}"


BASE = 'const char *ns_isa() { return "base"; }'


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("int ns_run(const NsCall *) { return NS_UNSERVED; }", "the forward call returned 1"),
        (
            "int ns_run(const NsCall *c) { return c->what ? NS_NO_MEMORY : NS_DONE; }",
            "the backward call returned 2",
        ),
        (
            "int ns_run(const NsCall *) { return NS_DONE; }",
            "111 values of y of a layer norm are off, the first by nan",
        ),
    ],
)
def test_a_library_that_computes_wrongly(source: str, why: str, small: Callable[..., Path]) -> None:
    _, reasons = library.choose(small("about.cpp", BASE, source), "base", set())
    assert reasons["base"] == f"computes wrongly: {why} {REMEDY}"


@needs_library
@pytest.mark.parametrize("field", ["y", "dx", "dweight", "dbias"])
def test_the_self_test_sees_one_wrong_value(field: str) -> None:
    """A value that each call leaves off by 1e-3, which no rounding explains."""

    def nearly_right(call: NsCall) -> int:
        result = library.run(call)
        if address := getattr(call, field):
            c_float.from_address(address).value += 1e-3
        return result

    assert self_test(library.run) == ""
    assert re.fullmatch(
        rf"1 values of {field} of a layer norm are off, the first by 0.00[12]\d*", self_test(nearly_right)
    )


@needs_library
def test_structs_lie_as_in_the_library() -> None:
    assert library.LIBRARY is not None
    functions = library.LIBRARY.functions
    functions.ns_struct_layout.argtypes = [POINTER(c_int64)]
    numbers = (c_int64 * 128)()
    assert numbers[: functions.ns_struct_layout(numbers)] == layout()
    assert len(layout()) == 2 + len(NsRecipe._fields_) + len(NsCall._fields_)


def test_structs_name_the_fields_of_the_header_in_its_order() -> None:
    """The numbers above say nothing of two fields that changed places."""
    header = (build.SOURCES / "normscope.h").read_text()
    for struct in (NsRecipe, NsCall):
        found = re.search(rf"struct {struct.__name__} {{(.*?)}};", header, re.DOTALL)
        assert found
        body = re.sub(r"//.*", "", found[1])
        names = re.findall(r"(\w+)\s*[,;]", body)
        assert names == [field[0] for field in struct._fields_]


# ---- what a library does to the process


@needs_library
def test_denormal_numbers_stay() -> None:
    """Linking with -ffast-math would flush them to zero in the whole process."""
    assert (torch.tensor([1e-40]) * 1).item() != 0
    assert 5e-324 * 1.0 != 0


@needs_library
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_a_library_shows_its_interface_and_nothing_else() -> None:
    for isa in runnable():
        command = ["nm", "-D", "--defined-only", str(HOME / build.file_name(isa))]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        names = {line.split()[-1] for line in lines} - {"_init", "_fini"}
        assert {"ns_run", "ns_abi", "ns_register"} <= names
        assert all(name.startswith("ns_") for name in names), names


# ---- the switch and the CPU


@pytest.mark.parametrize(
    ("value", "meaning"),
    [("", "auto"), (" AVX2 ", "avx2"), ("torch", "torch"), ("base", "base"), ("auto", "auto")],
)
def test_the_switch(value: str, meaning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMSCOPE_KERNELS", value)
    assert library.wanted() == meaning


def test_a_misspelt_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMSCOPE_KERNELS", "avx521")
    with pytest.raises(BadInput) as error:
        library.wanted()
    assert str(error.value) == (
        "NORMSCOPE_KERNELS must be one of auto, avx512, avx2, base, torch; got 'avx521'. "
        "Unset it to let Normscope choose."
    )


def test_features_of_the_cpu_are_those_of_its_first_processor(tmp_path: Path) -> None:
    text = (
        "processor\t: 0\nvmx flags\t: vnmi\nflags\t\t: fpu avx2 fma\nbugs\t\t: none\n\nflags\t: fpu avx512f\n"
    )
    (tmp_path / "cpuinfo").write_text(text)
    assert library.cpu_features(str(tmp_path / "cpuinfo")) == {"fpu", "avx2", "fma"}


def test_a_cpu_that_says_nothing_has_nothing(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nFeatures : fp asimd\n")
    assert library.cpu_features(str(tmp_path / "cpuinfo")) == set()
    assert library.cpu_features(str(tmp_path / "missing")) == set()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="asks Linux")
def test_features_agree_with_those_that_pytorch_found() -> None:
    if "ATEN_CPU_CAPABILITY" in os.environ:
        pytest.skip("PyTorch was told what to find")
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        assert {"avx512f", "avx512vl", "avx512bw", "avx512dq", "fma"} <= library.cpu_features()
    elif capability == "AVX2":
        assert {"avx2", "fma"} <= library.cpu_features()


# ---- status


@needs_library
def test_status_of_a_library() -> None:
    status = normscope.kernels.status()
    chosen = library.LIBRARY
    assert chosen is not None
    assert (status.isa, status.path, status.threads) == (chosen.isa, chosen.path, torch.get_num_threads())
    assert re.match(r"(gcc|clang) \d+\.", status.compiler)
    assert status.registered in ("dispatcher shim", "ctypes")
    lines = str(status).splitlines()
    assert lines[:3] == [
        f"native kernels: {status.isa}, compiled by {status.compiler}",
        f"  file: {status.path}",
        f"  operators: {status.registered}",
    ]
    if status.pool:
        assert lines[3] == f"  threads: {status.threads}, of {status.pool}"
        assert Path(status.pool).exists()
    assert all(f"  {path}: {what}" in lines for path, what in status.elsewhere.items())
    assert status.elsewhere


def test_status_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    why = f"the file is not there {REMEDY}"
    monkeypatch.setattr(library, "LIBRARY", None)
    monkeypatch.setattr(library, "REASONS", {"avx512": "this CPU has no avx512f", "avx2": why, "base": why})
    assert str(library.status()) == (
        "native kernels: none, everything runs in plain PyTorch\n"
        "  avx512: not used, this CPU has no avx512f\n"
        f"  avx2, base: not used, {why}"
    )
    with pytest.raises(RuntimeError) as error:
        library.run(NsCall())
    assert str(error.value) == "there are no native kernels here: print(normscope.kernels.status()) says why"


def python(script: str, **environment: str) -> str:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_loads_nothing_before_it_is_used() -> None:
    script = (
        "import sys, normscope.kernels; print([m for m in ('torch', 'numpy', 'ctypes') if m in sys.modules])"
    )
    assert python(script) == "[]\n"


def test_switched_off_it_says_so() -> None:
    isas = ", ".join(build.instruction_sets())
    assert python(
        "import normscope.kernels; print(normscope.kernels.status())", NORMSCOPE_KERNELS="torch"
    ) == (
        "native kernels: none, everything runs in plain PyTorch\n"
        f"  {isas}: not used, NORMSCOPE_KERNELS=torch\n"
    )


def test_results_have_the_numbers_of_the_header() -> None:
    header = (build.SOURCES / "normscope.h").read_text()
    assert f"NS_DONE = {DONE}," in header
    assert f"NS_NO_MEMORY = {NO_MEMORY}" in header
