"""What a norm written by hand does other than the norm of its name, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.named import of_mean, set_size
from normscope.doctor.wording import eps_text, number

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.spec import NormSpec

UNBIASED = "its variance is unbiased"
PLACES = {
    "std": "eps {eps} stands outside the root, sqrt(v) + eps",
    "max": "eps {eps} is a floor, max(sqrt(v), eps)",
    "max_variance": "eps {eps} is a floor under the root, sqrt(max(v, eps))",
}


def deviations(site: Site, spec: NormSpec, named: NormSpec, half: str) -> Iterator[str]:
    if spec.stats != named.stats:
        yield f"its statistics run over {_where(spec, named)} ({spec.stats})"
    if spec.center != named.center:
        yield "it subtracts the mean" if spec.center else "it does not subtract the mean"
    elif not spec.center and spec.scale == "std":
        yield "it divides by the standard deviation, about a mean that it does not subtract"
    if spec.scale == "l2" and named.scale != "l2":
        yield (
            f"it divides by the root of the sum of the {set_size(site, spec)} squares, not of their mean: its output "
            f"is {number(of_mean(site, spec))} of what its name says"
        )
    if spec.scale == "std" and spec.correction:
        yield f"{UNBIASED}, over n - {spec.correction:g}"
    if spec.eps_at in PLACES:
        yield PLACES[spec.eps_at].format(eps=eps_text(spec.eps))
    if half and named.center and spec.weight is not None and spec.cast.weight == "after":
        yield f"its weight is applied after casting back to {half}, as in Llama's RMS norm"


def _where(spec: NormSpec, named: NormSpec) -> str:
    if spec.properties().couples_samples:
        return "the samples"
    kept = set(spec.stats.partition("->")[2].split()) - set(named.stats.partition("->")[2].split())
    return "the positions, for each feature apart" if kept else "the positions too"
