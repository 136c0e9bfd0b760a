"""Step 4: gradients against finite differences, on small smooth input in float64."""

from __future__ import annotations

import copy

import torch

from normscope.doctor.diagnosis.slopes import DIRECTIONS, Cut, Slope, slopes_alone
from normscope.doctor.diagnosis.step import Case, Step
from normscope.doctor.diagnosis.stopped import Stopped
from normscope.doctor.nested import mapped, tensors
from normscope.doctor.own_functions import own_functions
from normscope.doctor.session import Session
from normscope.doctor.wording import label, listed, number, plural
from normscope.errors import told

TITLE = "gradients"
SAMPLES = 8
ASIDE = 1e-2
"""how far each parameter is moved, at random, before the model's gradient is compared"""
LARGEST = 50_000_000
"""numbers in a model of which a float64 copy is made"""


def step(case: Case) -> Step:
    found: dict[str, list[Slope]] = {}
    cuts: dict[str, Cut] = {}
    failures: dict[str, str] = {}
    for alone in case.alone:
        try:
            slopes, cut = slopes_alone(alone)
        except (Exception, SystemExit) as error:
            failures[label(alone.site)] = told(error)
        else:
            found[label(alone.site)] = slopes
            if cut is not None:
                cuts[label(alone.site)] = cut
    wrong = {
        name: max(slopes, key=lambda s: s.error)
        for name, slopes in found.items()
        if any(s.wrong for s in slopes)
    }
    seen = [f"{name}, {slope.line()}." for name, slope in list(wrong.items())[:2]]
    errors = [slope.error for slopes in found.values() for slope in slopes if not slope.wrong]
    if errors:
        rest = " in all other directions" if wrong else ""
        compared = f"{plural(len(found), 'norm')} compared alone"
        seen.append(f"{compared}: largest error{rest} {number(max(errors))} of the gradient.")
    seen += [f"{name} {cut.line()}." for name, cut in list(cuts.items())[:2]]
    if failures:
        seen.append(f"no gradient: {listed([f'{name} ({why})' for name, why in failures.items()], 2)}.")
    whole: Slope | None = None
    try:
        whole = None if wrong else _model(case)
    except (Exception, SystemExit) as error:
        seen.append(f"the whole model in float64 was not compared: {told(error)}.")
    if whole is not None:
        seen.append(f"the whole model, {whole.line()}.")
    if whole is not None and whole.apart and whole.replaced:
        seen.append(f"cannot tell: gradients are replaced on purpose by {listed(whole.replaced)}.")
        whole = None
    custom = _custom(case) if wrong or (whole is not None and whole.wrong) else []
    if custom:
        seen.append(f"written by hand: {listed(custom)}.")
    todo = f"correct the backward of {listed(custom) if custom else 'that norm'}, or let autograd derive it"
    if wrong:
        follows = f"the gradient of {listed(list(wrong))} is not that of what it computes."
    elif whole is not None and whole.wrong:
        follows = (
            "norms compared alone have their gradients, the model has not: something else in it is wrong."
        )
    elif not found and whole is None:
        follows, todo = "no gradient could be compared.", ""
    elif cuts:
        follows, todo = (
            f"gradients are those of what is computed, with what {listed(list(cuts))} cut off held fixed. Where that "
            "is not meant, let autograd follow it.",
            "",
        )
    else:
        follows, todo = "gradients are those of what is computed.", ""
    failed = bool(wrong) or (whole is not None and whole.wrong)
    return Step(
        4,
        TITLE,
        f"gradients of each norm along {DIRECTIONS} random directions of input and parameters, and of the model along "
        "one, against central differences in float64 with two step sizes",
        tuple(seen),
        follows,
        None if not found and whole is None else not failed,
        next(iter(wrong), ""),
        todo,
    )


def _model(case: Case) -> Slope | None:
    """The slope of a random projection of the output in all parameters, on the first samples.

    Taken a little off the parameters that are given: where biases are exactly 0 behind dead units, a ReLU may stand
    at its kink, where there is no gradient to compare. What the model cuts off from the gradient is held fixed.
    """
    subject = case.subject
    numbers = sum(p.numel() for p in subject.model.parameters())
    if numbers > LARGEST:
        raise ValueError(f"it has {numbers} parameters, more than {LARGEST}")
    model = copy.deepcopy(subject.model).double()
    args, kwargs = mapped(
        (subject.args or (), subject.kwargs),
        lambda t: (t[:SAMPLES] if t.ndim and t.shape[0] == subject.batch_size else t).to(
            torch.float64 if t.is_floating_point() else t.dtype
        ),
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)

    def drawn() -> list[torch.Tensor]:
        return [torch.randn(p.shape, dtype=p.dtype, generator=generator).to(p.device) for p in parameters]

    def move(direction: list[torch.Tensor], distance: float) -> None:
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=distance)

    move(drawn(), ASIDE)
    direction = drawn()
    size = sum(float(d.square().sum()) for d in direction) ** 0.5
    first = Stopped()
    with Session(model) as session, session.gradient_run(args, kwargs, mode="batch", watch=[first]) as output:
        total = _projected(output)
        first.check()
        if total is None or not total.requires_grad or not parameters:
            return None
        grads = torch.autograd.grad(total, parameters, allow_unused=True)
        middle = float(total.detach())
        if middle != middle or abs(middle) == float("inf"):
            raise ValueError("its output is not finite")
    pairs = [(g, d) for g, d in zip(grads, direction, strict=True) if g is not None]
    slope = sum(float((g * d).sum()) for g, d in pairs) / size
    steepness = sum(float(g.square().sum()) for g, _ in pairs) ** 0.5
    scale = steepness / max(1.0, sum(g.numel() for g, _ in pairs) ** 0.5)

    def at(distance: float) -> float:
        move(direction, distance / size)
        run = Session(model)
        with run, run.gradient_run(args, kwargs, mode="batch", watch=[Stopped(first)]) as output:
            value = _projected(output)
            found = float("nan") if value is None else float(value.detach())
        move(direction, -distance / size)
        return found

    h = 1e-5  # short: a step must not cross many kinks
    ahead, behind = at(h), at(-h)
    coarse, fine = (ahead - behind) / (2 * h), (at(h / 2) - at(-h / 2)) / h
    one_sided = abs(ahead - middle - (middle - behind)) / h
    doubt = abs(coarse - fine) + one_sided + 1e-5 * scale
    stopped = listed([f"{name} ({count})" for name, count in first.by.items()])
    held = f" (what the model cuts off from the gradient held fixed: {stopped})" if stopped else ""
    return Slope("all parameters", slope, fine, doubt, scale, tuple(first.replaced()), held)


def _projected(output: object) -> torch.Tensor | None:
    """A fixed random projection of the output."""
    draw = torch.Generator().manual_seed(1)
    parts = [
        (torch.randn(y.shape, generator=draw, dtype=torch.float64).to(y.device) * y).sum()
        for _, y in tensors(output, "output")
        if y.is_floating_point()
    ]
    return torch.stack(parts).sum() if parts else None


def _custom(case: Case) -> list[str]:
    """The user's own ``autograd.Function`` classes in the graph of the output."""
    subject = case.subject
    with subject.session.gradient_run(
        subject.args or (), subject.kwargs, mode="batch", watch=[Stopped()]
    ) as output:
        return own_functions(t for _, t in tensors(output, "output"))
