"""The step that pyproject.toml cannot say: the native kernels, compiled where there is a compiler."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

KERNELS = Path("normscope", "kernels")

# By its path: the package's dependencies are not there yet.
_spec = importlib.util.spec_from_file_location("native_build", Path("src", KERNELS, "build.py"))
assert _spec is not None
assert _spec.loader is not None
native = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)


class build_native(Command):
    """Into the build directory, or beside the sources for an editable install."""

    description = "compile the native kernels, where there is a compiler"
    user_options: list[Any] = []  # noqa: RUF012  (setuptools reads it from the class)
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    @property
    def folder(self) -> Path:
        return Path("src" if self.editable_mode else str(self.build_lib), KERNELS)

    def run(self) -> None:
        try:
            results = native.build(self.folder)
        except Exception as error:  # the install goes on: everything works without, only slower
            results = {"native kernels": f"not built: {type(error).__name__}: {error}"}
        for isa, result in results.items():
            if not result.startswith("built"):
                self.warn(f"normscope: {isa}: {result}")

    def get_source_files(self) -> list[str]:
        return sorted(str(path) for path in Path("src", KERNELS, "native").iterdir())

    def libraries(self) -> list[Path]:
        return sorted(self.folder.glob(native.file_name("*")))

    def get_outputs(self) -> list[str]:
        return [str(Path(str(self.build_lib), KERNELS, path.name)) for path in self.libraries()]

    def get_output_mapping(self) -> dict[str, str]:
        return (
            dict(zip(self.get_outputs(), map(str, self.libraries()), strict=True))
            if self.editable_mode
            else {}
        )


class wheel(bdist_wheel):
    """For this platform and any Python 3 where there are native kernels; for any platform where there are none."""

    def get_tag(self) -> tuple[str, str, str]:
        if not self.get_finalized_command("build_native").libraries():
            return super().get_tag()
        self.root_is_pure = False
        return ("py3", "none", super().get_tag()[2])


build.sub_commands = [*build.sub_commands, ("build_native", None)]
setup(cmdclass={"build_native": build_native, "bdist_wheel": wheel})
