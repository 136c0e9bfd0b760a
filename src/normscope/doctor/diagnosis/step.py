"""What a step of the diagnosis works on, and what it says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from normscope.doctor.diagnosis.alone import Alone, alone
from normscope.doctor.report import Finding, severity_rank
from normscope.doctor.wording import unfold

if TYPE_CHECKING:
    from collections.abc import Callable

    from normscope.doctor.report import Report
    from normscope.doctor.subject import Subject


@dataclass(frozen=True)
class Step:
    """One step: what was done, what was seen, what follows."""

    number: int
    title: str
    done: str
    seen: tuple[str, ...]
    follows: str
    ok: bool | None
    """None: it could not be told"""
    site: str = ""
    """where it is worst"""
    todo: str = ""
    """what to do, where it failed"""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(eq=False)
class Case:
    """A model with its data, and what the rules found on it."""

    subject: Subject
    report: Report

    @cached_property
    def alone(self) -> list[Alone]:
        """The sites that run by themselves, each as a copy."""
        return [found for found in self._tried if isinstance(found, Alone)]

    @cached_property
    def apart(self) -> dict[str, str]:
        """The sites that do not run by themselves, and why."""
        pairs = zip(self.subject.sites, self._tried, strict=True)
        return {site.name: found for site, found in pairs if isinstance(found, str)}

    @cached_property
    def _tried(self) -> list[Alone | str]:
        specs = {row.name: row.spec for row in self.report.sites}
        return [alone(site, specs.get(site.name)) for site in self.subject.sites]

    def worst(self, codes: str, but: Callable[[Finding], bool] = lambda _: False) -> Finding | None:
        """The gravest finding of these rules, from warning on; the first in their order among equals."""
        wanted = codes.split()
        found = [
            one
            for finding in self.report.at_least("warning")
            for one in unfold(finding)
            if one.code in wanted and not but(one)
        ]
        return min(found, key=lambda f: (-severity_rank(f.severity), wanted.index(f.code)), default=None)


def told(finding: Finding) -> str:
    """A finding as a line of a step."""
    return f"{finding.code} {finding.name} at {finding.site or 'the model'}: {finding.message}"
