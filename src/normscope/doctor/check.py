"""``check``: find the sites, run the model, measure, apply the rules, report."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import normscope
from normscope.doctor import independence, runs, variants
from normscope.doctor.probes import all_probes
from normscope.doctor.report import Finding, NotRun, Report, SiteRow, severity_rank
from normscope.doctor.rules import Rule, all_rules
from normscope.doctor.session import Session
from normscope.doctor.site import Site
from normscope.doctor.sites import find_sites
from normscope.doctor.subject import Subject
from normscope.errors import BadInput, ModelError, NormscopeError

FREEZE_POLICIES = ("", "statistics", "affine", "both")


def check(
    model: torch.nn.Module,
    inputs: Any = None,
    targets: Any = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    mask: Any = None,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    seed: int = 0,
    dataset_size: int | None = None,
    frozen_policy: str = "",
    synthetic: bool = False,
    target: str = "",
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Check every normalization of a model on the user's own data, and leave the model bit for bit as it was.

    Args:
        model: any ``torch.nn.Module``, in any mode.
        inputs: a batch. A tensor is passed as ``model(x)``, a tuple as ``model(*args)``, a mapping as
            ``model(**kwargs)``; NumPy arrays become tensors; all are moved to the model's device. Axis 0 counts
            samples. Eight or more samples let the statistical rules decide. Without inputs the rules that read
            modules and their state run, and the others are listed as not run.
        targets: what ``loss_fn`` takes beside the output.
        loss_fn: ``loss_fn(output, targets)`` (``loss_fn(output)`` without targets) returning one number; without
            one, gradients are those of a fixed random projection of the output.
        optimizer: lets the rules on weight decay see its parameter groups. It is never stepped.
        mask: (B, L), True or 1 at valid positions; lets the padding rule run.
        select, ignore: rule codes, or their beginnings (``"NS3"``), to run or to leave out.
        seed: of everything random in the check.
        dataset_size: number of samples in the training set, for rules about the last batch.
        frozen_policy: what you meant to freeze: ``"statistics"``, ``"affine"``, ``"both"`` or nothing.
        synthetic: the inputs are random numbers; rules about the data are then not run.
        target: a name for the report.
        progress: called with a word before each step.

    Returns:
        a :class:`~normscope.doctor.report.Report`; ``str(report)`` is the text report.

    Raises:
        BadInput: inputs, masks or settings that cannot be used.
        ModelError: the model raised on these inputs; the cause is chained.
        Refused: the model cannot be run safely (lazy or meta parameters).

    Example:
        >>> import torch, normscope
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> report = normscope.check(model, torch.randn(8, 3, 16, 16))
        >>> "NS501" in {finding.code for finding in report.findings}  # the convolution's bias does nothing
        True
    """
    if not isinstance(model, torch.nn.Module):
        raise BadInput(f"model must be a torch.nn.Module, got {type(model).__name__}; pass the module itself")
    if frozen_policy not in FREEZE_POLICIES:
        raise BadInput(
            f"frozen_policy is one of {', '.join(map(repr, FREEZE_POLICIES))}; got {frozen_policy!r}"
        )
    rules = chosen(select, ignore)
    step = progress or (lambda _: None)
    args, kwargs, batch_size = on_device(model, inputs)
    with Session(model, seed=seed) as session:
        step("sites")
        sites = find(session, args, kwargs)
        subject = Subject(
            model=session.model,
            session=session,
            sites=sites,
            args=args,
            kwargs=kwargs,
            targets=_moved(targets, model),
            loss_fn=loss_fn,
            optimizer=optimizer,
            mask=_mask(mask, batch_size),
            batch_size=batch_size,
            seed=seed,
            dataset_size=dataset_size,
            frozen_policy=frozen_policy,
            synthetic=synthetic,
        )
        if args is not None:
            subject.inputs_dependent = independence.dependence((args, kwargs), batch_size)
        wanted = {name for r in rules for name in (*r.needs, *r.uses) if name != "data"}
        probes = [all_probes()[name] for name in sorted(wanted)]
        reasons = runs.run_probes(subject, probes, step)
        step("rules")
        findings, passed, not_run = _apply(rules, subject, reasons)
        notes = _notes(subject)
    notes += session.notes
    notes += [f"could not be verified as untouched: {what}" for what in session.unverified]
    return Report(
        findings=tuple(sorted(findings, key=lambda f: (-severity_rank(f.severity), f.code))),
        sites=tuple(row(site) for site in sites),
        passed=tuple(passed),
        not_run=tuple(not_run),
        notes=tuple(notes),
        target=target,
        versions=versions(),
    )


def chosen(select: Sequence[str] | None, ignore: Sequence[str] | None) -> list[Rule]:
    """The rules that ``select`` and ``ignore`` leave.

    Raises:
        BadInput: for a code that begins no rule's code.
    """
    rules = all_rules()
    for word, codes in (("select", select), ("ignore", ignore)):
        if isinstance(codes, str):
            raise BadInput(f"{word} takes a list of codes, got the string {codes!r}; write [{codes!r}]")
        for code in codes or ():
            if not any(known.startswith(code) for known in rules):
                raise BadInput(
                    f"{word} names {code!r}, which begins no rule's code; known: {', '.join(rules)}"
                )
    kept = [
        rule
        for code, rule in rules.items()
        if (not select or code.startswith(tuple(select))) and not (ignore and code.startswith(tuple(ignore)))
    ]
    return kept


