"""Two models on inputs that neither has seen: how far outputs moved, and whether it got worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.doctor.nested import detached
from normscope.doctor.refusals import unwrap
from normscope.doctor.session import Session
from normscope.errors import BadInput, told
from normscope.transforms.chosen import copied
from normscope.transforms.forwards import forward
from normscope.transforms.loader import Loader

Metric = Callable[[Any], float]


@dataclass(frozen=True)
class HeldOut:
    """Outputs in eval, before and after."""

    samples: int
    moved: float
    """root mean square of the difference of outputs, in units of that of the outputs before"""
    same_class: float | None = None
    """share of samples whose largest output is the same; None where outputs are not (samples, classes)"""
    entropy_before: float | None = None
    """mean over samples of the entropy of softmax(outputs), in nats"""
    entropy_after: float | None = None
    metric_before: float | None = None
    metric_after: float | None = None

    @property
    def worse(self) -> bool | None:
        """Whether the metric fell; None without a metric: agreement and entropy do not tell better from worse."""
        if self.metric_before is None or self.metric_after is None:
            return None
        return not self.metric_after >= self.metric_before

    def __str__(self) -> str:
        words = [f"outputs moved by {self.moved:.2g} of their size"] if self.samples else []
        if self.same_class is not None:
            words.append(f"{self.same_class:.1%} of {self.samples} keep their class")
            words.append(f"entropy {self.entropy_before:.3f} -> {self.entropy_after:.3f} nats")
        if self.worse is None:
            words.append("whether that is better or worse only a metric can tell")
        else:
            kept = self.metric_after == self.metric_before
            verdict = "WORSE" if self.worse else "unchanged" if kept else "better"
            words.append(f"metric {self.metric_before:.4g} -> {self.metric_after:.4g}: {verdict}")
        if self.worse:
            words.append("keep the statistics that were there")
        return "held out: " + "; ".join(words)


def compared(before: nn.Module, after: nn.Module, loader: Loader | None, metric: Metric | None) -> HeldOut:
    """Both in eval, on held-out inputs, by a metric, or both.

    Raises:
        BadInput: the metric fails or is no number.
        ModelError: a model raised on a batch.
    """
    table = _Sums()
    if loader is not None:
        with Session(before) as one, Session(after) as two:
            for args, kwargs in loader.calls():
                old, new = (forward(each, args, kwargs, loader.batches, mode="eval") for each in (one, two))
                table.add(old, new)
    worth = [None if metric is None else _worth(metric, model) for model in (before, after)]
    return table.result(0 if loader is None else loader.samples, worth[0], worth[1])


class _Sums:
    def __init__(self) -> None:
        self._apart = self._size = self._same = self._rows = 0.0
        self._entropy = [0.0, 0.0]

    def add(self, before: Any, after: Any) -> None:
        one, two = ([t.double() for t in detached(out) if t.is_floating_point()] for out in (before, after))
        for a, b in zip(one, two, strict=True):
            self._apart += float((a - b).square().sum())
            self._size += float(a.square().sum())
        if one and one[0].ndim == 2 and one[0].shape[1] > 1:
            self._rows += len(one[0])
            self._same += int((one[0].argmax(1) == two[0].argmax(1)).sum())
            for i, logits in enumerate((one[0], two[0])):
                self._entropy[i] += _entropy(logits)

    def result(self, samples: int, before: float | None, after: float | None) -> HeldOut:
        moved = (self._apart / self._size) ** 0.5 if self._size else 0.0
        if not self._rows:
            return HeldOut(samples, moved, metric_before=before, metric_after=after)
        entropy, later = (total / self._rows for total in self._entropy)
        return HeldOut(samples, moved, self._same / self._rows, entropy, later, before, after)


def _entropy(logits: Tensor) -> float:
    logs = logits.log_softmax(1)
    return float(-(logs.exp() * logs).sum())


def _worth(metric: Metric, model: nn.Module) -> float:
    subject = copied(unwrap(model), "recalibrate").eval()
    try:
        with torch.no_grad():
            return float(metric(subject))
    except Exception as error:
        raise BadInput(
            f"the metric, which takes a model and returns a number, failed: {told(error)}"
        ) from error
