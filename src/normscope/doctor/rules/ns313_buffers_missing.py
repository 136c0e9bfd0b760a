"""buffers-missing: a checkpoint without the running statistics of its norms, or with norm names that do not match.

## What it does
Compares the names of a checkpoint (`state=`, or what `--weights` loaded) with those of the model's norms:

- a norm whose weight or bias is there and whose running mean or variance is not: an error where eval mode would use the
  initial ones (mean 0, variance 1), info where the model has others;
- a norm of which gain or bias is missing, or everything: a warning where the checkpoint holds norm names that the model
  does not know (the two are named differently), else info (a part that is new here);
- names of running statistics or of a norm's parameters that the model has no place for: a warning;
- every name with the prefix of a wrapper (`module.`, `_orig_mod.`), and none of the values in a model that looks as
  new: an error, since nothing was loaded.

A checkpoint without its code (`check_state`) is its own witness: a norm with one statistic or a counter alone, or
without statistics where another block of its stack has them, is an error; one that is only named batch norm a warning.

A tensor that the checkpoint has under another name with the same values counts as there, and so does a shared norm that
was saved under one of its names. Counters are NS303's.

## Why it matters
`load_state_dict(..., strict=False)` says nothing. A checkpoint that was saved from the parameters alone (an average of
weights, an optimizer's copy, a conversion) puts the trained gains on statistics that were never measured: training goes
on healthily, eval is far off.

## Known problems
Whether a part that the checkpoint does not know was meant to be new cannot be seen.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
# parameters without buffers
state = dict(model.named_parameters())
report = normscope.check(model, state=state)
print(report)
```

## Fix
Save `model.state_dict()`, not the parameters; load with `strict=True` and read what it says. Lost statistics are
measured again by some hundred training batches in train mode, without an optimizer step.

## References
- The documentation of `torch.nn.Module.load_state_dict` on `strict`.
- Izmailov et al. 2018, Averaging Weights Leads to Wider Optima and Better Generalization, section 3.2: batch norm
  statistics must be computed anew for averaged weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from normscope.doctor.history import looks_trained, statistics_at_start
from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.stored_norms import NAMED
from normscope.doctor.wording import fold, listed, plural

if TYPE_CHECKING:
    from normscope.doctor.checkpoint import Comparison, Lacking
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

RUNNING = ("running_mean", "running_var")


@rule("NS313", "buffers-missing", kinds="C")
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    from normscope.doctor.checkpoint import compare  # which needs torch, and pages are read without it

    if subject.lacking is not None:
        yield from _incomplete(subject, subject.lacking)
        return
    if subject.state is None:
        yield NotRun("NS313", "needs the checkpoint: pass state= (on the command line --weights FILE)")
        return
    found = compare(subject.model, subject.sites, subject.state)
    if found.prefix and found.loaded is False and not looks_trained(subject):
        yield _wrapped(found)
    findings = [_finding(lacking, found) for lacking in found.lacking]
    for severity in ("error", "warning", "info"):
        yield from fold(finding for finding in findings if finding.severity == severity)
    if found.strangers:
        yield _strangers(found)


def _incomplete(subject: Subject, lacking: Mapping[str, tuple[tuple[str, ...], str]]) -> Iterator[Finding]:
    """A checkpoint against itself: it is the only witness of what it should hold."""
    others = sum(site.has_running_state for site in subject.sites)
    findings = []
    for path, (missing, witness) in lacking.items():
        by_name = witness == NAMED
        doubt = " A group or layer norm under such a name has none." if by_name else ""
        findings.append(
            Finding(
                code="NS313",
                site=path,
                severity="warning" if by_name else "error",
                message=f"the checkpoint holds this norm without {listed(missing)}, and {witness}.{doubt}",
                evidence={"missing": list(missing), "witness": witness, "norms_with_statistics": others},
                fix="save model.state_dict() rather than the parameters; or measure the statistics again on training "
                "data",
                mode="eval",
            )
        )
    for severity in ("error", "warning"):
        yield from fold(finding for finding in findings if finding.severity == severity)


def _wrapped(found: Comparison) -> Finding:
    return Finding(
        code="NS313",
        site="",
        severity="error",
        message=f"the names of checkpoint and model differ by the prefix {found.prefix!r}, and no value of the "
        "checkpoint is in the model: it was not loaded.",
        evidence={"prefix": found.prefix},
        fix="take the prefix off (or load into the wrapped model), and load with strict=True",
    )


def _finding(lacking: Lacking, found: Comparison) -> Finding:
    site = lacking.site
    statistics = [name for name in lacking.names if name in RUNNING]
    parameters = [name for name in lacking.names if name not in RUNNING]
    initial = statistics_at_start(site) if statistics else all(_one_number(site, name) for name in parameters)
    if statistics and lacking.held and initial and site.mode_eval in ("running", "frozen"):
        severity = "error"
    elif parameters and found.strangers and initial:
        severity = "warning"
    else:
        severity = "info"
    there = (
        f"holds {listed(lacking.held)} of this norm, but not"
        if lacking.held
        else "holds nothing of this norm:"
    )
    state = "they are what a new norm has" if initial else "they came from elsewhere"
    return Finding(
        code="NS313",
        site=site.name,
        severity=severity,
        message=f"the checkpoint {there} {listed(lacking.names, 4)}; in the model {state}.",
        evidence={"missing": list(lacking.names), "held": list(lacking.held), "initial": initial},
        fix="save and load model.state_dict() with strict=True"
        + ("; or measure the statistics again on training data" if statistics else ""),
        mode="eval" if statistics else "",
    )


def _one_number(site: Site, name: str) -> bool:
    values = site.array(name)
    return values is None or bool((values == values.flat[0]).all())


def _strangers(found: Comparison) -> Finding:
    return Finding(
        code="NS313",
        site="",
        severity="warning",
        message=f"the checkpoint holds {plural(len(found.strangers), 'name')} of norms that the model does not have: "
        f"{listed(found.strangers)}.",
        evidence={"names": list(found.strangers[:16]), "count": len(found.strangers)},
        fix="build the model as it was when the checkpoint was saved, or rename; then load with strict=True",
    )
