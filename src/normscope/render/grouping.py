"""Like findings put together for people: one entry for a rule and severity, with all its sites."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from normscope.doctor.report import Finding


@dataclass(frozen=True)
class Group:
    first: Finding
    """shown in full"""
    like: tuple[str, ...]
    """sites with the same finding"""
    follows: tuple[str, ...]
    """sites whose findings follow from these"""


def grouped(findings: Iterable[Finding]) -> list[Group]:
    """Groups in the order of the findings, which is gravest first."""
    members: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        members.setdefault((finding.code, finding.severity, finding.mode), []).append(finding)
    return [
        Group(
            first=group[0],
            like=tuple(f.site for f in group[1:]),
            follows=tuple(dict.fromkeys(sub.site for f in group for sub in f.also)),
        )
        for group in members.values()
    ]


def label(site: str) -> str:
    """A site's name for people: a model that is itself a norm has none."""
    return site or "the model"


def listed(sites: Iterable[str], most: int = 6) -> str:
    """``a, b, c and 4 more``."""
    names = [label(name) for name in sites]
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def counted(number: int, noun: str) -> str:
    """``1 site``, ``2 sites``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(value: object) -> str:
    """An evidence value in at most a few significant digits."""
    if value == "":
        return "the model"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return listed([shown(v) for v in value])
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    return str(value)
