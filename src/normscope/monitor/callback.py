"""What the callbacks of training frameworks share: a monitor for the length of a training, findings as warnings."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from normscope.doctor.report import severity_rank
from normscope.errors import BadInput, printable

if TYPE_CHECKING:
    from normscope.doctor.report import Finding, Report
    from normscope.monitor.monitor import Monitor


class MonitorCallback:
    """A monitor that is started and stopped by a framework.

    Args:
        every: optimizer steps from one look to the next.
        warn: severity from which findings are told as warnings when they appear; "" tells none.
        options: as for :class:`normscope.Monitor`.

    Raises:
        BadInput: ``warn`` is no severity.
    """

    def __init__(self, every: int = 100, *, warn: str = "warning", **options: Any) -> None:
        self._least = severity_rank(warn) if warn else None
        self._options = {"every": every, **options}
        self.monitor: Monitor | None = None

    def report(self) -> Report:
        """What the monitor found.

        Raises:
            BadInput: nothing was trained yet.
        """
        if self.monitor is None:
            raise BadInput("nothing was monitored yet: give this callback to a trainer and train first")
        return self.monitor.report()

    def begin(self, model: Any, optimizers: list[Any] | None = None) -> None:
        """Training begins."""
        from normscope.monitor.monitor import Monitor

        self.end()  # of a training that has died
        self.monitor = Monitor(model, optimizers, **{**self._options, "on_finding": self._found}).start()

    def end(self) -> None:
        """Training ends, one way or the other."""
        if self.monitor is not None:
            self.monitor.stop()

    def warn(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)

    def _found(self, finding: Finding) -> None:
        if self._least is not None and severity_rank(finding.severity) >= self._least:
            where = finding.site or "the model"
            self.warn(printable(f"{finding.code} {finding.name} at {where}: {finding.message}"))
        user = self._options.get("on_finding")
        if user is not None:
            user(finding)
