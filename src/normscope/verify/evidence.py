"""One checked statement with everything needed to repeat it, and a report of many."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass, field
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from normscope.doctor.report import plain
from normscope.errors import printable
from normscope.verify import text

if TYPE_CHECKING:
    from normscope.verify.unverified import Unverified


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

    def __str__(self) -> str:
        return dedent("\n".join(map(printable, text.item_lines(self, long=False))))


@dataclass(frozen=True)
class VerifyReport:
    """Evidence on this machine and build. ``str`` and `text` are for people, `to_json` for machines."""

    evidence: tuple[Evidence, ...]
    target: str
    versions: dict[str, str]
    not_verified: tuple[Unverified, ...] = ()
    """where the target normalizes too, with the reason why it could not be checked"""
    by_norm: bool = False
    """each topic is one norm of the user's"""

    @property
    def passed(self) -> bool:
        return all(item.passed for item in self.evidence)

    @property
    def failed(self) -> tuple[Evidence, ...]:
        return tuple(item for item in self.evidence if not item.passed)

    @property
    def topics(self) -> dict[str, list[Evidence]]:
        """The evidence by topic, in order."""
        topics: dict[str, list[Evidence]] = {}
        for item in self.evidence:
            topics.setdefault(item.topic, []).append(item)
        return topics

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "kind": "verify",
            "target": self.target,
            "passed": self.passed,
            "versions": self.versions,
            "evidence": [item.to_dict() for item in self.evidence],
            "not_verified": [item.to_dict() for item in self.not_verified],
        }

    def to_json(self) -> str:
        """One JSON record; numbers that JSON cannot hold (NaN, infinity) are written as text."""
        return json.dumps(plain(self.to_dict()), indent=2, allow_nan=False)

    def text(self, *, long: bool = False) -> str:
        """For people. Of one norm one line a check, of several one line a norm, of PyTorch's own every item with input
        and results abbreviated; ``long`` writes everything out."""
        lines = (line for entry in text.report_lines(self, long=long) for line in entry.split("\n"))
        return "\n".join(map(printable, lines))

    def __str__(self) -> str:
        return self.text()


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
