"""The rules applied to what was measured. A rule that could not look has not passed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from normscope.doctor import runs
from normscope.doctor.probes import all_probes
from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import Rule
from normscope.doctor.subject import Subject
from normscope.doctor.training_record import training_of
from normscope.errors import told

OF_SETS = frozenset({"statistics", "precision", "ranges", "stored"})
"""probes whose measurement holds the sites that had numbers to measure"""
NOTHING = "nothing was measured: no site had statistic sets of finite numbers"


def judge(
    rules: Iterable[Rule], subject: Subject, reasons: dict[str, str]
) -> tuple[list[Finding], list[str], list[NotRun]]:
    """Findings, codes of the rules that looked and found nothing, and what could not be decided.

    ``reasons``: probe name -> why it could not run.
    """
    findings: list[Finding] = []
    passed: list[str] = []
    not_run: list[NotRun] = []
    for rule in rules:
        blocked = _blocked(rule, subject, reasons)
        if blocked is not None:
            not_run.append(blocked)
            continue
        try:
            results = list(rule.check(subject))
        except Exception as error:  # a fault of one rule costs that rule, not the report
            not_run.append(NotRun(rule.code, f"internal error: {told(error)}"))
            continue
        found = [named(result, rule) for result in results if isinstance(result, Finding)]
        undecided = [result for result in results if isinstance(result, NotRun)]
        partly = runs.not_run(rule.code, rule.uses, reasons)
        if partly is not None and not found:
            undecided.append(NotRun(rule.code, f"decided by the modules alone ({partly.reason})"))
        if not found and not undecided and not any(True for _ in subject.known()):
            undecided.append(NotRun(rule.code, "no site whose specification is known"))
        if not found and not undecided and _nothing_measured(rule, subject):
            undecided.append(NotRun(rule.code, NOTHING))
        findings += found
        not_run += undecided
        if not found and not undecided:
            passed.append(rule.code)
    return findings, passed, not_run


def _blocked(rule: Rule, subject: Subject, reasons: dict[str, str]) -> NotRun | None:
    if not subject.sites:
        return NotRun(rule.code, "no normalization was found")
    if rule.stateful and not any(site.has_running_state for site in subject.sites):
        return NotRun(rule.code, subject.stateless())
    if ("data" in rule.needs or rule.real_data) and not subject.has_data:
        return NotRun(rule.code, "needs data: pass inputs")
    if (
        _watches(rule)
        and subject.has_data
        and training_of(subject) is None
        and not any(s.calls for s in subject.sites)
    ):
        return NotRun(rule.code, "no normalization was called on these inputs")
    if rule.real_data and subject.synthetic:
        return NotRun(rule.code, "random inputs say nothing about your data: pass real samples")
    return runs.not_run(rule.code, rule.needs, reasons)


def _nothing_measured(rule: Rule, subject: Subject) -> bool:
    names = OF_SETS.intersection((*rule.needs, *rule.uses)) & subject.measured.keys()
    essential = bool(OF_SETS.intersection(rule.needs))
    return essential and not any(subject.measured[name] for name in names)


def _watches(rule: Rule) -> bool:
    """It cannot do without what is seen of calls."""
    probes = all_probes()
    return any(name == "data" or (name in probes and probes[name].runs) for name in rule.needs)


def named(finding: Finding, rule: Rule) -> Finding:
    """The finding, and those folded under it, with the rule's name."""
    return replace(finding, name=rule.name, also=tuple(named(f, rule) for f in finding.also))
