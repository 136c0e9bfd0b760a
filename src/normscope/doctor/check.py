"""``check``: find the sites, run the model, measure, apply the rules, report."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import normscope
from normscope.doctor import arguments, independence, runs, stored_sites
from normscope.doctor.identified import identify_written
from normscope.doctor.judging import judge
from normscope.doctor.nested import named_inputs
from normscope.doctor.norm_free import norm_free
from normscope.doctor.portraits import measurements
from normscope.doctor.probes import all_probes
from normscope.doctor.report import Report, SiteRow, severity_rank
from normscope.doctor.rules import Rule, all_rules
from normscope.doctor.session import Session
from normscope.doctor.site import Site
from normscope.doctor.sites import find_sites
from normscope.doctor.source import source_of
from normscope.doctor.subject import Subject
from normscope.doctor.tracing.calls import MASKED
from normscope.doctor.wording import listed
from normscope.errors import ModelError, NormscopeError, told


def check(
    model: torch.nn.Module,
    inputs: Any = None,
    targets: Any = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    mask: Any = None,
    state: Mapping[str, torch.Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
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
        state: what the model's checkpoint holds, name -> tensor; lets a rule look for norms whose statistics or
            parameters it lacks. It is read, never loaded.
        config: what stands in the ``config.json`` beside that checkpoint; its eps is expected of the norms.
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
    arguments.settings(optimizer, loss_fn, progress, frozen_policy)
    seed = arguments.whole_number("seed", seed, 0, 2**63 - 1)
    if dataset_size is not None:
        dataset_size = arguments.whole_number("dataset_size", dataset_size, 1, 2**63 - 1)
    rules = chosen(select, ignore)
    step = progress or (lambda _: None)
    args, kwargs, batch_size = arguments.on_device(arguments.module(model), inputs)
    valid = arguments.padding_mask(mask, args, kwargs, batch_size)
    held = arguments.state(state)
    with Session(model, seed=seed) as session:
        step("sites")
        sites = find(session, args, kwargs)
        if config is not None:
            stored_sites.expect(sites, config)
        subject = Subject(
            model=session.model,
            session=session,
            sites=sites,
            args=args,
            kwargs=kwargs,
            targets=arguments.moved(targets, model),
            loss_fn=loss_fn,
            optimizer=optimizer,
            mask=valid,
            state=held,
            batch_size=batch_size,
            seed=seed,
            dataset_size=dataset_size,
            frozen_policy=frozen_policy,
            synthetic=synthetic,
        )
        if args is not None:
            subject.inputs_dependent = independence.dependence((args, kwargs), batch_size)
        wanted = {name for r in rules for name in (*r.needs, *r.uses) if name != "data"}
        probes = [probe for name, probe in all_probes().items() if name in wanted or probe.rides]
        reasons = runs.run_probes(subject, probes, step)
        step("rules")
        findings, passed, not_run = judge(rules, subject, reasons)
        portraits = measurements(subject)
        notes = _notes(subject)
        notes += [reasons[p.name] for p in probes if p.rides and "internal error" in reasons.get(p.name, "")]
    notes += norm_free(session.modules)
    notes += session.notes
    notes += [f"could not be verified as untouched: {what}" for what in session.unverified]
    return Report(
        findings=tuple(sorted(findings, key=lambda f: (-severity_rank(f.severity), f.code))),
        sites=tuple(row(site, source_of(session.modules, site.path)) for site in sites),
        passed=tuple(passed),
        not_run=tuple(not_run),
        notes=tuple(notes),
        target=str(target),
        versions=versions(),
        measurements=portraits,
        source=source_of(session.modules, ""),
    )


def chosen(select: Sequence[str] | None, ignore: Sequence[str] | None) -> list[Rule]:
    """The rules that ``select`` and ``ignore`` leave."""
    rules = all_rules()
    wanted = arguments.rule_codes("select", select, rules)
    unwanted = arguments.rule_codes("ignore", ignore, rules)
    return [
        rule
        for code, rule in rules.items()
        if (not wanted or code.startswith(wanted)) and not (unwanted and code.startswith(unwanted))
    ]


def row(site: Site, source: str = "") -> SiteRow:
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
        source=source,
    )


def versions() -> dict[str, str]:
    return {
        "normscope": normscope.__version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def find(session: Session, args: tuple[Any, ...] | None, kwargs: dict[str, Any]) -> list[Site]:
    """The sites, those written by hand identified where that can be."""
    try:
        sites = find_sites(session, args, None if args is None else kwargs)
    except NormscopeError:
        raise
    except (Exception, SystemExit) as error:
        raise _explained(session, args, kwargs, error) from error
    identify_written(session, sites)
    return sites


def _explained(
    session: Session, args: tuple[Any, ...] | None, kwargs: dict[str, Any], error: BaseException
) -> NormscopeError:
    """Whose fault it is: run without being watched, the model raises too, or it does not."""
    if args is not None:
        try:
            session.forward(args, kwargs, mode="eval")
        except (Exception, SystemExit) as plain:
            shapes = ", ".join(
                f"{where}: {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
                for where, t in named_inputs(args, kwargs)
            )
            return ModelError(
                f"the model raised on these inputs ({shapes}) in eval mode {told(plain)}. "
                "Check shape, dtype and how the inputs are passed (tensor: model(x), tuple: model(*x), "
                "dict: model(**x))."
            )
    return NormscopeError(
        f"the model could not be followed, though it runs by itself: {told(error)}. "
        "This is a fault of Normscope; please report it with the model's code"
    )


def _notes(subject: Subject) -> list[str]:
    notes = []
    if getattr(subject.model, "training", False) and subject.has_data:  # a frozen script has no modes
        notes.append("the model was handed over in training mode; eval is what it is after model.eval()")
    notes += [f"{name or 'the model'} was not measured: {why}" for name, why in subject.unmeasured.items()]
    masked = [s.name for s in subject.sites if s.spec and any(call.reason == MASKED for call in s.calls)]
    if masked:
        notes.append(f"{listed(masked)} {'was' if len(masked) == 1 else 'were'} not measured: {MASKED}")
    notes += [why for why in subject.runs.values() if why.startswith(runs.RAISED)]
    silent = [site.name for site in subject.sites if subject.has_data and not site.calls]
    if silent:
        verb = "was" if len(silent) == 1 else "were"
        notes.append(
            f"{listed(silent)} {verb} not called on these inputs: what needs data says nothing there"
        )
    if subject.targets is not None and subject.loss_fn is None:
        notes.append("targets were given without a loss_fn, so only NS504 looked at them")
    if subject.inputs_dependent:
        notes.append(f"the samples of this batch are not independent: {subject.inputs_dependent}")
    fused = [site.name for site in subject.sites if site.fused]
    if fused:
        notes.append(
            f"in deployment {', '.join(fused)} run inside a fused transformer kernel; they were measured unfused"
        )
    if subject.own_backward:
        where = ", ".join(f"{name} ({function})" for name, function in subject.own_backward.items())
        notes.append(
            f"gradients of {where} were not checked: --explain (or normscope.explain) compares a backward written by "
            "hand with differences"
        )
    unknown = [site for site in subject.sites if site.spec is None]
    notes += [
        f"{site.name or 'the model'} ({site.type_name}) was not checked: {site.reason}" for site in unknown
    ]
    return notes
