"""The pytest plugin: ``normscope_check`` runs a check in a test, ``assert_clean`` fails the test with its findings.

    def test_norms(normscope_check):
        assert_clean(normscope_check(build_model(), a_batch()))

Loading it imports neither torch nor NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from normscope.doctor.report import Report

__all__ = ["assert_clean", "normscope_check"]


class Check(Protocol):
    """``normscope.check``; arguments as there."""

    def __call__(self, model: Any, inputs: Any = None, targets: Any = None, **options: Any) -> Report: ...


@pytest.fixture
def normscope_check() -> Check:
    """``normscope_check(model, inputs, ...)`` -> :class:`~normscope.Report`; arguments as for ``normscope.check``."""

    def run(model: Any, inputs: Any = None, targets: Any = None, **options: Any) -> Report:
        from normscope.doctor.check import check

        return check(model, inputs, targets, **options)

    return run


def assert_clean(report: Report, severity: str = "warning") -> None:
    """Fail the test, with the whole report, if it has a finding of this severity or graver.

    Raises:
        BadInput: no such severity.

    Example:
        >>> import normscope, torch
        >>> assert_clean(normscope.check(torch.nn.Linear(2, 2)))
    """
    __tracebackhide__ = True
    found = report.at_least(severity)
    if found:
        pytest.fail(f"{len(found)} finding(s) at or above {severity}\n\n{report}", pytrace=False)
