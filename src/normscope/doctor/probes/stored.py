"""``stored``: the variances a model stores, against eps. Needs no data."""

from __future__ import annotations

from typing import ClassVar

from normscope.doctor.probes import Probe
from normscope.doctor.probes.statistics import SetStatistics, of_stored
from normscope.doctor.sets import working_eps
from normscope.doctor.subject import Subject


class Stored(Probe):
    """Measurement: site name -> the stored variances as statistic sets."""

    name: ClassVar[str] = "stored"

    def finish(self, subject: Subject) -> dict[str, SetStatistics]:
        found = {}
        for site in subject.known():
            variance = site.array("running_var")
            if (
                variance is None
                or "eps" in site.unknown
                or site.spec is None
                or site.spec.scale not in ("std", "rms", "l2")
            ):
                continue
            eps = working_eps(site.spec, site.tensors["running_var"].dtype)
            stored = of_stored(
                site.spec, variance.ravel(), eps, run="", mode=site.mode_eval, shape=variance.shape
            )
            if stored is not None:
                found[site.name] = stored
        return found
