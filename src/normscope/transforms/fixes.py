"""Mechanical fixes of findings: one row of ``FIXES`` a rule.

==========  ===============================================================================  =====================
rule        change                                                                           outputs
==========  ===============================================================================  =====================
NS501       the bias goes into the norm's running mean, and away                             stay, checked
NS502       gains and biases move to parameter groups without weight decay                   stay (the optimizer)
NS308       momentum of the other convention becomes 1 - momentum                            stay, checked
NS104       eps None is written out; 0, negative and lost ones become 1e-5                   stay; change: unsafe
NS105       eps becomes that of the config, or of the like norms                             change: unsafe
==========  ===============================================================================  =====================

What would change outputs is refused unless asked for. A fix that does not fit (a bias that others use too) is left,
with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from normscope.doctor import arguments
from normscope.doctor.change import change, some
from normscope.doctor.nested import detached
from normscope.doctor.refusals import unwrap
from normscope.doctor.report import Finding, Report
from normscope.doctor.session import Session
from normscope.doctor.wording import clean_path, eps_text, number, unfold
from normscope.errors import BadInput
from normscope.transforms.agreement import compare
from normscope.transforms.report import Agreement, SiteChange, TransformReport

Model = TypeVar("Model", bound=nn.Module)
USUAL_EPS = 1e-5
"""PyTorch's default for batch, layer and group norm"""
EPS_NAMES = ("eps", "variance_epsilon", "epsilon")


@dataclass(frozen=True)
class Left:
    """A finding that was not fixed, and why."""

    reason: str


@dataclass(frozen=True)
class Change:
    """What to do for one finding, at one module path ("" for the model itself)."""

    path: str
    before: str
    after: str
    do: Callable[[], None]
    code: str
    """the same as code of the user's"""
    keeps: bool = True
    """outputs stay as they are"""
    stored: bool = False
    """it is in the state dict"""
    in_model: bool = True
    remark: str = ""
    """what is left to do"""


Plan = Callable[["_Case", Finding], "Change | Left"]


@dataclass(frozen=True)
class _Case:
    model: nn.Module
    modules: dict[str, nn.Module]
    report: Report
    optimizer: torch.optim.Optimizer | None


def apply(
    report: Report,
    codes: str | Sequence[str],
    model: Model,
    sample: Any = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    unsafe: bool = False,
    inplace: bool = False,
    stored_only: bool = False,
) -> tuple[Model, TransformReport]:
    """Fix what ``report`` found, as far as it is mechanical; the call behind :meth:`Report.apply`.

    Args:
        report: of a check of ``model``.
        codes: rules to fix, such as ``"NS501"``.
        model: the model that was checked.
        sample: an input as for a check. Outputs before and after are compared on it, in eval and normalizing by the
            batch; without one nothing is compared.
        optimizer: whose parameter groups NS502 changes, in place.
        unsafe: also what changes outputs.
        inplace: change ``model`` itself; by default a deep copy is changed and returned.
        stored_only: only what a state dict holds.

    Returns the fixed model and a report of what was done and what was left, with reasons.

    Raises:
        BadInput: a code without a mechanical fix, or a report of another model.
        Deviation: outputs would have moved by more than the dtype allows; nothing was changed.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    >>> x = torch.randn(8, 3, 8, 8)
    >>> import normscope
    >>> fixed, done = normscope.check(model, x, select=["NS501"]).apply("NS501", model, x)
    >>> fixed[0].bias is None, model[0].bias is None, torch.allclose(fixed(x), model(x), atol=1e-5)
    (True, False, True)
    """
    wanted = (codes,) if isinstance(codes, str) else tuple(codes)
    unknown = [code for code in wanted if code not in FIXES]
    if unknown:
        raise BadInput(
            f"{', '.join(unknown)} cannot be fixed mechanically; those that can: {', '.join(FIXES)}"
        )
    arguments.module(model)
    if inplace and sample is not None:  # a copy first: where it deviates, the model is not touched
        _, rehearsed = apply(report, codes, model, sample, unsafe=unsafe, stored_only=stored_only)
        fixed, done = apply(
            report, codes, model, optimizer=optimizer, unsafe=unsafe, inplace=True, stored_only=stored_only
        )
        return fixed, replace(done, agreements=rehearsed.agreements, notes=rehearsed.notes)
    # an optimizer holds the parameters of the model given, so with NS502 alone there is nothing to copy
    fixed = model if inplace or set(wanted) == {"NS502"} else copy.deepcopy(model)
    inner = unwrap(fixed)
    modules = {clean_path(path): module for path, module in inner.named_modules(remove_duplicate=False)}
    case = _Case(inner, modules, report, optimizer)
    found = [one for finding in report.findings for one in unfold(finding) if one.code in wanted]
    sites, todo = [], []
    for finding in found:
        plan = FIXES[finding.code](case, finding)
        refused = _refused(plan, unsafe, stored_only)
        if isinstance(plan, Left) or refused:
            sites.append(SiteChange(finding.site, finding.code, "", refused))
        else:
            sites.append(SiteChange(plan.path, plan.before, plan.after))
            todo.append(plan)
    agreements, notes = _done(model, fixed, todo, sample)
    absent = [_absent(report, code) for code in wanted if code not in {finding.code for finding in found}]
    notes += tuple(absent) if sites else ()
    done = TransformReport(f"fix {' '.join(wanted)}", tuple(sites), agreements, notes)
    return fixed, done if sites else replace(done, nothing="; ".join(absent))


