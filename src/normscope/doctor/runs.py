"""The runs of the model that a check makes: each once, whatever number of probes listen.

=================  =================================================================================
run                the model on the user's batch ...
=================  =================================================================================
eval               as deployed: everything in eval mode
batch              live norms take batch statistics, dropout and the rest stay in eval mode
eval_companions    as ``eval``; sample 0 stays, half of the other samples stand in for all of them
batch_companions   as ``batch``, with the same replacement
padded             as ``eval``; other content at the masked positions, same length
other_length       as ``eval``; masked positions taken away or appended
gradient           as ``batch``, with gradients of the loss (or of a fixed random projection of the output)
=================  =================================================================================

A run that is impossible (one sample has no companions) or in which the model raises leaves its reason in
``subject.runs``; the probes that listen only to such runs are not run, the others see what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from normscope.doctor import variants
from normscope.doctor.loss import loss
from normscope.doctor.nested import detached
from normscope.doctor.own_functions import own_functions
from normscope.doctor.probes import Probe
from normscope.doctor.report import NotRun
from normscope.doctor.site import Event
from normscope.doctor.subject import Subject
from normscope.doctor.watching import watch
from normscope.errors import BadInput, told

MODES = {
    "eval": "eval",
    "batch": "batch",
    "eval_companions": "eval",
    "batch_companions": "batch",
    "padded": "eval",
    "other_length": "eval",
    "gradient": "batch",
}


RAISED = "the model raised in"


def run_probes(
    subject: Subject, probes: Iterable[type[Probe]], step: Callable[[str], None] = lambda _: None
) -> dict[str, str]:
    """Run the model as often as the probes need and fill ``subject.measured``.

    Returns:
        probe name -> reason, for the probes that could not run.
    """
    reasons: dict[str, str] = {}
    active: list[Probe] = []
    for kind in probes:
        probe = kind()
        if probe.runs and not subject.has_data:
            reasons[probe.name] = "needs data: pass inputs"
        elif (why := _guarded(probe.name, lambda p=probe: p.start(subject))) is not None:  # type: ignore[misc]
            reasons[probe.name] = why
        else:
            active.append(probe)

    for run in MODES:
        listeners = [probe for probe in active if run in probe.runs]
        if not listeners:
            continue
        if all(probe.rides for probe in listeners):
            subject.runs[run] = "no rule that was chosen needs it"
            continue
        step(run)
        subject.runs[run] = variants.impossible(run, subject) or _run(run, subject, listeners, reasons)

    for probe in active:
        if probe.name in reasons:
            continue
        if probe.runs and all(subject.runs[run] for run in probe.runs):
            reasons[probe.name] = subject.runs[probe.runs[0]]
            continue
        why = _guarded(probe.name, lambda p=probe: _finish(p, subject))  # type: ignore[misc]
        if why is not None:
            reasons[probe.name] = why
    subject.outputs.clear()
    subject.gradients.clear()
    return reasons


def not_run(code: str, needs: Iterable[str], reasons: dict[str, str]) -> NotRun | None:
    """The entry for a rule whose probes could not run, None where they did."""
    for name in needs:
        if name in reasons:
            return NotRun(code, reasons[name])
    return None


def _run(run: str, subject: Subject, listeners: list[Probe], reasons: dict[str, str]) -> str:
    def tell(event: Event) -> None:
        if event.input.numel() == 0:  # an empty selection has no statistics
            return
        obstacle = _unmeasurable(event.input)
        if obstacle:
            subject.unmeasured[event.site.name] = obstacle
            return
        if run == "gradient" and event.site.kind == "hand-written":
            for function in own_functions([event.output], event.input):
                subject.own_backward[event.site.name] = function
        for probe in listeners:
            if probe.name not in reasons:
                why = _guarded(probe.name, lambda p=probe: p.observe(event))  # type: ignore[misc]
                if why is not None:
                    reasons[probe.name] = why

    args, kwargs = variants.inputs_for(run, subject)
    watching = watch(subject.sites, run, tell)
    ran = False
    try:
        if run == "gradient":
            leaves, (args, kwargs) = variants.differentiable((args, kwargs))
            with subject.session.gradient_run(args, kwargs, mode=MODES[run], watch=(watching,)) as output:
                ran = True
                return _gradients(subject, output, leaves)
        output = subject.session.forward(args, kwargs, mode=MODES[run], watch=(watching,))
        subject.outputs[run] = detached(output)
    except (Exception, SystemExit) as error:
        if ran and isinstance(error, BadInput):  # the loss is the user's
            raise
        # The model ran in eval mode when its sites were found; that it cannot run otherwise is a result, not a crash.
        return f"{RAISED} the {run.replace('_', ' ')} run: {told(error)}"
    return ""


def _unmeasurable(x: torch.Tensor) -> str:
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "it runs inside vmap or another function transform"
    return "its input is a nested tensor" if x.is_nested else ""


def _gradients(subject: Subject, output: Any, leaves: list[torch.Tensor]) -> str:
    """Of the parameters; "" where there are any, else why not.

    Those of the inputs are asked for too, so that every norm on the way takes its input's: PyTorch 2.13 on the CPU
    crashes in a channels-last group norm whose input gradient nobody needs.
    """
    named = {n: p for n, p in subject.session.model.named_parameters() if p.requires_grad}
    with subject.session.protecting(subject.targets, subject.loss_fn):
        value = loss(subject, output)
        if value is None:
            return "no output depends on a parameter"
        grads = torch.autograd.grad(value, [*named.values(), *leaves], allow_unused=True)
    subject.gradients = {n: g for n, g in zip(named, grads, strict=False) if g is not None}
    return ""


def _finish(probe: Probe, subject: Subject) -> None:
    subject.measured[probe.name] = probe.finish(subject)


def _guarded(name: str, work: Callable[[], str | None]) -> str | None:
    """A fault of one probe costs that probe, not the report; it is told as what it is."""
    try:
        return work()
    except Exception as error:
        return f"internal error in probe {name}: {told(error)}"
