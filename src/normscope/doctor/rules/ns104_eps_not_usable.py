"""eps-not-usable: eps is zero, negative, lost in the working dtype, or left to the dtype.

## What it does
Looks at the constant in each denominator, in the dtype that the arithmetic of that norm really uses.
PyTorch's own batch, layer, group and RMS norms compute half types in float32, so an eps of 1e-12 is safe
there even for float16 inputs; `F.normalize` and many hand-written norms apply eps in the dtype of the input,
where float16 has nothing between 0 and 6e-8.

| eps | severity |
|---|---|
| negative | error |
| 0, or rounded to 0 by the working dtype | error; info where the statistics are frozen and no variance is 0 |
| None (the dtype's machine epsilon) | info; warning where the norm ran in dtypes with different epsilons |

## Why it matters
A statistic set without spread (a dead channel, a padded position, a blank image) has variance 0. With eps 0
its output is 0/0, NaN, and from there the loss. A negative eps does the same at every small variance.
`eps=None` makes the function depend on the dtype: 1.2e-7 in float32, 2.2e-16 in float64.

## Known problems
Recent PyTorch refuses a negative eps in batch norm, and 0 in training, with an error; layer, group and RMS
norm accept both. Whether `eps=None` follows a half input or its float32 arithmetic differs between kernels
and versions; the value given is that of the arithmetic. A norm fed with data that never lacks spread works
with eps 0, until the day it does not.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8, eps=0.0))
report = normscope.check(model, torch.randn(8, 8))
print(report)
```

## Fix
Give eps a positive number that the working dtype can hold: 1e-5 is PyTorch's default, and in float16
arithmetic stay above 6e-8. Write `eps=` out for `nn.RMSNorm`, so that a change of dtype does not change the
function.

## References
- Ioffe and Szegedy 2015, Batch Normalization, algorithm 1: eps is added to the variance for numerical
  stability.
- Micikevicius et al. 2018, Mixed Precision Training, section 3: the range of float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import eps_text, fold, number, plural

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject
    from normscope.spec import NormSpec

MACHINE_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
LEAST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
"""smallest positive number, subnormal; half of it and less rounds to 0"""


@rule("NS104", "eps-not-usable", kinds="S")
def check(subject: Subject) -> Iterator[Finding]:
    dependent, lost = [], []
    for site in subject.sites:
        if site.kind == "module" and site.module is not None and site.spec is None:
            yield _invalid(site)
    for site in subject.known():
        spec = site.spec
        assert spec is not None
        dtypes = _working_dtypes(site, spec)
        if spec.eps is None:
            dependent.append(_dependent(site, dtypes))
        elif spec.eps < 0:
            yield _negative(site, spec.eps)
        elif spec.eps == 0:
            yield _zero(site, spec)
        else:
            lost += [_lost(site, spec.eps, d) for d in dtypes if spec.eps <= LEAST[d] / 2]
    yield from fold(lost)
    yield from fold(dependent)


def _working_dtypes(site: Site, spec: NormSpec) -> list[str]:
    """The dtypes in which this site's arithmetic runs, for the dtypes that it has met."""
    met = dict.fromkeys(call.dtype for call in site.calls) or [d for d in [site.dtype("weight")] if d]
    # F.normalize sums in float32, but compares the root with eps in the dtype of its input.
    compute = spec.cast.compute or ("input" if spec.eps_at == "max" else None)
    worked = {
        None: ["float32" if d in ("float16", "bfloat16") else d for d in met],
        "input": list(met),
    }.get(compute, [str(compute)])
    return [d for d in dict.fromkeys(worked) if d in LEAST]


def _dependent(site: Site, dtypes: list[str]) -> Finding:
    values = {d: MACHINE_EPS[d] for d in dtypes or ["float32"]}
    told = ", ".join(f"{number(v)} in {d}" for d, v in values.items())
    return Finding(
        code="NS104",
        site=site.name,
        severity="warning" if len(values) > 1 else "info",
        message=f"eps is None, so the dtype decides it: {told}.",
        evidence={f"eps_{d}": v for d, v in values.items()},
        fix=f"write the value out: eps={next(iter(values.values()))!r}",
    )


def _invalid(site: Site) -> Finding:
    """A torch norm whose eps or momentum is no number: no specification can hold it."""
    shown = {
        name: str(getattr(site.module, name)) for name in ("eps", "momentum") if hasattr(site.module, name)
    }
    return Finding(
        code="NS104",
        site=site.name,
        severity="error",
        message=f"it is built with {', '.join(f'{name} {value}' for name, value in shown.items())}: "
        "not a finite number, so neither is what it computes or stores.",
        evidence=shown,
        fix="build it with finite numbers; usual values are eps 1e-5 and momentum 0.1",
    )


def _negative(site: Site, eps: float) -> Finding:
    var = site.array("running_var")
    broken = 0 if var is None else int((~(var + eps > 0)).sum())
    effect = (
        f"; now {plural(broken, 'channel')} of {var.size} have none" if var is not None and broken else ""
    )
    return Finding(
        code="NS104",
        site=site.name,
        severity="error",
        message=f"eps is {eps_text(eps)}: a variance below {eps_text(abs(eps))} has no real denominator{effect}.",
        evidence={"eps": eps, "channels_without_denominator": broken},
        fix="set eps to a small positive number such as 1e-5",
    )


def _zero(site: Site, spec: NormSpec) -> Finding:
    var = site.array("running_var")
    frozen = site.mode_train == site.mode_eval == "frozen"
    if frozen and var is not None and var.size and var.min() > 0:
        return Finding(
            code="NS104",
            site=site.name,
            severity="info",
            message=f"eps is 0; the statistics are frozen and their smallest variance is {number(var.min())}, "
            "so nothing divides by 0.",
            evidence={"eps": 0.0, "smallest_variance": float(var.min())},
            fix="nothing, as long as these statistics stay",
        )
    spread = {"std": "without spread", "rms": "of zeros", "l2": "of zeros"}.get(spec.scale, "without spread")
    return Finding(
        code="NS104",
        site=site.name,
        severity="error",
        message=f"eps is 0: a statistic set {spread} gives 0/0 = NaN.",
        evidence={"eps": 0.0},
        fix="set eps to a small positive number such as 1e-5",
    )


def _lost(site: Site, eps: float, dtype: str) -> Finding:
    return Finding(
        code="NS104",
        site=site.name,
        severity="error",
        message=f"eps {eps_text(eps)} rounds to 0 in {dtype}, in which this norm computes "
        f"(its smallest positive number is {number(LEAST[dtype])}): a set of zeros gives 0/0 = NaN.",
        evidence={"eps": eps, "dtype": dtype, "smallest_positive": LEAST[dtype]},
        fix=f"compute this norm in float32, or take eps above {number(LEAST[dtype])}",
    )
