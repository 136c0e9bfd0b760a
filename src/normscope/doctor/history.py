"""What a site's state tells about its past: how often it was updated, and whether it was trained at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject


def updates(site: Site) -> int | None:
    """How often the running statistics were updated, by their own counter; None without one."""
    counter = site.array("num_batches_tracked")
    return None if counter is None or counter.size != 1 else int(counter.item())


def statistics_at_start(site: Site) -> bool:
    """Running mean exactly 0 and running variance exactly 1 in every channel: the values they are born with."""
    mean, var = site.array("running_mean"), site.array("running_var")
    if mean is None and var is None:
        return False
    return (mean is None or not mean.any()) and (var is None or bool((var == 1).all()))


def affine_at_start(site: Site) -> bool | None:
    """Gain and bias as initialized: one same gain in all channels, whatever its value, and no bias.

    None where the site has neither. A single channel's gain is taken as initialized where it is 0 or 1.
    """
    weight, bias = site.array("weight"), site.array("bias")
    if weight is None and bias is None:
        return None
    if weight is None or weight.size == 0:
        same = True
    else:
        first = float(weight.flat[0])
        same = first in (0.0, 1.0) if weight.size == 1 else bool((weight == first).all())
    return same and (bias is None or not bias.any())


def looks_trained(subject: Subject) -> bool:
    """Some norm of the model has left its initialization, in its gain and bias or in its statistics."""
    return any(
        affine_at_start(site) is False or (site.has_running_state and not statistics_at_start(site))
        for site in subject.sites
    )