def _absent(report: Report, code: str) -> str:
    """That there is nothing of a code to fix, and why where the check did not look."""
    why = next((entry.reason for entry in report.not_run if entry.code == code), "")
    looked = why or ("" if code in report.passed else "it was not among the rules of this check")
    return f"the report has no finding of {code}" + (f" ({looked})" if looked else "")


def _refused(plan: Change | Left, unsafe: bool, stored_only: bool) -> str:
    if isinstance(plan, Left):
        return plan.reason
    if stored_only and not plan.stored:
        return f"a state dict does not hold it; in your code: {plan.code}"
    if not plan.keeps and not unsafe:
        return f"outputs would change ({plan.before} -> {plan.after}), which is only done when asked: unsafe=True"
    return ""


def _done(
    model: nn.Module, fixed: nn.Module, todo: list[Change], sample: Any
) -> tuple[tuple[Agreement, ...], tuple[str, ...]]:
    """Do it, those that keep outputs first, and compare these with the model as it was."""
    notes = [f"to load it, build {one.path} with {one.code}" for one in todo if one.stored]
    agreements: tuple[Agreement, ...] = ()
    kept = [one for one in todo if one.keeps]
    for one in kept:
        one.do()
    args, kwargs, _ = arguments.on_device(model, sample)
    if args is not None and kept:
        paths = {one.path: None for one in kept}
        agreements, remarks = compare(unwrap(model), unwrap(fixed), paths, args, kwargs)
        notes += remarks
    for one in todo:
        if not one.keeps:
            one.do()
    notes += [one.remark for one in todo if one.remark]
    if args is not None and len(kept) < len(todo):
        notes.append(f"outputs changed, as asked: {_moved(unwrap(model), unwrap(fixed), args, kwargs)}")
    if args is None and any(one.in_model for one in todo):
        notes.append("outputs were not compared: no sample was given")
    return agreements, tuple(notes)


