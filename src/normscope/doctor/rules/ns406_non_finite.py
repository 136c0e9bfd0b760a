"""non-finite: NaN or infinity from finite inputs, and the first place that meets it.

## What it does
Runs the batch in eval mode and with batch statistics, and looks at every norm's input and output and at what the
model returns. One finding names the first site, in the order of execution, that receives or makes a number that is
not finite, or the model itself where no norm is reached; the sites behind it are listed under it. Parameters that are
not finite are named, with or without data.

- an error where it happens on your data, or where a parameter is NaN or infinite and there is no data to try it on;
- a warning where a parameter is not finite and nothing on this batch shows it, or where the inputs were random.

## Why it matters
One NaN in one weight reaches every output two layers later. The loss is NaN from then on, or, in inference, a sample
is lost without an exception: comparisons with NaN are false, and argmax answers with some class.

## Known problems
-inf in the model's output is not told: masked scores are made of it. Buffers are not asked, since attention masks
hold -inf; running statistics are (NS301). What NS301, NS404 and NS104 explain (invalid running statistics, overflow,
an eps that is not positive) is left to them. Norms whose specification is unknown are not watched.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(4, 8), torch.nn.ReLU()
)
with torch.no_grad():
    model[0].weight[2, 0, 1, 1] = float("nan")  # one step with a NaN gradient is enough
report = normscope.check(model, torch.randn(8, 3, 16, 16))
print(report)
```

## Fix
Take the parameter from the last good checkpoint, and skip steps whose gradient is not finite. Without such a
parameter look at what stands before the first place: a division by zero, the logarithm or root of a number that is
not positive, an exponential, a cast to half precision.

## References
- IEEE 754-2019, section 6: infinities and NaN, and how they spread.
- Micikevicius et al. 2018, Mixed Precision Training, section 3.2: steps with overflow are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, listed, plural

if TYPE_CHECKING:
    from normscope.doctor.probes.finite import Bad, Finite, Place
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

INF = float("inf")
RESTORE = "take {} from the last good checkpoint, and skip steps whose gradient is not finite"
SEARCH = (
    "a division by 0, a logarithm or root of what is not positive, an exponential, a cast to half precision"
)


@rule("NS406", "non-finite", kinds="CD", needs=("finite_parameters",), uses=("finite", "ranges", "precision"))
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    parameters: dict[str, Bad] = subject.measured["finite_parameters"]
    runs: dict[str, Finite] = subject.measured.get("finite", {})
    sites = {site.name: site for site in subject.sites}
    met = {run: seen for run, seen in runs.items() if seen.places or seen.output is not None}
    for run, seen in met.items():
        places = sorted(seen.places.items(), key=lambda item: item[1].order)
        other = _told_by(subject, sites[places[0][0]], places[0][1]) if places else ""
        if other:
            yield NotRun("NS406", f"{other} tells why the output of this norm is not finite", places[0][0])
            continue
        mode = "" if 1 < len(runs) == len(met) else "train" if run == "batch" else "eval"
        yield _first(subject, sites, places, seen, parameters, mode)
        return
    if not met:
        yield from fold(_silent(subject, name, bad, bool(runs)) for name, bad in parameters.items())


def _told_by(subject: Subject, site: Site, place: Place) -> str:
    """The rule that explains a site which makes the first such number itself; "" where none does."""
    if place.received is not None:
        return ""
    eps = site.spec.eps if site.spec is not None else None
    if place.mode in ("running", "frozen"):
        mean, var = site.array("running_mean"), site.array("running_var")
        # Comparisons with NaN are false.
        sound = (mean is None or bool((abs(mean) < INF).all())) and (
            var is None or bool(((var + (eps or 0.0) > 0) & (var < INF)).all())
        )
        if not sound:
            return "NS301"
    elif eps is not None and eps <= 0:
        return "NS104"
    ranges = subject.measured.get("ranges", {}).get(site.name)
    precision = subject.measured.get("precision", {}).get(site.name)
    if subject.synthetic or ranges is None or not ranges.broken:
        return ""
    beyond = precision is not None and precision.beyond_output
    return "NS404" if ranges.squares > ranges.working_max or beyond else ""


def _first(
    subject: Subject,
    sites: dict[str, Site],
    places: list[tuple[str, Place]],
    seen: Finite,
    parameters: dict[str, Bad],
    mode: str,
) -> Finding:
    found = [_at(name, place, mode) for name, place in places]
    if found:
        head, where = found[0], _where(sites[found[0].site], places[0][1])
    else:
        assert seen.output is not None
        text = f"every norm is finite and the model's output is not: {_text(seen.output)}."
        head, where = (
            Finding("NS406", "", text, "error", _evidence(seen.output), mode=mode),
            "behind the last norm",
        )
    message, fix = head.message, f"look {where} for {SEARCH}"
    if parameters:
        message += (
            f" Among the parameters, {listed([f'{p} holds {_text(bad)}' for p, bad in parameters.items()])}."
        )
        fix = RESTORE.format(listed(list(parameters)))
    return replace(
        head,
        message=message,
        severity="warning" if subject.synthetic and not parameters else "error",
        evidence={**head.evidence, "sites": len(found), "parameters": list(parameters)},
        fix=fix,
        also=tuple(found[1:]),
    )


def _at(name: str, place: Place, mode: str) -> Finding:
    bad = place.received or place.made
    assert bad is not None
    said = "receives" if place.received is not None else "its input is finite, but it makes"
    evidence = {"received": place.received is not None, "call": place.call, **_evidence(bad)}
    return Finding("NS406", name, f"{said} {_text(bad)}.", "error", evidence, mode=mode)


def _where(site: Site, place: Place) -> str:
    if place.received is None:
        return "in this norm"
    calls = site.calls[place.call : place.call + 1]
    makers = [f"{maker.op} ({maker.path or 'the model'})" for call in calls for maker in call.fed_by]
    return f"in {listed(makers)} and behind it" if makers else "before this norm"


def _silent(subject: Subject, name: str, bad: Bad, tried: bool) -> Finding:
    """A parameter that no output shows: there was no data, or nothing read it."""
    owners = {f"{s.path}.{n}".lstrip("."): s.name for s in subject.sites for n in ("weight", "bias")}
    return Finding(
        code="NS406",
        site=owners.get(name, ""),
        message=f"the parameter {name} holds {_text(bad)}{'; no output on this batch shows it' if tried else ''}.",
        severity="warning" if tried else "error",
        evidence={"parameter": name, **_evidence(bad)},
        fix=RESTORE.format(name),
    )


def _text(bad: Bad) -> str:
    kinds = [f"{what} in {count}" for what, count in (("NaN", bad.nan), ("infinity", bad.infinite)) if count]
    return f"{' and '.join(kinds)} of {plural(bad.size, 'number')}"


def _evidence(bad: Bad) -> dict[str, int]:
    return {"nan": bad.nan, "infinite": bad.infinite, "elements": bad.size}
