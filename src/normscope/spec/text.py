"""Specifications as text: one line for people, which reads back, and JSON.

The line is a list of clauses, the axes first. Clauses at their default are left out, save those that a reader
looks for: centering, variance, eps, weight and bias.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from normscope.spec.parts import Cast, Running, SpecError
from normscope.spec.validate import MOMENTS, WHITENINGS

if TYPE_CHECKING:
    from normscope.spec.normspec import NormSpec

VERSION = 1

_EPS_PHRASE = {
    "variance": "inside the root",
    "std": "outside the root",
    "max": "as the least root",
    "max_variance": "as the least under the root",
    "trace": "of the mean eigenvalue",
}
_WHICH = {0: "biased", 1: "unbiased"}


def _number(value: float) -> str:
    return repr(value)


def _correction(value: float) -> str:
    return _WHICH.get(value, f"correction {_number(value)}")  # type: ignore[call-overload, no-any-return]


def to_text(spec: NormSpec) -> str:
    """The clauses of a specification, joined by ``"; "``."""
    clauses = [
        ", ".join([spec.stats, *(f"{name}={size}" for name, size in spec.sizes.items())]),
        *_axes_clauses(spec),
        "centered" if spec.center else "not centered",
        _scale_clause(spec),
        _eps_clause(spec),
        _affine_clause("weight", spec.weight),
        _affine_clause("bias", spec.bias),
    ]
    if spec.weight_offset != 0:
        clauses.append(f"{_number(spec.weight_offset)} added to the weight")
    if spec.source == "input":
        clauses.append("weight and bias from an input")
    if spec.gain != 1:
        clauses.append(f"gain {_number(spec.gain)}")
    if spec.running is not None:
        clauses.append(_running_clause(spec.running))
    if spec.whiten_state != "covariance":
        clauses.append("stored whitening matrix")
    if spec.cast.compute is not None:
        clauses.append(
            f"computed in {'the dtype of the ' if spec.cast.compute == 'input' else ''}{spec.cast.compute}"
        )
    if spec.cast.weight == "after":
        clauses.append("weight applied after casting back")
    return "; ".join(clauses)


def _axes_clauses(spec: NormSpec) -> list[str]:
    clauses = []
    if spec.ndim is not None:
        low, high = spec.ndim
        clauses.append(f"rank {low}" + ("" if low == high else " or more" if high is None else f" to {high}"))
    if spec.sample_axis is not None:
        clauses.append(f"samples on {spec.sample_axis}" if spec.sample_axis else "no sample axis")
    if spec.remainder != "error":
        clauses.append(f"{spec.remainder} remainder")
    return clauses


def _scale_clause(spec: NormSpec) -> str:
    if spec.scale in WHITENINGS:
        steps = f", {spec.iterations} iterations" if spec.iterations != 5 else ""
        return f"{spec.scale} over {spec.whiten}, {_correction(spec.correction)}{steps}"
    steps = f", {spec.iterations} iterations" if spec.iterations != 5 else ""
    return f"{spec.scale}{f', {_correction(spec.correction)}' if spec.scale == 'std' else ''}{steps}"


def _eps_clause(spec: NormSpec) -> str:
    return f"eps {'of the dtype' if spec.eps is None else _number(spec.eps)} {_EPS_PHRASE[spec.eps_at]}"


def _affine_clause(what: str, where: str | None) -> str:
    if where is None:
        return f"no {what}"
    return f"{what} {where}" if where else f"scalar {what}"


def _running_clause(running: Running) -> str:
    follows = "cumulative" if running.momentum is None else f"momentum {_number(running.momentum)}"
    parts = [f"running {follows}", _correction(running.correction)]
    if running.over is not None:
        parts.append(f"over {running.over}" if running.over else "over nothing")
    if running.renorm is not None:
        parts.append("renorm " + " ".join(_number(limit) for limit in running.renorm))
    if running.averages != "variance":
        parts.append(f"averages the {running.averages}")
    return ", ".join(parts)


# Reading a line back ------------------------------------------------------------------------------------

_NUM = r"(-?(?:inf|[0-9.]+(?:e[+-]?[0-9]+)?))"
_CORR = rf"(biased|unbiased|correction {_NUM})"
_AXES = r"([A-Za-z0-9_.() ]+)"


def _parse_number(word: str) -> float:
    return float(word) if re.search(r"[.einf]", word) else int(word)


def _parse_correction(word: str) -> float:
    return {"biased": 0, "unbiased": 1}[word] if " " not in word else _parse_number(word.split()[1])


def _ndim(match: re.Match[str]) -> dict[str, Any]:
    low = int(match[1])
    return {"ndim": (low, int(match[3]) if match[3] else None if match[2] else low)}


def _eps(match: re.Match[str]) -> dict[str, Any]:
    where = next(name for name, phrase in _EPS_PHRASE.items() if phrase == match[2])
    return {"eps": None if match[1] == "of the dtype" else _parse_number(match[1]), "eps_at": where}


def _moment(match: re.Match[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"scale": match[1]}
    if match[2]:
        found["correction"] = _parse_correction(match[2])
    if match[4]:
        found["iterations"] = int(match[4])
    return found


def _whitening(match: re.Match[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"scale": match[1], "whiten": match[2], "correction": _parse_correction(match[3])}
    if match[5]:
        found["iterations"] = int(match[5])
    return found


def _running(match: re.Match[str]) -> dict[str, Any]:
    return {
        "running": Running(
            momentum=_parse_number(match[2]) if match[2] else None,
            correction=_parse_correction(match[3]),
            over=None if match[5] is None else "" if match[5] == "nothing" else match[5],
            renorm=(_parse_number(match[6]), _parse_number(match[7])) if match[6] else None,
            averages=match[8] or "variance",
        )
    }


_CLAUSES: list[tuple[str, Any]] = [
    (r"rank (\d+)( or more)?(?: to (\d+))?", _ndim),
    (r"samples on (\S+)", lambda m: {"sample_axis": m[1]}),
    (r"no sample axis", lambda m: {"sample_axis": ""}),
    (r"(short|balanced) remainder", lambda m: {"remainder": m[1]}),
    (r"(not )?centered", lambda m: {"center": not m[1]}),
    (rf"({'|'.join(MOMENTS)})(?:, {_CORR})?(?:, (\d+) iterations)?", _moment),
    (rf"({'|'.join(WHITENINGS)}) over {_AXES}, {_CORR}(?:, (\d+) iterations)?", _whitening),
    (rf"eps (of the dtype|-?[0-9.]+(?:e[+-]?[0-9]+)?) ({'|'.join(_EPS_PHRASE.values())})", _eps),
    (r"no (weight|bias)", lambda m: {m[1]: None}),
    (r"scalar (weight|bias)", lambda m: {m[1]: ""}),
    (rf"{_NUM} added to the weight", lambda m: {"weight_offset": _parse_number(m[1])}),
    (r"weight and bias from an input", lambda m: {"source": "input"}),
    (rf"gain {_NUM}", lambda m: {"gain": _parse_number(m[1])}),
    (
        rf"running (cumulative|momentum {_NUM}), {_CORR}(?:, over {_AXES})?(?:, renorm {_NUM} {_NUM})?"
        r"(?:, averages the (denominator))?",
        _running,
    ),
    (r"stored whitening matrix", lambda m: {"whiten_state": "whitening"}),
    (r"computed in (?:the dtype of the )?(\S+)", lambda m: {"compute": m[1]}),
    (r"weight applied after casting back", lambda m: {"cast_weight": "after"}),
    (rf"(weight|bias) {_AXES}", lambda m: {m[1]: m[2]}),
]


def from_text(line: str) -> dict[str, Any]:
    """The arguments of NormSpec that a line stands for. Raises SpecError naming the clause it cannot read."""
    axes, *clauses = (clause.strip() for clause in line.split(";"))
    stats, *sizes = axes.split(", ")
    found: dict[str, Any] = {"stats": stats, "sizes": {}}
    for item in sizes:
        name, _, size = item.partition("=")
        if not size.isdigit():
            raise SpecError(f"a size is written like g=32; got {item!r}. The line was {line!r}.")
        found["sizes"][name] = int(size)
    for clause in clauses:
        for form, read in _CLAUSES:
            match = re.fullmatch(form, clause)
            if match:
                found |= read(match)
                break
        else:
            raise SpecError(
                f"every clause is one that a specification prints; got {clause!r}. The line was {line!r}."
            )
    compute, weight = found.pop("compute", None), found.pop("cast_weight", "before")
    return found | {"cast": Cast(compute, weight)}


# JSON ---------------------------------------------------------------------------------------------------


def to_json(spec: NormSpec) -> dict[str, Any]:
    """All fields as plain values; infinities are written ``"inf"``, since JSON has none."""
    data: dict[str, Any] = {"normspec": VERSION}
    for f in fields(spec):
        data[f.name] = getattr(spec, f.name)
    data["sizes"] = dict(spec.sizes)
    data["ndim"] = None if spec.ndim is None else list(spec.ndim)
    data["cast"] = asdict(spec.cast)
    if spec.running is not None:
        data["running"] = asdict(spec.running)
        if spec.running.renorm is not None:
            data["running"]["renorm"] = ["inf" if math.isinf(x) else x for x in spec.running.renorm]
    return data


def from_json(data: str | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of NormSpec. Fields that are left out have their defaults."""
    found: dict[str, Any] = dict(json.loads(data) if isinstance(data, str) else data)
    version = found.pop("normspec", None)
    if version != VERSION:
        raise SpecError(f'a specification in JSON has "normspec": {VERSION}; got {version!r}. Write it anew.')
    from normscope.spec.normspec import NormSpec

    strangers = sorted(set(found) - {f.name for f in fields(NormSpec)})
    if strangers:
        raise SpecError(
            f"a specification in JSON has the fields of NormSpec; got {strangers[0]!r}. Remove it."
        )
    if found.get("ndim") is not None:
        low, high = found["ndim"]
        found["ndim"] = (low, high)
    if found.get("cast") is not None:
        found["cast"] = Cast(**found["cast"])
    if found.get("running") is not None:
        running = dict(found["running"])
        if running.get("renorm") is not None:
            running["renorm"] = tuple(float(x) if x == "inf" else x for x in running["renorm"])
        found["running"] = Running(**running)
    return found
