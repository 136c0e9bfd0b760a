"""A callback for Lightning that monitors the norms of the module it fits."""

from __future__ import annotations

from typing import Any

from normscope.errors import MissingExtra
from normscope.monitor.callback import MonitorCallback

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities import rank_zero_warn

    _MISSING = False
except ImportError:  # told when a callback is made: this file is also imported by what lists modules
    Callback = object
    _MISSING = True


class NormscopeCallback(MonitorCallback, Callback):
    """A :class:`normscope.Monitor` for the length of ``fit``: ``Trainer(callbacks=[NormscopeCallback()])``.

    Findings are told as warnings, by rank 0, as they appear. ``callback.report()`` is the report and
    ``callback.monitor`` the monitor. Arguments as for :class:`~normscope.monitor.callback.MonitorCallback`.

    Raises:
        MissingExtra: Lightning is not installed.
    """

    def __init__(self, every: int = 100, *, warn: str = "warning", **options: Any) -> None:
        if _MISSING:
            raise MissingExtra("lightning", "lightning", "NormscopeCallback")
        super().__init__(every, warn=warn, **options)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(pl_module, list(trainer.optimizers))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.monitor is not None:
            self.monitor.batch(batch)  # training_step calls parts of the module, and seldom the module

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.end()

    def warn(self, text: str) -> None:
        rank_zero_warn(text)