def _moved(before: nn.Module, after: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    outputs = []
    for model in (before, after):
        with Session(model) as session:
            outputs.append(detached(session.forward(args, kwargs, mode="eval")))
    moved = [
        change(some(a), some(b), a.dtype).relative
        for a, b in zip(*outputs, strict=False)
        if a.is_floating_point()
    ]
    return f"by {number(max(moved, default=0.0))} of their size in eval"


def _module(case: _Case, path: str, finding: Finding) -> nn.Module:
    if path not in case.modules:
        raise BadInput(
            f"the report names {path!r} ({finding.code}), which this model has not; check the model that is to be fixed"
        )
    return case.modules[path]


def _at(path: str) -> str:
    return f'model.get_submodule("{path}")' if path else "model"


def _without_bias(case: _Case, finding: Finding) -> Change | Left:
    path = str(finding.evidence["producer"])
    layer, norm = _module(case, path, finding), _module(case, finding.site.partition(":")[0], finding)
    bias = getattr(layer, "bias", None)
    if not isinstance(bias, nn.Parameter) or parametrize.is_parametrized(layer):
        return Left("the bias is not a plain parameter of a layer")
    owners = [name for name, p in case.model.named_parameters(remove_duplicate=False) if p is bias]
    if len(owners) > 1:
        return Left(f"the bias has several owners: {', '.join(owners)}")
    feeding = {
        str(one.evidence["producer"])
        for found in case.report.findings
        for one in unfold(found)
        if one.code == "NS501" and one.site == finding.site
    }
    mean = getattr(norm, "running_mean", None)
    if ":" in finding.site or (mean is not None and (len(feeding) > 1 or mean.shape != bias.shape)):
        return Left("one running mean cannot take up the biases that reach this norm")

    def do() -> None:
        with torch.no_grad():
            if mean is not None:
                mean.sub_(bias.to(mean.dtype))
        layer.register_parameter("bias", None)

    return Change(path, "with bias", "without bias", do, "bias=False", stored=True)


def _undecayed(case: _Case, finding: Finding) -> Change | Left:
    if case.optimizer is None:
        return Left("weight decay is the optimizer's: pass optimizer=")
    named = {clean_path(path): p for path, p in case.model.named_parameters(remove_duplicate=False)}
    paths = [str(path) for path in finding.evidence["paths"]]
    spared = [named[path] for path in paths if path in named]
    if not paths or len(spared) < len(paths):
        lacking = ", ".join(path for path in paths if path not in named) or "what is decayed"
        return Left(f"this model has no parameter {lacking}: check the model that is to be fixed")
    groups = case.optimizer.param_groups
    held = {id(p) for group in groups for p in group["params"]}
    if not {id(p) for p in spared} <= held:
        return Left(
            "the optimizer does not hold these parameters; a copy of the model has others: fix NS502 alone, or inplace"
        )

    def do() -> None:
        for group in list(groups):
            moved = [p for p in group["params"] if any(p is q for q in spared)]
            if not moved or not group.get("weight_decay"):
                continue
            group["params"] = [p for p in group["params"] if not any(p is q for q in moved)]
            settings = {key: value for key, value in group.items() if key != "params"} | {"weight_decay": 0.0}
            like = next(
                (g for g in groups if {k: v for k, v in g.items() if k != "params"} == settings), None
            )
            if like is None:
                groups.append({"params": moved, **settings})
            else:
                like["params"] = [*like["params"], *moved]

    decay = number(float(finding.evidence["weight_decay"]))
    code = 'optimizer.add_param_group({"params": [...], "weight_decay": 0.0})'
    return Change(finding.site, f"decayed by {decay}", "not decayed", do, code, in_model=False)


def _set(module: nn.Module, path: str, name: str, value: float, *, keeps: bool) -> Change:
    return Change(
        path,
        f"{name} {eps_text(getattr(module, name))}",
        f"{name} {eps_text(value)}",
        lambda: setattr(module, name, value),
        f"{_at(path)}.{name} = {value!r}",
        keeps,
    )


def _eps(case: _Case, finding: Finding) -> Change | Left:
    if ":" in finding.site:
        return Left("eps is an argument in your code here")
    module = _module(case, finding.site, finding)
    name = next((name for name in EPS_NAMES if hasattr(module, name)), None)
    if name is None:
        return Left("the module has no eps of its own")
    evidence = finding.evidence
    if finding.code == "NS105":
        value = evidence.get("expected_eps", evidence.get("usual_eps"))
        return _set(module, finding.site, name, float(value), keeps=False)
    values = {float(v) for key, v in evidence.items() if key.startswith("eps_")}
    if getattr(module, name) is None:
        if len(values) != 1:
            return Left("it runs in dtypes whose epsilons differ, so one number would change one of them")
        return _set(module, finding.site, name, values.pop(), keeps=True)
    if finding.severity == "info" or "eps" not in evidence:
        return Left("nothing needs a change here, or it is more than eps")
    return _set(module, finding.site, name, USUAL_EPS, keeps=False)


def _momentum(case: _Case, finding: Finding) -> Change | Left:
    momentum = finding.evidence["momentum"]
    if ":" in finding.site or momentum is None or not 0.5 < momentum < 1:
        return Left("which number is meant cannot be told; 0.1 is usual")
    module = _module(case, finding.site, finding)
    plan = _set(module, finding.site, "momentum", round(1 - momentum, 12), keeps=True)
    stale = (
        f"the statistics stored in {finding.site or 'the model'} still come from momentum {momentum:g}: recompute them "
        "on training data, normscope.transforms.recalibrate(model, batches)"
    )
    return replace(plan, remark=stale)


FIXES: dict[str, Plan] = {
    "NS104": _eps,
    "NS105": _eps,
    "NS308": _momentum,
    "NS501": _without_bias,
    "NS502": _undecayed,
}
