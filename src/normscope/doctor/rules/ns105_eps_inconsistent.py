"""eps-inconsistent: eps differs between like sites, or from the model's config.

## What it does
Groups norms of one type over the same axes, and compares their eps. Sites at the same place of a repeated
block (`blocks.*.norm1`) must agree: an outlier there is a warning. Different values at different places
(blocks at 1e-6, the final norm at the default 1e-5) are told as one info, since a model put together from two
sources has them rightly. Where stored variances show that the difference changes no gain by 1 %, the finding
is info. An eps that differs from the one in the model's own config is a warning, or info where most norms of
the model do not follow the config (some model code never reads that entry); an eps that differs from the `config.json`
beside the weights, where the model's own does not say so, is a warning. A layer norm at 1e-6 beside a
batch norm at 1e-5 is no inconsistency.

## Why it matters
A ported model keeps its weights and loses its eps: a constructor's default silently replaces the trained
value. Where variances are small against eps the gain changes by sqrt((v + eps1) / (v + eps2)), and nothing
fails.

## Known problems
If most sites are wrong, the right ones are called outliers: the message gives both values and their counts.
Without running variances (layer, group, RMS norm) the size of the effect is not known to this rule; NS401
measures it.

## Example
```python
import torch, normscope

block = lambda eps: torch.nn.Sequential(
    torch.nn.Linear(8, 8), torch.nn.LayerNorm(8, eps=eps)
)
# the default slipped in
model = torch.nn.Sequential(block(1e-6), block(1e-6), block(1e-5))
report = normscope.check(model, torch.randn(8, 8))
print(report)
```

## Fix
Pass one eps, from the config or the original implementation, to every constructor. Frameworks' defaults for
batch norm: PyTorch and Flax 1e-5, Keras and TensorFlow 1e-3; for layer norm: PyTorch 1e-5, Flax 1e-6, Keras
1e-3, BERT 1e-12, ViT 1e-6.

## References
- The documentation of `torch.nn.BatchNorm2d`, `torch.nn.LayerNorm`, `keras.layers.BatchNormalization`,
  `flax.linen.LayerNorm`.
- Devlin et al. 2019 (BERT) and Dosovitskiy et al. 2021 (ViT): their public code sets 1e-12 and 1e-6.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import eps_text, fold, listed, number, percent, plural

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

NEGLIGIBLE = 0.01
"""largest relative change of any gain that is called no effect"""


@rule("NS105", "eps-inconsistent", kinds="S")
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    like: dict[tuple[str, ...], list[Site]] = defaultdict(list)
    obeying, against_config = 0, []
    for site in subject.known():
        assert site.spec is not None
        if "eps" in site.unknown:
            continue
        if site.expected_eps is None:
            like[site.type_name, site.spec.stats, site.spec.scale, site.spec.eps_at].append(site)
        elif _same(site.spec.eps, site.expected_eps):
            obeying += 1
        else:
            against_config.append(site)
    # one number for all norms of a checkpoint, or code that was not given what its weights were trained with
    stated = any(site.kind == "stored" or site.expected_by_weights for site in against_config)
    severity = "warning" if stated or obeying >= len(against_config) else "info"
    yield from fold(_contradiction(site, severity) for site in against_config)
    for sites in like.values():
        yield from fold(_outliers(sites))
    if any("eps" in site.unknown for site in subject.known()):
        yield NotRun("NS105", "eps is not in the file: state it, eps=1e-5")


def _same(a: float | None, b: float | None) -> bool:
    # 0.0010000000474974513, a float32 that went through a file, is 1e-3.
    return a == b or (a is not None and b is not None and abs(a - b) <= 1e-6 * max(abs(a), abs(b)))


def _contradiction(site: Site, severity: str) -> Finding:
    assert site.spec is not None
    assert site.expected_eps is not None
    eps, expected = site.spec.eps, site.expected_eps
    whose = "the config of the weights" if site.expected_by_weights else "the model's config"
    unused = "" if severity == "warning" else " Most norms of this model do not follow it."
    return Finding(
        code="NS105",
        site=site.name,
        severity=_weighed(severity, site, expected),
        message=f"eps is {eps_text(eps)}, {whose} says {eps_text(expected)}.{unused}"
        f"{_effect_text(site, expected)}",
        evidence={"eps": eps, "expected_eps": expected, **_effect_evidence(site, expected)},
        fix=f"pass eps={eps_text(expected)} from the config to this norm's constructor",
    )


def _outliers(sites: list[Site]) -> Iterator[Finding]:
    values = Counter(site.spec.eps for site in sites if site.spec)
    usual, count = values.most_common(1)[0]
    others = [site for site in sites if site.spec and not _same(site.spec.eps, usual)]
    if not others or usual is None:
        return  # None is NS104's
    agreeing = [site for site in sites if site not in others]
    places = {_place(site) for site in agreeing}
    for site in others:
        assert site.spec is not None
        same_place = _place(site) in places and len(others) < len(agreeing)
        yield Finding(
            code="NS105",
            site=site.name,
            severity=_weighed("warning" if same_place else "info", site, usual),
            message=f"eps is {eps_text(site.spec.eps)}, while {plural(count, 'other ' + _short(site))} "
            f"{'has' if count == 1 else 'have'} {eps_text(usual)} ({listed([s.name for s in agreeing])})."
            f"{_effect_text(site, usual)}",
            evidence={
                "eps": site.spec.eps,
                "usual_eps": usual,
                "usual_sites": count,
                **_effect_evidence(site, usual),
            },
            fix=f"if the difference is not meant, pass eps={eps_text(usual)} here too",
        )


def _place(site: Site) -> str:
    return re.sub(r"\d+", "*", site.name)


def _short(site: Site) -> str:
    return site.type_name.rsplit(".", 1)[-1]


def _effect(site: Site, other: float) -> float | None:
    """Largest relative change of a gain between the site's eps and the other, on its own stored variances."""
    var = site.array("running_var")
    eps = site.spec.eps if site.spec else None
    if var is None or eps is None or site.spec is None or site.spec.eps_at != "variance" or var.size == 0:
        return None
    if not (var + min(eps, other) > 0).all():
        return None
    return float(abs(((var + other) / (var + eps)) ** 0.5 - 1).max())


def _weighed(severity: str, site: Site, other: float) -> str:
    effect = _effect(site, other)
    return "info" if effect is not None and effect < NEGLIGIBLE else severity


def _effect_text(site: Site, other: float) -> str:
    effect = _effect(site, other)
    if effect is None:
        return ""
    size = f"by up to {percent(effect)}" if effect < 1 else f"up to {number(1 + effect)} times"
    return f" On the stored variances this changes gains {size}."


def _effect_evidence(site: Site, other: float) -> dict[str, float]:
    effect = _effect(site, other)
    return {} if effect is None else {"largest_gain_change": effect}
