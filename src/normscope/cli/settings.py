"""``[tool.normscope]`` in the nearest pyproject.toml; what is said on the command line wins."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.errors import BadInput

if TYPE_CHECKING:
    from normscope.doctor.suppress import Ignore


@dataclass(frozen=True)
class Settings:
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str = "warning"
    seed: int = 0
    dataset_size: int | None = None
    frozen_policy: str = ""
    baseline: str = ""
    """path of a file, absolute: in pyproject.toml it is written relative to that"""
    ignore_site: tuple[Ignore, ...] = ()


TYPES = {
    "select": list,
    "ignore": list,
    "fail_on": str,
    "seed": int,
    "dataset_size": int,
    "frozen_policy": str,
    "baseline": str,
    "ignore_site": list,
}
POLICIES = ("statistics", "affine", "both")


def load(start: Path | None = None) -> Settings:
    """Settings of the nearest ``pyproject.toml`` at or above ``start`` (the working directory).

    Raises:
        BadInput: for a file that is no TOML, a name that is no setting, or a value that cannot be one.
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
    table = _table(file, _table(file, document, "tool"), "normscope", "tool.")
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in TYPES:
            known = ", ".join(f.name.replace("_", "-") for f in fields(Settings))
            raise BadInput(f"{file}: [tool.normscope] has no setting {key!r}; known: {known}")
        if not isinstance(value, TYPES[name]) or isinstance(value, bool):
            raise BadInput(f"{file}: [tool.normscope] {key} must be a {TYPES[name].__name__}, got {value!r}")
        values[name] = _value(file, key, value)
    return Settings(**values)


def _table(file: Path, document: Mapping[str, Any], name: str, above: str = "") -> Mapping[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, Mapping):
        raise BadInput(f"{file}: [{above}{name}] must be a table, got {table!r}")
    return table


def _value(file: Path, key: str, value: Any) -> Any:
    """The value as the check takes it, refused here where the file can be named."""
    from normscope.doctor.report import SEVERITIES

    where = f"{file}: [tool.normscope] {key}"
    name = key.replace("-", "_")
    if name == "fail_on" and value not in SEVERITIES:
        raise BadInput(f"{where} is one of {', '.join(SEVERITIES)}; got {value!r}")
    if name == "frozen_policy" and value not in ("", *POLICIES):
        raise BadInput(f"{where} is one of {', '.join(POLICIES)}; got {value!r}")
    if name == "dataset_size" and value < 1:
        raise BadInput(f"{where} is a number of samples, at least 1; got {value}")
    if name == "baseline":
        return str(file.parent / value) if value else ""
    if name == "ignore_site":
        return tuple(_ignore(file, entry) for entry in value)
    if not isinstance(value, list):
        return value
    if not all(isinstance(item, str) for item in value):
        raise BadInput(f"{where} must be a list of strings, got {value!r}")
    return _codes(where, value)


def _codes(where: str, value: list[str]) -> tuple[str, ...]:
    from normscope.doctor.rules import all_rules

    codes = tuple(item.strip().upper() for item in value)
    for code in codes:
        if not code or not any(known.startswith(code) for known in all_rules()):
            raise BadInput(
                f"{where} names {code!r}, which begins no rule's code; known: {', '.join(all_rules())}"
            )
    return codes


def _ignore(file: Path, entry: Any) -> Ignore:
    from normscope.doctor.suppress import Ignore

    where = f"{file}: [[tool.normscope.ignore-site]]"
    form = 'site = "layer1.*", codes = ["NS501"], reason = "..."'
    if not isinstance(entry, Mapping) or set(entry) != {"site", "codes", "reason"}:
        raise BadInput(f"{where} takes {form}; got {entry!r}")
    site, codes, reason = entry["site"], entry["codes"], entry["reason"]
    if not isinstance(site, str) or not isinstance(reason, str) or not reason.strip():
        raise BadInput(f"{where} takes {form}, with words for a reason; got {entry!r}")
    if not isinstance(codes, list) or not codes or not all(isinstance(code, str) for code in codes):
        raise BadInput(f"{where} codes is a list of rule codes or their beginnings; got {codes!r}")
    return Ignore(site, _codes(f"{where} codes", codes), reason.strip())
