"""Sites that normalize by the batch in eval mode though they hold running statistics, and what that does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from normscope.doctor.wording import number

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject


def by_batch_in_eval(site: Site) -> bool:
    """It was seen to take statistics over samples in eval mode, and running statistics lie unused beside it."""
    taken = any(call.mode == "batch" for call in site.calls) or (site.kind, site.mode_eval) == (
        "node",
        "batch",
    )
    return (
        taken and site.has_running_state and site.spec is not None and site.spec.properties().couples_samples
    )


def effect_in_eval(subject: Subject, site: Site) -> tuple[dict[str, Any], str]:
    """What the companions of a sample do to the site's output in eval: as evidence, and in words; both may be empty."""
    measured = subject.measured.get("companions")
    coupling = None if measured is None else measured.eval.get(site.name)
    # Where companions changed the input already, the change is not this site's own.
    if coupling is None or not coupling.responsible or not math.isfinite(coupling.strength):
        return {}, ""
    told = f"; other samples of the batch change its output by {number(coupling.strength)} of its spread over samples"
    return {"strength": coupling.strength}, told
