"""One checked statement with everything needed to repeat it, and a report of many."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from normscope.doctor.report import plain


@dataclass(frozen=True)
class Evidence:
    """A statement, what it was checked on, and one number against one tolerance.

    ``measured <= tolerance`` passes, or ``measured >= tolerance`` where ``at_least`` (a difference that must show).
    NaN never passes.
    """

    topic: str
    claim: str
    input: Any
    """plain numbers, or words where they are many: shape, distribution, seed"""
    convention: str
    """the specification of the layer, and which layer"""
    eps: float | None
    measured: float
    tolerance: float
    because: str
    """what the tolerance is derived from"""
    result: dict[str, Any] = field(default_factory=dict)
    """what came out, by name: plain numbers and lists"""
    at_least: bool = False

    @property
    def passed(self) -> bool:
        return self.measured >= self.tolerance if self.at_least else self.measured <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "claim": self.claim,
            "passed": self.passed,
            "input": self.input,
            "convention": self.convention,
            "eps": self.eps,
            "result": self.result,
            "measured": self.measured,
            "relation": ">=" if self.at_least else "<=",
            "tolerance": self.tolerance,
            "because": self.because,
        }

    def lines(self, *, convention: bool = True) -> Iterator[str]:
        """For people, one line each: the claim, input, convention, results, and the number against its tolerance."""
        yield f"{'passed' if self.passed else 'FAILED'}  {self.claim}"
        yield f"        input {_short(self.input)}"
        if convention:
            yield f"        {self.convention}"
        for name, value in self.result.items():
            yield f"        {name} = {_short(value)}"
        relation = ">=" if self.at_least else "<="
        yield f"        measured {self.measured:.3g} {relation} {self.tolerance:.3g}: {self.because}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True)
class VerifyReport:
    """Evidence on this machine and build. ``str`` is for people, `to_json` for machines."""

    evidence: tuple[Evidence, ...]
    target: str
    versions: dict[str, str]

    @property
    def passed(self) -> bool:
        return all(item.passed for item in self.evidence)

    @property
    def failed(self) -> tuple[Evidence, ...]:
        return tuple(item for item in self.evidence if not item.passed)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "kind": "verify",
            "target": self.target,
            "passed": self.passed,
            "versions": self.versions,
            "evidence": [item.to_dict() for item in self.evidence],
        }

    def to_json(self) -> str:
        """One JSON record; numbers that JSON cannot hold (NaN, infinity) are written as text."""
        return json.dumps(plain(self.to_dict()), indent=2, allow_nan=False)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"normscope verify: {self.target}"
        before = None
        for item in self.evidence:
            if before is None or item.topic != before.topic:
                yield f"\n{item.topic}"
                before = None
            for line in item.lines(convention=before is None or item.convention != before.convention):
                yield f"  {line}"
            before = item
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        count = len(self.evidence)
        verdict = f"all {count} passed" if self.passed else f"{len(self.failed)} of {count} FAILED"
        yield f"\n{verdict} with {versions}"


def versions() -> dict[str, str]:
    """What the evidence was taken on."""
    import numpy
    import torch

    import normscope

    return {
        "normscope": normscope.__version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def _short(value: Any) -> str:
    """Ten significant digits; lists in brackets, names before their values."""
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_short(item) for item in value)}]"
    return str(value)
