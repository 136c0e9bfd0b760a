"""Findings that are known and accepted: told as such, and no longer findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, Report, Suppressed
from normscope.doctor.wording import fold, listed, unfold
from normscope.errors import BadInput

if TYPE_CHECKING:
    from normscope.doctor.baseline import Baseline

Reason = Callable[[Finding], "str | None"]


@dataclass(frozen=True)
class Ignore:
    """What a project accepts at some sites, and why.

    >>> rule = Ignore("layer1.*", ("NS501",), "the bias is used by the quantized export")
    >>> rule.covers(Finding("NS501", "layer1.0.bn", "..."))
    True
    """

    site: str
    """a site's name; ``*`` stands for anything, dots too"""
    codes: tuple[str, ...]
    """rule codes or their beginnings"""
    reason: str

    def __post_init__(self) -> None:
        if not self.codes or not self.reason.strip():
            raise BadInput(
                f"what is ignored at {self.site!r} needs codes and a reason, which a reader will ask for; "
                f"got codes {self.codes!r}, reason {self.reason!r}"
            )

    def matches(self, site: str) -> bool:
        first, *rest = self.site.split("*")
        if not rest:
            return site == first
        *middle, last = rest
        if len(site) < len(first) + len(last) or not (site.startswith(first) and site.endswith(last)):
            return False
        place, end = len(first), len(site) - len(last)
        for part in middle:  # the leftmost place is always as good as any, so there is nothing to go back to
            found = site.find(part, place, end)
            if found < 0:
                return False
            place = found + len(part)
        return True

    def covers(self, finding: Finding) -> bool:
        return finding.code.startswith(self.codes) and self.matches(finding.site)


def suppress(report: Report, ignores: Iterable[Ignore] = (), baseline: Baseline | None = None) -> Report:
    """The report with what is ignored or in the baseline moved from ``findings`` to ``suppressed``.

    Of findings folded into one, each site is decided by itself. What follows from an accepted finding (the layers
    behind a stale one) goes with it. Notes tell ignores and entries of the baseline that nothing needs any more.

    >>> import torch, normscope
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> report = normscope.check(model, torch.randn(8, 3, 8, 8), select=["NS501"])
    >>> left = suppress(report, [Ignore("1", ("NS501",), "exported with its bias")])
    >>> len(report.findings), len(left.findings), left.suppressed[0].reason
    (1, 0, 'exported with its bias')
    """
    ignores = tuple(ignores)
    budget = dict(baseline.budget) if baseline is not None else {}
    kept: list[Finding] = []
    gone: list[Suppressed] = list(report.suppressed)
    used: set[Ignore] = set()
    for finding in report.findings:
        left = []
        for one in unfold(finding):
            ignore = next((ignore for ignore in ignores if ignore.covers(one)), None)
            if ignore is not None:
                used.add(ignore)
                if baseline is not None:
                    baseline.accepts(one, budget)  # found, as the entry says: not told as stale
                gone.append(Suppressed(one, "settings", ignore.reason))
            elif baseline is not None and baseline.accepts(one, budget):
                gone.append(Suppressed(one, "baseline", baseline.reason(one)))
            else:
                left.append(one)
        kept += fold(left) if len(left) < len(unfold(finding)) else [finding]
    notes = [*report.notes, *_unused(report, [i for i in ignores if i not in used])]
    if baseline is not None:
        notes += baseline.stale(report, budget)
    return replace(report, findings=tuple(kept), suppressed=tuple(gone), notes=tuple(notes))


def decided(report: Report, code: str, site: str) -> bool:
    """Whether the check could have found ``code`` at ``site``: the rule was chosen, and ran there."""
    if any(entry.code == code and entry.site in ("", site) for entry in report.not_run):
        return False
    found = (*report.findings, *(s.finding for s in report.suppressed))
    return code in {*report.passed, *(f.code for f in found), *(n.code for n in report.not_run)}


def _unused(report: Report, ignores: list[Ignore]) -> list[str]:
    notes = []
    looked = {*report.passed, *(f.code for f in report.findings)}
    for ignore in ignores:
        what = f"the ignore of {listed(ignore.codes)} at {ignore.site!r}"
        if not any(ignore.matches(site.name) for site in report.sites):
            notes.append(f"{what} matches no normalization of this model")
        elif (above := _followed(report, ignore)) is not None:
            place = above.site or "the model"
            notes.append(
                f"{what} waits: what it accepts follows from {above.code} at {place}, and is told under it"
            )
        elif any(code.startswith(ignore.codes) for code in looked):
            notes.append(f"{what} was not needed: nothing was found there")
    return notes


def _followed(report: Report, ignore: Ignore) -> Finding | None:
    """The finding under which one stands that the ignore would cover."""
    return next((f for f in report.findings if any(ignore.covers(one) for one in f.also)), None)


def told(suppressed: Iterable[Suppressed]) -> list[str]:
    """One line a reason: ``NS501 at layer1.0, layer1.1 (pyproject.toml): the reason``."""
    words = {"settings": "by the project's settings", "baseline": "by the baseline"}
    ordered = sorted(suppressed, key=lambda s: (s.by, s.reason, s.finding.code))
    lines = []
    for (by, reason, code), group in groupby(ordered, key=lambda s: (s.by, s.reason, s.finding.code)):
        sites = listed([s.finding.site or "the model" for s in group])
        lines.append(f"{code} at {sites}, {words[by]}" + (f": {reason}" if reason else ""))
    return lines
