"""Step 6: the learning rate, looked at only where everything before it is in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normscope.doctor import runs
from normscope.doctor.diagnosis.step import Case, Step
from normscope.doctor.probes import Probe
from normscope.doctor.wording import number

if TYPE_CHECKING:
    from normscope.doctor.subject import Subject

TITLE = "learning rate"
LARGE = 0.1
"""of a parameter in one step"""
SHOWN = 3


class _Steps(Probe):
    name = "explained_steps"
    runs = ("gradient",)

    def finish(self, subject: Subject) -> list[tuple[float, str, str]]:
        """(share of the parameter that one step moves, its name, how that is made up), the largest first."""
        assert subject.optimizer is not None
        groups = {id(p): group for group in subject.optimizer.param_groups for p in group["params"]}
        plain = any(cls.__name__ == "SGD" for cls in type(subject.optimizer).__mro__)
        found = []
        for name, p in subject.model.named_parameters():
            gradient, rate = subject.gradients.get(name), float(groups.get(id(p), {}).get("lr", 0.0))
            size = float(p.detach().norm())
            if gradient is None or not rate or not size or p.ndim < 2:
                continue  # gains and biases begin at 0 or 1, and have no size of their own to compare with
            step = rate * float(gradient.norm()) if plain else rate * p.numel() ** 0.5
            how = (
                f"lr {number(rate)} x |g| {number(float(gradient.norm()))}"
                if plain
                else f"lr {number(rate)} a number"
            )
            found.append((step / size, name, f"{how} against |w| {number(size)}"))
        return sorted(found, reverse=True)


def step(case: Case, before: Step | None) -> Step:
    """``before``: the first step that failed, None where all is in order."""

    def said(seen: tuple[str, ...], follows: str, ok: bool | None, site: str = "", todo: str = "") -> Step:
        done = "what one optimizer step moves of each weight, from the gradients of this batch"
        return Step(6, TITLE, done if seen else "nothing", seen, follows, ok, site, todo)

    if before is not None:
        return said((), f"not looked at: step {before.number} comes first.", None)
    if case.subject.optimizer is None:
        return said((), "not looked at: no optimizer was given (optimizer=).", None)
    reasons = runs.run_probes(case.subject, [_Steps])
    found = case.subject.measured.get("explained_steps", [])
    if not found:
        return said((), f"not looked at: {next(iter(reasons.values()), 'no weight has a gradient')}.", None)
    seen = tuple(
        f"{name}: one step moves {number(share)} of it ({how})." for share, name, how in found[:SHOWN]
    )
    share, name, _ = found[0]
    if share > LARGE:
        return said(
            seen,
            f"one step replaces {number(share)} of {name}.",
            False,
            name,
            "take a smaller learning rate, or warm up",
        )
    return said(seen, "one step moves little of each weight; the rate is no obvious fault.", True)
