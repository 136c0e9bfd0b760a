"""Findings as they appear: each is told once, and again where it grows to new sites or graver."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from normscope.doctor.report import Finding, severity_rank
from normscope.errors import BadInput, told
from normscope.monitor.site_look import SiteLook
from normscope.monitor.writers import JsonLines, TensorBoard, Writer


class News:
    """Who hears of findings and looks: files, and the user's function.

    Args:
        on_finding: called last, since it may raise to end the training.
        jsonl, tensorboard: as for a monitor.

    Raises:
        MissingExtra: a directory for TensorBoard, which is not installed.
        BadInput: a place that cannot be written.
    """

    def __init__(
        self, on_finding: Callable[[Finding], object] | None, jsonl: str | Path | None, tensorboard: Any
    ) -> None:
        self.found: list[Finding] = []
        self._graveness: dict[tuple[str, str, str], int] = {}
        self._on_finding = on_finding
        self._writers: list[Writer] = []
        self.failed: list[str] = []
        """what could not be written, and why: a full disk must not end a training"""
        for name, to, kind in (("jsonl", jsonl, JsonLines), ("tensorboard", tensorboard, TensorBoard)):
            if to is not None:
                try:
                    self._writers.append(kind(to))
                except (OSError, ValueError) as error:
                    raise BadInput(
                        f"{name} names a place that can be written; {to!r}: {told(error)}"
                    ) from error

    def looks(self, looks: Iterable[SiteLook]) -> None:
        for look in looks:
            self._write(lambda writer, look=look: writer.look(look))  # type: ignore[misc]

    def _write(self, what: Callable[[Writer], None]) -> None:
        for writer in tuple(self._writers):
            try:
                what(writer)
            except Exception as error:
                self._writers.remove(writer)
                self.failed.append(f"{writer.name} is no longer written: {told(error)}")

    def tell(self, step: int, findings: Iterable[Finding]) -> None:
        for finding in findings:
            if not self._is_new(finding):
                continue
            self.found.append(finding)
            self._write(lambda writer, finding=finding: writer.finding(step, finding))  # type: ignore[misc]
            if self._on_finding is not None:
                self._on_finding(finding)

    def close(self) -> None:
        self._write(lambda writer: writer.close())

    def _is_new(self, finding: Finding) -> bool:
        new = False
        for one in (finding, *finding.also):
            key = one.code, one.site, str(one.evidence.get("diagnosis", ""))
            if severity_rank(one.severity) > self._graveness.get(key, -1):
                self._graveness[key], new = severity_rank(one.severity), True
        return new
