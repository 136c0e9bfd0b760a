"""Speed and memory of the normalizations on this machine: PyTorch eager, compiled, ours, a copy of the same bytes.

``run(cases(...), models(...))`` measures; ``normscope bench`` is its command line.
"""

from __future__ import annotations

from normscope.bench.measure import run
from normscope.bench.networks import models
from normscope.bench.operations import DTYPES, OPS, SIZES, Case, cases
from normscope.bench.report import ModelRow, Report, Row
from normscope.bench.timing import Timing, alternate

__all__ = [
    "DTYPES",
    "OPS",
    "SIZES",
    "Case",
    "ModelRow",
    "Report",
    "Row",
    "Timing",
    "alternate",
    "cases",
    "models",
    "run",
]
