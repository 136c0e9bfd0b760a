"""The build: with any compiler, a partial one, a broken one or none, it ends and says what became of what."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from normscope.kernels import build

ROOT = Path(__file__).parents[2]
ISAS = list(build.instruction_sets())

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))) or sys.platform == "win32",
    reason="needs a C++ compiler",
)


@pytest.fixture(autouse=True)
def _unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have limited the build of an installation."""
    monkeypatch.delenv(build.SWITCH, raising=False)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder that PATH names; empty."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile in no time in place of the kernels."""
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "kernels.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int ns_abi() { return 1; }'
    )
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def wrap(path: Path, name: str, script: str) -> None:
    """A compiler of that name: a shell script that knows the real one as $REAL."""
    real = next(found for n in ("g++", "clang++", "c++") if (found := shutil.which(n, path=os.defpath)))
    (path / name).write_text(f"#!/bin/sh\nPATH={os.defpath}\nREAL={real}\n{script}\n")
    (path / name).chmod(stat.S_IRWXU)


def made_by(result: str, compiler: str) -> bool:
    built, *steps = result.split("\n    ")
    return re.fullmatch("built from [0-9a-f]{16}", built) is not None and all(
        step.startswith(f"{compiler} -") for step in steps
    )


def test_without_a_compiler_it_says_so_and_leaves_no_old_library(path: Path, tmp_path: Path) -> None:
    old = tmp_path / build.file_name("base")
    old.write_bytes(b"of other sources")
    why = "not built: no C++ compiler (g++ is not there; clang++ is not there; c++ is not there)"
    assert build.build(tmp_path) == dict.fromkeys(ISAS, why)
    assert not old.exists()
    assert (tmp_path / build.RECORD).read_text() == "".join(f"{isa}: {why}\n" for isa in ISAS)
    assert [build.outcome(tmp_path, isa) for isa in ISAS] == [why] * len(ISAS)


def test_a_missing_cxx_is_named(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "icpx -O9")
    (why,) = set(build.build(tmp_path).values())
    assert why.startswith("not built: no C++ compiler (icpx -O9 is not there; g++ is not there;")


def test_without_sources_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert set(build.build(tmp_path).values()) == {f"not built: there is no {tmp_path / 'kernels.cpp'}"}


def test_on_windows_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    why = "the kernels use vector types of GCC and Clang, and on Windows neither is looked for"
    assert set(build.build(tmp_path).values()) == {f"not built: {why}"}


