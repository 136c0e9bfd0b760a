"""The report as SARIF 2.1.0 (OASIS), the format that code hosts and editors read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from normscope.doctor.baseline import fingerprint
from normscope.doctor.rules import Rule, all_rules
from normscope.doctor.wording import encodable

if TYPE_CHECKING:
    from normscope.doctor.report import Finding, Report, Suppressed

LEVELS = {"error": "error", "warning": "warning", "info": "note"}
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def to_sarif(report: Report) -> str:
    accepted = [(one, s) for s in report.suppressed for one in _flat((s.finding,))]
    used = {finding.code for finding in _flat(report.findings)} | set(report.passed)
    used |= {finding.code for finding, _ in accepted}
    used |= {entry.code for entry in report.not_run}
    rules = [rule for code, rule in all_rules().items() if code in used]
    index = {rule.code: i for i, rule in enumerate(rules)}
    run = {
        "tool": {
            "driver": {
                "name": "Normscope",
                "version": report.versions.get("normscope", ""),
                "rules": [_descriptor(rule) for rule in rules],
            }
        },
        "results": [
            *(_result(finding, index, report) for finding in _flat(report.findings)),
            *(_result(finding, index, report) | _suppression(by) for finding, by in accepted),
        ],
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [
                    {
                        "level": "note",
                        "message": {"text": f"not run: {entry.reason}"},
                        "associatedRule": {"id": entry.code, "index": index[entry.code]},
                    }
                    for entry in report.not_run
                    if entry.code in index
                ],
            }
        ],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, allow_nan=False)


def _flat(findings: tuple[Finding, ...]) -> list[Finding]:
    return [f for finding in findings for f in (finding, *_flat(finding.also))]


def _descriptor(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": "".join(part.capitalize() for part in rule.name.split("-")),
        "shortDescription": {"text": rule.summary},
        "help": {"text": rule.page, "markdown": rule.page},
    }


def _result(finding: Finding, index: dict[str, int], report: Report) -> dict[str, Any]:
    name = ":".join(part for part in (report.target, finding.site) if part) or "the model"
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": name, "kind": "module"}]}
    file, _, line = report.source_at(finding.site).rpartition(":")
    if file:
        place = {"artifactLocation": {"uri": quote(encodable(file))}, "region": {"startLine": int(line)}}
        location["physicalLocation"] = place
    return {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "level": LEVELS[finding.severity],
        "message": {"text": finding.message + (f" Fix: {finding.fix}" if finding.fix else "")},
        "locations": [location],
        "partialFingerprints": {"normscope/v1": fingerprint(finding)},
        "properties": {"evidence": dict(finding.evidence), "site": finding.site, "mode": finding.mode},
    }


def _suppression(by: Suppressed) -> dict[str, Any]:
    return {"suppressions": [{"kind": "external", "justification": by.reason or f"accepted by the {by.by}"}]}
