"""``normscope verify``: evidence on this machine and build, from the public API.

`run` checks PyTorch's own layers against the float64 reference; `run_layer` puts a user's own layer through the same
protocol. A topic is one file with a tuple ``CHECKS`` of functions that yield `Evidence`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from normscope.verify.evidence import Evidence, VerifyReport, versions

if TYPE_CHECKING:
    import torch

__all__ = ["Evidence", "VerifyReport", "run", "run_layer"]


def run() -> VerifyReport:
    """Check PyTorch's own normalization layers on this machine against the formulas, in float64.

    Takes a second or two, and reads and writes no file.

    >>> report = run()
    >>> report.passed, len(report.evidence) > 30
    (True, True)
    """
    from normscope.verify import axes, batch, distribution, geometry, rms

    topics = (geometry, batch, axes, rms, distribution)
    evidence = (item for topic in topics for item in _collect(topic.TOPIC, topic.CHECKS))
    return VerifyReport(tuple(evidence), "torch.nn on this machine", versions())


def run_layer(module: torch.nn.Module, *, name: str = "") -> VerifyReport:
    """Put one's own normalization layer, or every one in a model, through the same protocol.

    Arguments: ``module``, which is copied and never changed; ``name``, what to call it in the report.

    Raises UnknownNormalization where there is no normalization in it that can be read.

    >>> import torch
    >>> run_layer(torch.nn.LayerNorm(4)).passed
    True
    """
    from normscope.verify import layer

    evidence: list[Evidence] = []
    for path, part in layer.normalizations(module):
        topic = path or name or type(part).__name__
        evidence += _collect(topic, layer.checks(part, topic))
    return VerifyReport(tuple(evidence), name or type(module).__name__, versions())


def _collect(topic: str, checks: Iterable[Callable[[], Iterator[Evidence]]]) -> Iterator[Evidence]:
    """What the checks say, a check that raises being evidence that failed."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            claim = f"the check {check.__name__.replace('_', ' ')} runs"
            yield Evidence(topic, claim, "", "", None, float("nan"), 0.0, why)
