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

A norm that is not identified, by the batch in training and by stored statistics in evaluation, is judged by what it
does: a copy is trained on your batch until its stored statistics stay, by whatever rule they move, and evaluation of
that batch must give what training gives, but for n / (n - 1) in the variance. A warning tells of another output (two
eps, a root stored where a variance is read), and of statistics that training never moves where more than the sampling
of your batch parts the modes (else info). Info, where training normalizes by the stored statistics and the gradient
holds them fixed.

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
The two modes of a norm written inside a larger forward are compared by the module around it, not where another norm
there mixes parts of a batch. Statistics that do not settle on a repeated batch, or fewer than 4 samples, are not
judged.

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

from normscope.doctor.deviations import PLACES, UNBIASED
from normscope.doctor.deviations import deviations as named_deviations
from normscope.doctor.modes_apart import modes_apart
from normscope.doctor.named import meant
from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.stated import other_eps
from normscope.doctor.wording import eps_text, label, number, plural

if TYPE_CHECKING:
    from normscope.doctor.probes.named_norm import Beside
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

MATTERS = 0.01
HALF = ("float16", "bfloat16")


@rule("NS106", "custom-norm-deviates", kinds="D", needs=("data", "named_norm"), uses=("settled",))
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    for site in subject.sites:
        if site.kind not in ("hand-written", "inlined"):
            continue
        if site.spec is None:
            settled = subject.measured.get("settled", {}).get(site.name)
            apart = None if settled is None else modes_apart(site, settled, subject.synthetic)
            yield apart or NotRun("NS106", site.reason, site.name)
            continue
        named = meant(site, site.spec)
        half = next((call.dtype for call in site.calls if call.dtype in HALF), "")
        deviations = [] if named is None else list(named_deviations(site, site.spec, named[1], half))
        deviations += _always(site, half)
        if deviations:
            seen = subject.measured["named_norm"].get(site.name)
            yield _finding(site, deviations, None if named is None else named[0], seen)


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
