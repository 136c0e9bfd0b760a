"""The report as JSON, by the versioned schema in ``report-schema.json`` beside this file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normscope.doctor.report import Report

SCHEMA_VERSION = 1
"""raised when a field changes its meaning or goes away; new fields do not raise it"""


def to_json(report: Report) -> str:
    document = {
        "schema": SCHEMA_VERSION,
        "target": report.target,
        "ok": report.ok,
        "versions": dict(report.versions),
        "findings": [finding.to_dict() for finding in report.findings],
        "sites": [row.to_dict() for row in report.sites],
        "passed": list(report.passed),
        "not_run": [{"code": n.code, "site": n.site, "reason": n.reason} for n in report.not_run],
        "notes": list(report.notes),
        "measurements": {site: dict(measured) for site, measured in report.measurements.items()},
        "suppressed": [accepted.to_dict() for accepted in report.suppressed],
        "source": report.source,
    }
    return json.dumps(document, indent=2, allow_nan=False)