@pytest.mark.parametrize(
    ("machine", "isas"),
    [
        ("x86_64", ["avx512", "avx2", "base"]),
        ("AMD64", ["avx512", "avx2", "base"]),
        ("aarch64", ["base"]),
        ("arm64", ["base"]),
    ],
)
def test_instruction_sets_of_a_machine(
    machine: str, isas: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    assert list(build.instruction_sets()) == isas


def test_every_flag_that_a_cpu_must_have_is_asked_for_and_no_other() -> None:
    for isa, flags in build.X86.items():
        assert {flag for flag in flags if "=" not in flag} == {f"-m{feature}" for feature in build.NEEDS[isa]}


@needs_compiler
@pytest.mark.skipif(sys.platform == "win32", reason="compilers are shell scripts here")
class TestCompilers:
    def test_a_broken_one_is_passed_over(self, path: Path, small: Path, tmp_path: Path) -> None:
        wrap(path, "g++", "echo 'a note' >&2; echo 'error: out of order' >&2; exit 3")
        wrap(path, "clang++", 'exec "$REAL" "$@"')
        assert all(made_by(result, "clang++") for result in build.build(tmp_path).values())
        (path / "clang++").unlink()
        why = "g++ compiles nothing: exit code 3: error: out of order; clang++ is not there; c++ is not there"
        assert set(build.build(tmp_path).values()) == {f"not built: no C++ compiler ({why})"}

    def test_cxx_comes_first_with_its_arguments(
        self, path: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wrap(path, "g++", "exit 1")
        wrap(path, "mine", '[ "$1" = --first ] && shift && exec "$REAL" "$@"')
        monkeypatch.setenv("CXX", "mine --first")
        assert all(made_by(result, "mine --first") for result in build.build(tmp_path).values())

    def test_one_that_has_no_static_libstdcxx_links_without(
        self, path: Path, small: Path, tmp_path: Path
    ) -> None:
        wrap(path, "g++", 'case "$*" in *-static-libstdc++*) exit 1;; esac; exec "$REAL" "$@"')
        for result in build.build(tmp_path).values():
            assert made_by(result, "g++")
            assert "-static" not in result

    @pytest.mark.skipif(len(ISAS) == 1, reason="a machine of one instruction set")
    def test_one_that_knows_no_avx512_makes_the_others(self, path: Path, small: Path, tmp_path: Path) -> None:
        wrap(
            path,
            "g++",
            'case "$*" in *-mavx512f*) echo "error: unknown -mavx512f" >&2; exit 1;; esac; exec "$REAL" "$@"',
        )
        build.build(tmp_path)
        outcomes = {isa: build.outcome(tmp_path, isa).partition(" from ")[0] for isa in ISAS}
        assert outcomes == {
            "avx512": "not built: exit code 1: error: unknown -mavx512f",
            "avx2": "built",
            "base": "built",
        }
        assert sorted(file.name for file in tmp_path.glob("_native*.so.1*")) == [
            "_native_avx2.so.1",
            "_native_base.so.1",
        ]

    def test_building_one_keeps_what_is_said_of_the_others(
        self, path: Path, small: Path, tmp_path: Path
    ) -> None:
        before = build.build(tmp_path)
        wrap(path, "g++", 'exec "$REAL" "$@"')
        assert list(build.build(tmp_path, ["base"])) == ["base"]
        after = {isa: build.outcome(tmp_path, isa) for isa in ISAS}
        assert after.pop("base").startswith("built from ")
        assert after == {isa: before[isa] for isa in ISAS if isa != "base"}

    def test_only_what_changed_is_compiled_again(
        self, path: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = tmp_path / "log"
        wrap(
            path,
            "g++",
            f'case "$*" in *empty*|*--version*) ;; *) echo "$*" >> {log};; esac; exec "$REAL" "$@"',
        )

        def compiled() -> int:
            log.write_text("")
            results = build.build(tmp_path)
            assert all(made_by(result, "g++") for result in results.values())
            return log.read_text().count(" -c ")

        assert compiled() == len(ISAS)
        assert compiled() == 0
        (tmp_path / build.file_name("base")).unlink()
        assert compiled() == 1
        (small / "a.hpp").write_text("// a header")
        assert compiled() == len(ISAS)
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DMORE"))
        assert compiled() == len(ISAS)
        assert compiled() == 0

    def test_a_library_in_use_stays_as_it_is(self, path: Path, small: Path, tmp_path: Path) -> None:
        wrap(path, "g++", 'exec "$REAL" "$@"')
        build.build(tmp_path, ["base"])
        with open(tmp_path / build.file_name("base"), "rb") as in_use:
            before = in_use.read()
            (small / "kernels.cpp").write_text('extern "C" int ns_abi() { return 2; }')
            build.build(tmp_path, ["base"])
            in_use.seek(0)
            assert in_use.read() == before
        assert (tmp_path / build.file_name("base")).read_bytes() != before


def test_an_unreadable_record_is_no_record(tmp_path: Path) -> None:
    assert build.outcome(tmp_path, "base") == ""
    (tmp_path / build.RECORD).write_bytes(b"base: \xff\xfe")
    assert build.outcome(tmp_path, "base") == ""
    (tmp_path / build.RECORD).write_text(
        "what: is this\nbase: built from here\n    one\n    two\navx2: not built\n"
    )
    assert build.outcome(tmp_path, "base") == "built from here"
    assert build.outcome(tmp_path, "avx2") == "not built"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What an install reads, away from the working copy, where it would leave a build folder."""
    copy = tmp_path / "tree"
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.so.1", "*.egg-info", build.RECORD)
    shutil.copytree(ROOT / "src", copy / "src", ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def pip(*arguments: object, **environment: str) -> None:
    pytest.importorskip("setuptools", minversion="77")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_pip_install_without_a_compiler(tree: Path, path: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip("install", "--no-deps", "--no-build-isolation", "--target", target, tree)
    kernels = target / "normscope" / "kernels"
    assert "no C++ compiler" in build.outcome(kernels, "base")
    assert not list(kernels.glob(build.file_name("*")))
    script = (
        "import normscope.kernels as k; assert k.__file__.startswith({!r}), k.__file__; print(k.status())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script.format(str(target))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(target), "NORMSCOPE_KERNELS": "auto"},
    )
    assert done.stdout.startswith("native kernels: none, everything runs in plain PyTorch\n"), done.stderr
    assert "no C++ compiler (g++ is not there;" in done.stdout


@pytest.mark.slow
@needs_compiler
def test_a_wheel_is_for_this_platform_only_where_it_holds_libraries(tree: Path, tmp_path: Path) -> None:
    native = tree / "src" / "normscope" / "kernels" / "native"
    for source in native.glob("*.cpp"):
        source.unlink()
    (native / "kernels.cpp").write_text("int small;")
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path]

    pip(*wheel, tree)
    (made,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in made.name
    assert not made.name.endswith("-any.whl")
    names = zipfile.ZipFile(made).namelist()
    for name in (*map(build.file_name, ISAS), build.RECORD, "native/normscope.h", "native/kernels.cpp"):
        assert f"normscope/kernels/{name}" in names

    made.unlink()
    (native / "kernels.cpp").write_text("#error broken")
    pip(*wheel, tree)  # in the same build folder: what the first build left must not be taken along
    (made,) = tmp_path.glob("*.whl")
    assert made.name.endswith("-py3-none-any.whl")
    assert not any(".so" in name for name in zipfile.ZipFile(made).namelist())


@pytest.mark.slow
def test_an_editable_install_puts_them_beside_the_sources(tree: Path, path: Path, tmp_path: Path) -> None:
    pip("install", "--no-deps", "--no-build-isolation", "--target", tmp_path / "installed", "-e", tree)
    assert "no C++ compiler" in build.outcome(tree / "src" / "normscope" / "kernels", "base")


def test_only_what_is_asked_for_is_compiled(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(build.SWITCH, "none")
    assert set(build.build(tmp_path).values()) == {"not built: NORMSCOPE_BUILD=none"}
    monkeypatch.setenv(build.SWITCH, "base")
    results = build.build(tmp_path)
    assert results.pop("base").startswith("built from ")
    assert set(results.values()) <= {"not built: NORMSCOPE_BUILD=base"}
    assert [path.name for path in tmp_path.glob("*.so.1")] == [build.file_name("base")]
