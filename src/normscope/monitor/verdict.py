"""The doctor's rules applied to a running training: no rule is written twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from normscope.doctor.check import chosen, row, versions
from normscope.doctor.judging import judge
from normscope.doctor.probes.finite import FiniteParameters
from normscope.doctor.probes.freeze import FreezeProbe
from normscope.doctor.probes.stored import Stored
from normscope.doctor.report import Finding, NotRun, Report, severity_rank
from normscope.doctor.sites import find_sites
from normscope.doctor.subject import Subject
from normscope.errors import told

if TYPE_CHECKING:
    from torch import nn

    from normscope.doctor.rules import Rule
    from normscope.doctor.session import Session
    from normscope.doctor.site import Site
    from normscope.monitor.written import Written

    Judged = tuple[list[Finding], list[str], list[NotRun], list[Site]]
    """findings, codes that passed, what was not run, sites"""

LIVE = (
    *("NS205", "NS206"),
    *("NS301", "NS305", "NS306", "NS307", "NS309", "NS310", "NS312", "NS314", "NS315"),
    *("NS401", "NS402", "NS403", "NS404", "NS405", "NS406"),
)
"""what a step of training can decide. Not NS304: weights move, and running statistics follow them late"""
SETTLED = ("NS302", "NS303", "NS308", "NS311")
"""about statistics that have had time to gather"""
WARM = 100
"""optimizer steps after which they have"""


class Modes:
    """What is left of a session when it is over: the model, and its training flags after ``train()`` and ``eval()``.

    Args:
        session: open.
        several: the model is a mere container of the monitor's own. Nobody calls its ``train()``, so a model in it
            that is in eval now stays there.
    """

    def __init__(self, session: Session, *, several: bool) -> None:
        self.model: nn.Module = session.model
        self._several = several
        self._after: dict[tuple[str, ...], dict[str, bool]] = {}
        self._why = ""
        for calls in (("train",), ("eval",), ("train", "eval")):
            try:
                self._after[calls] = session.modes_after(*calls)
            except Exception as error:  # the model's own method; that of an exported program raises
                self._why = f"the model's own train() or eval() raised {told(error)}"

    def modes_after(self, *calls: str) -> dict[str, bool]:
        if calls not in self._after:
            raise RuntimeError(self._why)
        flags = dict(self._after[calls])
        if self._several:
            resting = tuple(f"{name}." for name, one in self.model.named_children() if not one.training)
            for path in flags:
                if f"{path}.".startswith(resting):
                    flags[path] = self._after[("eval",)].get(path, False)
        return flags


def rules(select: Sequence[str] | None, ignore: Sequence[str] | None, *, settled: bool) -> list[Rule]:
    """Those that a monitor judges, as far as the user wants them."""
    codes = LIVE + (SETTLED if settled else ())
    return [rule for rule in chosen(select, ignore) if rule.code in codes]


def left_to_a_check(select: Sequence[str] | None, ignore: Sequence[str] | None) -> tuple[NotRun, ...]:
    """The other rules that the user wants."""
    reason = "a monitor does not decide it: normscope.check(model, inputs) on a batch does"
    return tuple(
        NotRun(rule.code, reason) for rule in chosen(select, ignore) if rule.code not in LIVE + SETTLED
    )


def subject_of(modes: Modes, written: Written, **settings: Any) -> Subject:
    """The model as it is now. It has data, that of the training."""
    session = cast("Session", modes)
    return Subject(modes.model, session, written.among(find_sites(session), modes), args=(), **settings)


def verdict(
    which: Sequence[Rule], subject: Subject, reasons: dict[str, str]
) -> tuple[list[Finding], list[str], list[NotRun]]:
    """Findings, codes that passed and what could not be decided; measures what needs no forward."""
    reasons = dict(reasons)
    for kind in (FreezeProbe, Stored, FiniteParameters):
        try:
            subject.measured[kind.name] = kind().finish(subject)
        except Exception as error:
            reasons[kind.name] = told(error)
    for name in {name for rule in which for name in (*rule.needs, *rule.uses)} - {"data"}:
        if name not in subject.measured:
            reasons.setdefault(name, "not measured in training, or not yet")
    now, later = ([rule for rule in which if (rule.code in SETTLED) == late] for late in (False, True))
    found, passed, not_run = judge(now, subject, reasons)
    # A batch of training is no witness of how far statistics have settled: the weights before them move.
    apart = {name: value for name, value in subject.measured.items() if name != "gap"}
    moving = {**reasons, "gap": "the weights move"}
    more = judge(later, replace(subject, measured=apart), moving)
    return found + more[0], sorted(passed + more[1]), not_run + more[2]


def report_of(
    model: nn.Module,
    judged: Judged,
    *,
    earlier: Sequence[Finding],
    elsewhere: Sequence[NotRun],
    notes: Sequence[str],
) -> Report:
    """The report of a training; findings of ``earlier`` whose rule is silent now become a note."""
    found, passed, not_run, sites = judged
    codes = {finding.code for finding in found}
    unknown = [site for site in sites if site.kind == "hand-written" and site.spec is None]
    by_hand = [
        f"{site.name or 'the model'} ({site.type_name}) was not measured: {site.reason}" for site in unknown
    ]
    gone = dict.fromkeys(f"{f.code} at {f.site or 'the model'}" for f in earlier if f.code not in codes)
    return Report(
        findings=tuple(sorted(found, key=lambda f: (-severity_rank(f.severity), f.code))),
        sites=tuple(row(site) for site in sites),
        passed=tuple(passed),
        not_run=(*not_run, *elsewhere),
        notes=(
            *notes,
            *by_hand,
            *([f"was found earlier and no longer holds: {', '.join(gone)}"] if gone else []),
        ),
        target=f"training of {type(model).__name__}",
        versions=versions(),
    )
