"""What is said of a norm that was not identified, by how its training and its evaluation compare.

A rule of moving statistics that nobody knows is no fault: only what evaluation makes of the settled state counts, and
of a state that no call moves, what it makes of the user's batch.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding
from normscope.doctor.wording import label, percent

if TYPE_CHECKING:
    from normscope.doctor.probes.settled import Settled
    from normscope.doctor.site import Site

MATTERS = 0.02
SAMPLING = 3.0
"""standard errors of a batch's mean that its sampling may explain"""
UNKNOWN = "hand-written; not identified: "
GAP = "modes_gap"
"""name of the evidence"""


def modes_apart(site: Site, seen: Settled, synthetic: bool) -> Finding | None:
    """The finding of NS106, None where nothing speaks against the site."""
    name = site.type_name.rpartition(".")[2]
    inside = f"The norm written inside the forward of {site.path or 'the model'}"
    where = f"{name} at {label(site)}" if site.kind == "hand-written" else inside
    why = site.reason.removeprefix(UNKNOWN) if site.reason.startswith(UNKNOWN) else ""
    why = f" {why[0].upper()}{why[1:]}." if why else ""
    evidence: dict[str, object] = {"samples": seen.samples, "gap_now": seen.before}
    sampling = SAMPLING / sqrt(seen.samples)
    gap = min(seen.gap, seen.alike)
    if not seen.moved:
        told = seen.before > sampling and not synthetic
        return Finding(
            "NS106",
            site.name,
            f"{where}: training normalizes by its batch, evaluation by stored statistics that no call in training "
            f"moves. On this batch the two outputs differ by {percent(seen.before)} of their size"
            + (f", where {seen.samples} samples explain {percent(sampling)} at most." if told else "."),
            "warning" if told else "info",
            {**evidence, GAP: seen.before, "sampling": sampling},
            fix="Move the stored statistics in training, under torch.no_grad(), before they are used in evaluation; "
            "where they are set by other means, set them from this data.",
        )
    if gap > max(MATTERS, 1.5 / (seen.samples - 1)):  # n / (n - 1) of a stored variance is no fault
        return Finding(
            "NS106",
            site.name,
            f"{where}: training and evaluation are two different functions. Trained on this batch until its stored "
            f"statistics stay, it gives another output in evaluation, by {percent(seen.gap)} of its size "
            f"({percent(seen.alike)} on samples that are all alike).{why}",
            "warning",
            {**evidence, GAP: seen.gap, "gap_alike": seen.alike},
            fix="Let both modes divide by the same function of the variance, with one eps at one place, and store what "
            "evaluation reads: the variance, not its root.",
        )
    if seen.constant:
        return Finding(
            "NS106",
            site.name,
            f"{where}: training normalizes by the stored statistics, which it moves, and the gradient holds them "
            f"fixed. A batch norm normalizes by the batch, and its gradient passes through mean and variance.",
            "info",
            evidence,
            fix="Where a batch norm is meant, normalize by the mean and variance of the batch in training, and let "
            "only the stored copies be moved under torch.no_grad().",
        )
    return None
