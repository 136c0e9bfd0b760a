"""``[tool.normscope]`` in the nearest pyproject.toml; what is said on the command line wins."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from normscope.errors import BadInput


@dataclass(frozen=True)
class Settings:
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str = "warning"
    seed: int = 0
    dataset_size: int | None = None
    frozen_policy: str = ""


TYPES = {
    "select": list,
    "ignore": list,
    "fail_on": str,
    "seed": int,
    "dataset_size": int,
    "frozen_policy": str,
}


def load(start: Path | None = None) -> Settings:
    """Settings of the nearest ``pyproject.toml`` at or above ``start`` (the working directory).

    Raises:
        BadInput: for a file that is no TOML, a name that is no setting, or a value of the wrong type.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            return _parse(file)
    return Settings()


def _parse(file: Path) -> Settings:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} is not valid TOML: {error}") from error
    table = document.get("tool", {})
    table = table.get("normscope", {}) if isinstance(table, Mapping) else {}
    if not isinstance(table, Mapping):
        raise BadInput(f"{file}: [tool.normscope] must be a table, got {type(table).__name__}")
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in TYPES:
            known = ", ".join(f.name.replace("_", "-") for f in fields(Settings))
            raise BadInput(f"{file}: [tool.normscope] has no setting {key!r}; known: {known}")
        if not isinstance(value, TYPES[name]) or isinstance(value, bool):
            raise BadInput(f"{file}: [tool.normscope] {key} must be a {TYPES[name].__name__}, got {value!r}")
        if isinstance(value, list):
            if not all(isinstance(item, str) for item in value):
                raise BadInput(f"{file}: [tool.normscope] {key} must be a list of strings, got {value!r}")
            value = tuple(value)
        values[name] = value
    return Settings(**values)
