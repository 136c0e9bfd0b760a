"""The baseline: a file of the findings that a project knows of and lives with, so that only new ones count.

A finding is recognized by its rule, site and mode; its numbers, its wording and its place in the report may change.
It is accepted up to the severity it had: what was for information and has become an error is a new finding.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from normscope.doctor.report import SEVERITIES, Finding, Report, severity_rank
from normscope.doctor.suppress import decided
from normscope.doctor.wording import listed, unfold
from normscope.errors import BadInput

VERSION = 1
Key = tuple[str, str, str]
"""rule code, site, mode"""


def fingerprint(finding: Finding) -> str:
    """Sixteen hexadecimal digits that stay the same while the finding is about the same rule, site and mode.

    >>> one = Finding("NS403", "norm", "kappa is 100", evidence={"kappa": 100.0})
    >>> fingerprint(one) == fingerprint(Finding("NS403", "norm", "kappa is 3", evidence={"kappa": 3.0}))
    True
    """
    return sha256("\n".join(_key(finding)).encode(errors="surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True)
class Entry:
    """Findings with one fingerprint."""

    severity: str
    """the gravest that is accepted"""
    count: int = 1
    reason: str = ""
    """why it is accepted; written by hand, kept when the file is written anew"""


@dataclass(frozen=True)
class Baseline:
    """Accepted findings by rule, site and mode.

    >>> known = Baseline.of(Report((Finding("NS501", "bn", "...", "info"),), (), (), ()))
    >>> print(known.to_json())
    {
      "normscope_baseline": 1,
      "findings": [
        {"code": "NS501", "site": "bn", "mode": "", "severity": "info", "count": 1, "reason": ""}
      ]
    }
    """

    entries: Mapping[Key, Entry]
    name: str = "the baseline"
    """of the file, for notes"""

    @classmethod
    def read(cls, path: str | Path) -> Baseline:
        """From a file.

        Raises:
            BadInput: there is no such file, or it is no baseline.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise BadInput(
                f"the baseline {path} does not exist; write it with --write-baseline {path}"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"the baseline {path} cannot be read: {error}") from error
        try:
            document = json.loads(text)
            if document["normscope_baseline"] != VERSION:
                raise ValueError(
                    f"version {document['normscope_baseline']!r}, this Normscope reads {VERSION}"
                )
            return cls(dict(_entry(item) for item in document["findings"]), str(path))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadInput(
                f"{path} is no baseline ({type(error).__name__}: {error}); write it anew with --write-baseline {path}"
            ) from error

    @classmethod
    def of(cls, report: Report, old: Baseline | None = None) -> Baseline:
        """Everything found in ``report``, and what ``old`` accepts that this check could not decide.

        Reasons are kept. What a project ignores by its settings is not entered.
        """
        before = old.entries if old is not None else {}
        found = [one for finding in report.findings for one in unfold(finding)]
        found += [s.finding for s in report.suppressed if s.by == "baseline"]
        entries = {key: e for key, e in before.items() if not decided(report, key[0], key[1])}
        for key, count in Counter(map(_key, found)).items():
            worst = max((f.severity for f in found if _key(f) == key), key=severity_rank)
            entries[key] = Entry(worst, count, before[key].reason if key in before else "")
        return cls(entries)

    @property
    def budget(self) -> dict[Key, int]:
        """How many findings each entry still accepts; ``accepts`` counts it down."""
        return {key: entry.count for key, entry in self.entries.items()}

    def accepts(self, finding: Finding, budget: dict[Key, int]) -> bool:
        key = _key(finding)
        entry = self.entries.get(key)
        if (
            entry is None
            or budget[key] <= 0
            or severity_rank(finding.severity) > severity_rank(entry.severity)
        ):
            return False
        budget[key] -= 1
        return True

    def reason(self, finding: Finding) -> str:
        return self.entries[_key(finding)].reason

    def stale(self, report: Report, budget: Mapping[Key, int]) -> list[str]:
        """Entries that accept more than was found, of rules that could have found it."""
        present = {_key(one) for finding in report.findings for one in unfold(finding)}
        told: dict[str, list[str]] = {}
        for key, count in budget.items():
            if count and decided(report, key[0], key[1]):
                entry = self.entries[key]
                graver = f"graver than accepted ({entry.severity})"
                gone, fewer = "no longer found; write the file anew", "found less often; write the file anew"
                said = gone if key not in present else graver if count == entry.count else fewer
                told.setdefault(said, []).append(f"{key[0]} at {key[1] or 'the model'}")
        return [f"{self.name}: {listed(which, 6)}: {said}" for said, which in told.items()]

    def to_json(self) -> str:
        """The file: a line a finding, sorted, so that versions compare well."""
        lines = [
            json.dumps(
                {"code": key[0], "site": key[1], "mode": key[2]}
                | {"severity": entry.severity, "count": entry.count, "reason": entry.reason},
                ensure_ascii=False,
            )
            for key, entry in sorted(self.entries.items())
        ]
        body = "[\n    " + ",\n    ".join(lines) + "\n  ]" if lines else "[]"
        # half a surrogate pair, as a name may hold, has no UTF-8, but an escape in JSON
        body = body.encode(errors="backslashreplace").decode()
        return f'{{\n  "normscope_baseline": {VERSION},\n  "findings": {body}\n}}'


def _key(finding: Finding) -> Key:
    return finding.code, finding.site, finding.mode


def _entry(item: Mapping[str, Any]) -> tuple[Key, Entry]:
    key = (item["code"], item["site"], item["mode"])
    entry = Entry(item["severity"], item.get("count", 1), item.get("reason", ""))
    texts = (*key, entry.severity, entry.reason)
    if not all(isinstance(text, str) for text in texts) or entry.severity not in SEVERITIES:
        raise ValueError(f"an entry holds what is no text, or no severity: {dict(item)!r}")
    if not isinstance(entry.count, int) or isinstance(entry.count, bool) or entry.count < 1:
        raise ValueError(f"a count is a whole number from 1: {dict(item)!r}")
    return key, entry
