"""Writing down what a monitor sees: JSON lines, and scalars for TensorBoard."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from normscope.errors import MissingExtra

if TYPE_CHECKING:
    from normscope.doctor.report import Finding
    from normscope.monitor.site_look import SiteLook

SCALARS = (
    *("batch_mean", "batch_variance", "running_mean", "running_variance", "shift"),
    *("denominator_min", "denominator_median", "near_eps"),
    *("gain_min", "gain_median", "gain_max", "gain_gradient", "bias_gradient"),
)


class Writer(Protocol):
    name: str

    def look(self, look: SiteLook) -> None: ...

    def finding(self, step: int, finding: Finding) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line, appended: ``{"kind": "site", "step": 1, "site": "bn", ...}`` for each site of each look,
    ``{"kind": "finding", "step": 1, "code": "NS310", ...}`` for each finding. Numbers that are not finite are the
    strings "NaN", "Infinity" and "-Infinity"."""

    def __init__(self, path: str | Path) -> None:
        self.name = f"jsonl {path}"
        self._path = Path(path)
        self._append("")  # a path that cannot be written is told now and not at the first look

    def look(self, look: SiteLook) -> None:
        self._line({"kind": "site", **look.to_dict()})

    def finding(self, step: int, finding: Finding) -> None:
        self._line({"kind": "finding", "step": step, **finding.to_dict()})

    def close(self) -> None:
        pass

    def _line(self, content: dict[str, Any]) -> None:
        self._append(json.dumps(content, allow_nan=False) + "\n")

    def _append(self, text: str) -> None:
        """Opened for each line: a training that dies leaves all that was seen."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


class TensorBoard:
    """Scalars ``normscope/SITE/denominator_min`` and so on, and findings as text, at their optimizer step.

    Args:
        to: a directory, or a ``SummaryWriter``, which is then not closed.

    Raises:
        MissingExtra: a directory, and tensorboard is not installed.
    """

    def __init__(self, to: Any) -> None:
        self.name = "tensorboard"
        self._own = isinstance(to, (str, Path))
        self._writer = _summary_writer(str(to)) if self._own else to

    def look(self, look: SiteLook) -> None:
        for name in SCALARS:
            value = getattr(look, name)
            if math.isfinite(value):
                self._writer.add_scalar(f"normscope/{look.site or 'model'}/{name}", value, look.step)

    def finding(self, step: int, finding: Finding) -> None:
        text = f"{finding.severity} {finding.code} {finding.name} at {finding.site or 'the model'}: {finding.message}"
        self._writer.add_text("normscope/findings", text, step)

    def close(self) -> None:
        if self._own:
            self._writer.close()


def _summary_writer(directory: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboard", "tensorboard", "writing for TensorBoard") from error
    return SummaryWriter(directory)
