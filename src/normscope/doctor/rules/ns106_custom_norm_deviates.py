"""custom-norm-deviates: a norm written by hand is not what its class name says.

## What it does
A norm that is a module of its own is identified by probing a copy of it, and compared with the norm of its name on
your data. Reported are: an unbiased variance, eps outside the root or as a floor, a layer norm that subtracts no mean
or an RMS norm that does, a sum of squares where the name says their mean, statistics that mix samples under the name
of a norm that does not, a layer norm over positions (for each feature apart, or together with the features of a
sequence), an eps that the module holds while the function has none or another, statistics computed in half precision,
a weight applied after casting back to it where the name is no RMS norm, and a gradient that is not a number where a
set is constant. Info; warning from an output that differs by 0.01 standard deviations on your data, unless the
variance is merely unbiased over a set of fixed size; error where it makes numbers into NaN there, or the gradient of
a constant set that occurs.

## Why it matters
Code reviews read the name. Weights trained under one convention are loaded under the other when the hand-written
class is replaced, by a fused kernel or in a port, and the model is off by just that much. A root of zero that is
differentiated poisons every weight on the first padded sequence.

## Known problems
A class whose name says nothing (`Norm`) is only judged for lost eps, half precision and gradients. An unbiased variance
is a constant factor, which the weight absorbs in training: it matters when weights move between the two. Over channels
first and over whole images a layer norm is taken as meant. An eps is looked for as `eps`, `epsilon` or
`variance_epsilon`, and a square or a multiple by the size of a set passes for it. A sum of squares passes where weight
or factor make up for the size of the sets; `F.normalize` in a module is a site of its own, and is not judged here.

## Example
```python
import torch, normscope

class LayerNorm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.bias = torch.nn.Parameter(torch.zeros(size))

    def forward(self, x):
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)  # unbiased
        return self.weight * (x - mean) / (std + 1e-6) + self.bias  # outside the root

model = torch.nn.Sequential(torch.nn.Linear(16, 16), LayerNorm(16))
report = normscope.check(model, torch.randn(8, 16))
print(report)
```

## Fix
Where nothing was trained yet, use the layer of torch.nn or normscope.nn. Else say in the class what it computes, or
convert the weights with it: `normscope.compare(old, new)` tells by which factor. Where eps stands outside the root,
take the root of variance plus eps.

## References
- Ba, Kiros and Hinton 2016, Layer Normalization (the biased variance).
- Zhang and Sennrich 2019, Root Mean Square Layer Normalization.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.named import meant, of_mean, set_size
from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.stated import other_eps
from normscope.doctor.wording import eps_text, label, number, plural

if TYPE_CHECKING:
    from normscope.doctor.probes.named_norm import Beside
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject
    from normscope.spec import NormSpec

MATTERS = 0.01
UNBIASED = "its variance is unbiased"
HALF = ("float16", "bfloat16")
PLACES = {
    "std": "eps {eps} stands outside the root, sqrt(v) + eps",
    "max": "eps {eps} is a floor, max(sqrt(v), eps)",
    "max_variance": "eps {eps} is a floor under the root, sqrt(max(v, eps))",
}


@rule("NS106", "custom-norm-deviates", kinds="D", needs=("data", "named_norm"))
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    for site in subject.sites:
        if site.kind not in ("hand-written", "inlined"):
            continue
        if site.spec is None:
            yield NotRun("NS106", site.reason, site.name)
            continue
        named = meant(site, site.spec)
        half = next((call.dtype for call in site.calls if call.dtype in HALF), "")
        deviations = [] if named is None else list(_deviations(site, site.spec, named[1], half))
        deviations += _always(site, half)
        if deviations:
            seen = subject.measured["named_norm"].get(site.name)
            yield _finding(site, deviations, None if named is None else named[0], seen)


def _deviations(site: Site, spec: NormSpec, named: NormSpec, half: str) -> Iterator[str]:
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


def _factor(site: Site, deviations: list[str]) -> bool:
    """The variance is unbiased and nothing else, over sets whose size the weight fixes: a constant factor."""
    spec = site.spec
    assert spec is not None
    left, _, right = spec.stats.partition("->")
    fixed = set((spec.weight or "").split()) | set(right.split())
    return len(deviations) == 1 and deviations[0].startswith(UNBIASED) and set(left.split()) <= fixed


def _always(site: Site, half: str) -> Iterator[str]:
    """What no name excuses."""
    spec = site.spec
    assert spec is not None
    held = other_eps(site, spec)
    if held is not None:
        how = "another" if spec.eps else "lost"
        yield f"its eps is {how}: it holds {eps_text(held)} and computes as with {eps_text(spec.eps)}"
    if half and spec.cast.compute in (*HALF, "input"):
        yield f"its statistics are computed in {half}"
    if _bad_gradient(site):
        yield "the gradient of a constant set is not a number"


def _bad_gradient(site: Site) -> bool:
    found = site.identified.evidence if site.identified is not None else ()
    return any(
        name.startswith("gradient not finite at") and value != 0
        for evidence in found
        for name, value in evidence.numbers.items()
    )


def _finding(site: Site, deviations: list[str], words: str | None, seen: Beside | None) -> Finding:
    name = site.type_name.rpartition(".")[2]
    said = "; ".join(deviations)
    message = (
        f"{name} at {label(site)} is no {words} as its name says: {said}."
        if words is not None
        else f"{name} at {label(site)}: {said}."
    )
    evidence: dict[str, object] = {"deviations": deviations, "spec": str(site.spec)}
    severity = "info"
    if seen is not None:
        if words is not None or seen.difference:
            where = f" (at {seen.where})" if seen.where else ""
            message += (
                f" On your data its normalized output differs from that of {words or 'one with the eps it holds'} by "
                f"up to {number(seen.difference)} standard deviations{where}."
            )
            evidence |= {"difference": seen.difference, "typical": seen.typical, "where": seen.where}
        evidence |= {"sets": seen.sets, "set_size": seen.set_size, "constant_sets": seen.constant}
        severity = "warning" if seen.difference >= MATTERS and not _factor(site, deviations) else "info"
        if seen.broken or (seen.constant and _bad_gradient(site)):
            severity = "error"
            message += f" It happens here: {plural(seen.constant, 'set')} of one call without spread."
    if _factor(site, deviations):
        message += " That is one factor for all, which a weight trained with it has absorbed."
    return Finding("NS106", site.name, message, severity, evidence, fix=_fix(site, deviations))


def _fix(site: Site, deviations: list[str]) -> str:
    if _factor(site, deviations):
        return (
            "Nothing where the weights stay here. Before they move to or from the layer of that name, convert them as "
            "normscope.compare(old, new) says; in a new model take the biased variance (correction=0)."
        )
    fix = (
        "Use the layer of torch.nn or normscope.nn, with weights converted as normscope.compare(old, new) says; or "
        "name the class after what it computes."
    )
    outside = getattr(site.spec, "eps_at", "") in PLACES or _bad_gradient(site)
    fix += " Take the root of variance plus eps." if outside else ""
    eps = site.spec is not None and other_eps(site, site.spec) is not None
    return f"{fix} Let one eps be both what the module holds and what its forward uses." if eps else fix
