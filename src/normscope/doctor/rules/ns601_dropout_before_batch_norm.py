"""dropout-before-batch-norm: dropout shifts the variance that a later batch norm stores.

## What it does
Dropout keeps the mean and adds variance in training; in eval the added part is gone, but the batch norm still
divides by the variance it stored with it. Finds batch norms with a dropout directly before them, or before
the convolution or linear layer that feeds them, and predicts the shift. Directly before, with stored mean m
and variance R, the variance in eval is

    v = (1 - p) R - p m^2

per channel. Behind a layer of weights it is about (1 - p) R where the layer's inputs are uncorrelated and
centered. A batch of data decides: where NS304's measurement shows less variance than stored, beyond sampling
error, and dropout explains it, it is a warning. That is where it lies at the prediction, within the sampling
error of a variance (behind a layer of weights, between 1 and the prediction), and the prediction is at least half
of the change. Otherwise something else changes the variance too, and this is info. Without that measurement, a
predicted change by a third or more directly before a trained norm is a warning, anything else info.

## Why it matters
In eval every such layer passes activations that are too small by sqrt(v / R), layer upon layer. Validation is
worse than training for a reason that looks like overfitting.

## Known problems
With correlated, positive inputs (after a ReLU) the shift behind a weight layer is smaller than predicted.
Before a layer of weights, a dropout is seen only where another norm stands before it. Layer, group and
instance norm store nothing: silent.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(
    torch.nn.Linear(8, 16),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.5),
    torch.nn.BatchNorm1d(16),
)
x = torch.randn(64, 8)
for _ in range(100):
    model(x)
report = normscope.check(model, x)
print(report)
```

## Fix
Put dropout behind the last batch norm, drop it, or recompute the statistics with dropout off (norms in train
mode, the rest in eval). Layer norm has no such shift.

## References
- Li et al. 2019, Understanding the Disharmony between Dropout and Batch Normalization by Variance Shift,
  section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from normscope.doctor.history import statistics_at_start
from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, number

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

THIRD = 2 / 3
CLOSE = math.log(1.25)
"""a median over channels of predictions and one of measurements differ by so much even without sampling error"""


@rule("NS601", "dropout-before-batch-norm", kinds="G", stateful=True, needs=("data",))
def check(subject: Subject) -> Iterator[Finding]:
    behind_norms = _dropped_feeds(subject)
    found = []
    for site in subject.known():
        if not site.has_running_state or site.mode_train != "batch" or site.mode_eval != "running":
            continue
        direct, through, where = 0.0, 0.0, ""
        for neighbour in (n for call in site.calls for n in call.fed_by):
            direct = max(direct, neighbour.dropout)
            if neighbour.kind in ("conv", "linear"):
                rate = behind_norms.get((neighbour.path, neighbour.op), 0.0)
                through, where = max((through, where), (rate, neighbour.path))
        if direct > 0:
            found.append(_finding(subject, site, direct, ""))
        elif through > 0:
            found.append(_finding(subject, site, through, where))
    yield from fold(found)


def _dropped_feeds(subject: Subject) -> dict[tuple[str, str], float]:
    """Layers of weights that a dropout feeds, with its drop probability: (path, operation) -> p."""
    return {
        (n.path, n.op): n.dropout
        for site in subject.sites
        for call in site.calls
        for n in call.feeds
        if n.dropout > 0
    }


def _finding(subject: Subject, site: Site, rate: float, layer: str) -> Finding:
    from normscope.doctor.significance import (
        SHARE,
        matters,
    )  # which needs NumPy, and pages are read without it

    predicted = 1 - rate if layer else _predicted(site, rate)
    measured = subject.measured.get("gap", {}).get(site.name)
    difference: Any = None if measured is None else measured.gap
    place = f"before {layer}, which feeds this norm" if layer else "directly before this norm"
    evidence: dict[str, Any] = {"dropout": rate, "predicted_variance_ratio": predicted}
    if layer:
        evidence["through"] = layer
    if difference is None:
        severe = not layer and not statistics_at_start(site) and predicted <= THIRD
        told = "not measured here"
    else:
        ratio = math.exp(difference.log_var)
        evidence["measured_variance_ratio"] = ratio
        # within sampling error, where this is no more than SHARE of the channels
        evidence["channels_beyond_sampling_error"] = difference.share_var
        variance_alone = replace(difference, share_mean=0.0, shift=0.0)
        explained = _explains(predicted, ratio, measured.samples, bool(layer))
        severe = explained and matters(variance_alone)[1] and not subject.inputs_dependent
        if severe:
            said = "confirmed"
        elif difference.share_var <= SHARE:
            said = "within sampling error"
        else:
            said = "not confirmed" if explained else "which dropout does not explain"
        told = f"measured on this batch: {number(ratio)}, {said}"
    return Finding(
        code="NS601",
        site=site.name,
        severity="warning" if severe else "info",
        message=f"dropout {number(rate)} stands {place}: in eval, without it, the variance is predicted to be "
        f"{number(predicted)} times the stored one ({told}).",
        evidence=evidence,
        fix="move dropout behind the last batch norm, or recompute the statistics with dropout off",
        mode="eval",
    )


def _explains(predicted: float, ratio: float, samples: int, at_most: bool) -> bool:
    """The measured variance ratio is the predicted one (with ``at_most``, up to it) within sampling error."""
    if not (0 < predicted < 1 and 0 < ratio < 1):
        return False
    expected, seen = -math.log(predicted), -math.log(ratio)
    error = max(CLOSE, 2 * math.sqrt(2 / (samples - 1)))  # of the log of a normal variance, twice
    below = 0.0 if at_most else expected - error
    return below <= seen <= min(expected + error, 2 * expected)


def _predicted(site: Site, rate: float) -> float:
    """Median over channels of eval variance over stored variance, for dropout directly before the norm."""
    import numpy as np

    mean, var = site.array("running_mean"), site.array("running_var")
    if mean is None or var is None or not np.any(var > 0):
        return 1 - rate
    live = var > 0
    return float(np.median(np.maximum((1 - rate) - rate * mean[live] ** 2 / var[live], 0.0)))
