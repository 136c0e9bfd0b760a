"""The pytest plugin: ``normscope_check`` runs a check in a test, ``assert_clean`` fails the test with its findings.

    def test_norms(normscope_check):
        assert_clean(normscope_check(build_model(), a_batch()))

The settings of ``[tool.normscope]`` in the nearest ``pyproject.toml`` at or above pytest's rootdir hold, as on the
command line; what is passed wins.

Loading it imports neither torch nor NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from normscope.doctor.report import Report

__all__ = ["assert_clean", "normscope_check"]


class Check(Protocol):
    """``normscope.check``; arguments as there, by default those of ``[tool.normscope]``."""

    def __call__(self, model: Any, inputs: Any = None, targets: Any = None, **options: Any) -> Report: ...


@pytest.fixture
def normscope_check(request: pytest.FixtureRequest) -> Check:
    """``normscope_check(model, inputs, ...)`` -> :class:`~normscope.Report`; arguments as for ``normscope.check``.

    ``select``, ``ignore``, ``seed``, ``dataset-size`` and ``frozen-policy`` of ``[tool.normscope]`` stand in for
    arguments that are not passed; what its ``ignore-site`` and ``baseline`` accept is no finding. ``fail-on`` is an
    argument of :func:`assert_clean`.

    Raises:
        BadInput: from the call, for settings that cannot be used.
    """

    def run(model: Any, inputs: Any = None, targets: Any = None, **options: Any) -> Report:
        from normscope.cli import settings
        from normscope.doctor.baseline import Baseline
        from normscope.doctor.check import check
        from normscope.doctor.suppress import suppress

        ours = settings.load(request.config.rootpath)
        defaults = {
            "select": ours.select or None,
            "ignore": ours.ignore or None,
            "seed": ours.seed,
            "dataset_size": ours.dataset_size,
            "frozen_policy": ours.frozen_policy,
        }
        known = Baseline.read(ours.baseline) if ours.baseline else None
        return suppress(check(model, inputs, targets, **{**defaults, **options}), ours.ignore_site, known)

    return run


def assert_clean(report: Report, severity: str = "warning") -> None:
    """Fail the test, with the whole report, if it has a finding of this severity or graver.

    ``severity`` is what ``fail-on`` is on the command line.

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
