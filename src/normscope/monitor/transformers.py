"""A callback for transformers' Trainer that monitors the norms of the model it trains."""

from __future__ import annotations

from typing import Any

from normscope.errors import MissingExtra
from normscope.monitor.callback import MonitorCallback

try:
    from transformers import TrainerCallback

    _MISSING = False
except ImportError:  # told when a callback is made: this file is also imported by what lists modules
    TrainerCallback = object
    _MISSING = True


class NormscopeCallback(MonitorCallback, TrainerCallback):
    """A :class:`normscope.Monitor` for the length of ``train``: ``Trainer(callbacks=[NormscopeCallback()])``.

    Findings are told as warnings as they appear. ``callback.report()`` is the report and ``callback.monitor`` the
    monitor. Arguments as for :class:`~normscope.monitor.callback.MonitorCallback`.

    Raises:
        MissingExtra: transformers is not installed.
    """

    def __init__(self, every: int = 100, *, warn: str = "warning", **options: Any) -> None:
        if _MISSING:
            raise MissingExtra("transformers", "transformers", "NormscopeCallback")
        super().__init__(every, warn=warn, **options)
        self._stepped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.begin(model)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The step is made and its gradients are still there."""
        self._step()
        self._stepped = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._stepped:  # older versions do not tell of the optimizer
            self._step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end()

    def _step(self) -> None:
        if self.monitor is not None:
            self.monitor.step()
