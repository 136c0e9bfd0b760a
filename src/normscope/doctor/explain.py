"""``explain``: the order in which to look when training went wrong after a change of normalization.

1. Axes and broadcasting, on a tiny tensor that one can compute by hand.
2. Train against eval, with the same input and the state told.
3. The distribution of denominators, near zero first.
4. Gradients against finite differences, on small smooth input.
5. Constant and nearly constant input, against the declared eps.
6. Only then the learning rate.

Each step presupposes those before it: a gradient check says nothing about a norm over the wrong axis.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from normscope.doctor import arguments
from normscope.doctor.check import check, find
from normscope.doctor.diagnosis import axes, constants, denominators, gradients, rate, train_eval
from normscope.doctor.diagnosis.step import Case, Step
from normscope.doctor.report import Report
from normscope.doctor.session import Session
from normscope.doctor.subject import Subject
from normscope.errors import BadInput

__all__ = ["Explanation", "Step", "explain"]


@dataclass(frozen=True)
class Explanation:
    """The steps, in order, and the report that they draw on. ``str`` is the text of ``normscope check --explain``."""

    steps: tuple[Step, ...]
    report: Report
    target: str = ""

    @property
    def first(self) -> Step | None:
        """The first step that failed: what to do first. None where none did."""
        return next((step for step in self.steps if step.ok is False), None)

    @property
    def ok(self) -> bool:
        """No step failed."""
        return self.first is None

    def to_json(self) -> str:
        """Target, steps, and the number of the first that failed."""
        document = {
            "target": self.target,
            "ok": self.ok,
            "first": self.first.number if self.first else None,
            "steps": [step.to_dict() for step in self.steps],
        }
        return json.dumps(document, indent=2)

    def __str__(self) -> str:
        from normscope.render.explain import to_text

        return to_text(self)


def explain(
    model: torch.nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    mask: Any = None,
    seed: int = 0,
    synthetic: bool = False,
    target: str = "",
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """Walk through the six steps on a model and its data; the model is left bit for bit as it was.

    Args and errors are those of :func:`normscope.check`; ``inputs`` are needed. Besides a check it runs copies of the
    single norms and, for the gradients, a float64 copy of the model on at most 8 samples.

    >>> import torch, normscope
    >>> model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Tanh())
    >>> explanation = normscope.explain(model, torch.randn(8, 6))
    >>> explanation.ok, [step.number for step in explanation.steps]
    (True, [1, 2, 3, 4, 5, 6])
    """
    if inputs is None:
        raise BadInput("explain runs the model on data: pass inputs, a batch of 8 or more samples")
    say = progress or (lambda _: None)
    report = check(
        model,
        inputs,
        targets,
        loss_fn=loss_fn,
        optimizer=optimizer,
        mask=mask,
        seed=seed,
        synthetic=synthetic,
        target=target,
        progress=progress,
    )
    args, kwargs, batch_size = arguments.on_device(model, inputs)
    with Session(model, seed=seed) as session:
        subject = Subject(
            model=session.model,
            session=session,
            sites=find(session, args, kwargs),
            args=args,
            kwargs=kwargs,
            targets=arguments.moved(targets, model),
            loss_fn=loss_fn,
            optimizer=optimizer,
            batch_size=batch_size,
            seed=seed,
            synthetic=synthetic,
        )
        case = Case(subject, report)
        steps = []
        for part in (axes, train_eval, denominators, gradients, constants):
            say(part.TITLE)
            steps.append(part.step(case))
        say(rate.TITLE)
        steps.append(rate.step(case, next((step for step in steps if step.ok is False), None)))
    return Explanation(tuple(steps), report, target)