def row(site: Site) -> SiteRow:
    return SiteRow(
        name=site.name,
        kind=site.kind,
        type_name=site.type_name,
        spec=site.spec,
        reason=site.reason,
        mode_train=site.mode_train,
        mode_eval=site.mode_eval,
        calls=len(site.calls),
        shapes=tuple(dict.fromkeys(call.shape for call in site.calls)),
        dtypes=tuple(dict.fromkeys(call.dtype for call in site.calls)),
        aliases=site.aliases,
        fused=site.fused,
    )


def versions() -> dict[str, str]:
    return {
        "normscope": normscope.__version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def on_device(model: torch.nn.Module, inputs: Any) -> tuple[tuple[Any, ...] | None, dict[str, Any], int]:
    if inputs is None:
        return None, {}, 0
    args, kwargs = _moved(variants.as_call(inputs), model)
    return args, kwargs, variants.validate(args, kwargs)


def _moved(value: Any, model: torch.nn.Module) -> Any:
    """Tensors on the device of the model's first parameter or buffer."""
    first = next(iter((*model.parameters(), *model.buffers())), None)
    if first is None or first.device.type == "meta":
        return value
    return variants.mapped(value, lambda t: t.to(first.device))


def _mask(mask: Any, batch: int) -> torch.Tensor | None:
    if mask is None:
        return None
    tensor = torch.as_tensor(mask)
    if tensor.ndim != 2 or tensor.shape[0] != batch:
        raise BadInput(
            f"mask must have shape (B, L) with B = {batch}, True at valid positions; got {tuple(tensor.shape)}"
        )
    tensor = tensor.bool().cpu()
    if not bool(tensor.any()):
        raise BadInput("mask is False everywhere: no position would be valid; is it inverted?")
    return tensor


def find(session: Session, args: tuple[Any, ...] | None, kwargs: dict[str, Any]) -> list[Site]:
    try:
        return find_sites(session, args, None if args is None else kwargs)
    except NormscopeError:
        raise
    except Exception as error:
        raise _explained(session, args, kwargs, error) from error


def _explained(
    session: Session, args: tuple[Any, ...] | None, kwargs: dict[str, Any], error: Exception
) -> NormscopeError:
    """Whose fault it is: run without being watched, the model raises too, or it does not."""
    if args is not None:
        try:
            session.forward(args, kwargs, mode="eval")
        except Exception as plain:
            shapes = ", ".join(
                f"{where}: {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
                for where, t in variants.named_inputs(args, kwargs)
            )
            return ModelError(
                f"the model raised {type(plain).__name__} on these inputs ({shapes}) in eval mode: {plain}. "
                "Check shape, dtype and how the inputs are passed (tensor: model(x), tuple: model(*x), "
                "dict: model(**x))."
            )
    return NormscopeError(
        f"the model could not be followed, though it runs by itself: {type(error).__name__}: {error}. "
        "This is a fault of Normscope; please report it with the model's code"
    )


def _apply(
    rules: Iterable[Rule], subject: Subject, reasons: dict[str, str]
) -> tuple[list[Finding], list[str], list[NotRun]]:
    findings: list[Finding] = []
    passed: list[str] = []
    not_run: list[NotRun] = []
    for rule in rules:
        blocked = _blocked(rule, subject, reasons)
        if blocked is not None:
            not_run.append(blocked)
            continue
        try:
            results = list(rule.check(subject))
        except Exception as error:  # a fault of one rule costs that rule, not the report
            not_run.append(NotRun(rule.code, f"internal error: {type(error).__name__}: {error}"))
            continue
        found = [named(result, rule) for result in results if isinstance(result, Finding)]
        undecided = [result for result in results if isinstance(result, NotRun)]
        partly = runs.not_run(rule.code, rule.uses, reasons)
        if partly is not None and not found:
            undecided.append(NotRun(rule.code, f"only without data: {partly.reason}"))
        findings += found
        not_run += undecided
        if not found and not undecided:
            passed.append(rule.code)
    return findings, passed, not_run


def _blocked(rule: Rule, subject: Subject, reasons: dict[str, str]) -> NotRun | None:
    if ("data" in rule.needs or rule.real_data) and not subject.has_data:
        return NotRun(rule.code, "needs data: pass inputs")
    if rule.real_data and subject.synthetic:
        return NotRun(rule.code, "random inputs say nothing about your data: pass real samples")
    return runs.not_run(rule.code, rule.needs, reasons)


def named(finding: Finding, rule: Rule) -> Finding:
    """The finding, and those folded under it, with the rule's name."""
    return replace(finding, name=rule.name, also=tuple(named(f, rule) for f in finding.also))


def _notes(subject: Subject) -> list[str]:
    notes = []
    if subject.inputs_dependent:
        notes.append(f"the samples of this batch are not independent: {subject.inputs_dependent}")
    fused = [site.name for site in subject.sites if site.fused]
    if fused:
        notes.append(
            f"in deployment {', '.join(fused)} run inside a fused transformer kernel; they were measured unfused"
        )
    unknown = [site for site in subject.sites if site.spec is None]
    notes += [f"{site.name} ({site.type_name}) was not checked: {site.reason}" for site in unknown]
    return notes
