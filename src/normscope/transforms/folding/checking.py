"""A plan carried out on copies, in float64 and in the model's dtype; what does not hold is taken back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from normscope.doctor.folding.obstacles import Obstacle
from normscope.doctor.nested import mapped
from normscope.doctor.refusals import Refused, unwrap
from normscope.doctor.wording import clean_path
from normscope.errors import BadInput, ModelError, shortened, told
from normscope.identify.float64_copy import Float32AsFloat64
from normscope.transforms.agreement import ALLOWED, Deviation, compare
from normscope.transforms.folding.carry_out import fold_into
from normscope.transforms.folding.plan import Stays, Step
from normscope.transforms.folding.scaled import compare_scaled
from normscope.transforms.report import Agreement

Model = TypeVar("Model", bound=nn.Module)
Call = tuple[tuple[Any, ...], dict[str, Any]]
EVAL = {"eval": "eval"}
"""the only mode in which a folded norm has a counterpart"""

HALF_UNITS = 16
"""of the largest output: beside the activations the new weights are rounded, and where a bias and a sum cancel, outputs
are smaller than both. That the algebra holds has been seen in float64"""


@dataclass(frozen=True)
class Checked:
    """A folded copy, and what of the plan it holds."""

    model: Any
    planned: list[Step | Stays]
    agreements: tuple[Agreement, ...]
    notes: tuple[str, ...]
    made: dict[str, str]
    """names of biases that had to be made, each with that of its weight"""


def check(model: Model, planned: Sequence[Step | Stays], copies: Sequence[str], call: Call) -> Checked:
    """Folds a copy of ``model`` and compares; what does not hold is undone, one step after another.

    Raises Deviation where outputs deviate and no step can be blamed, and Refused where there is nothing to compare.
    """
    planned = list(planned)
    while steps := [one for one in planned if isinstance(one, Step)]:
        try:
            after, made, agreements, notes = _tried(model, steps, copies, call)
        except Deviation as error:
            blamed, why = _blamed(model, steps, copies, call, error)
            undone = Stays(blamed.site, blamed.before, Obstacle(_measured(why)))
            planned = [undone if one is blamed else one for one in planned]
        else:
            return Checked(after, planned, agreements, notes, made)
    return Checked(model, planned, (), (), {})


def _tried(
    model: Model, steps: Sequence[Step], copies: Sequence[str], call: Call
) -> tuple[Model, dict[str, str], tuple[Agreement, ...], tuple[str, ...]]:
    """A folded copy, the biases made in it, and how it compares; raises Deviation."""
    witnesses = {step.witness: None for step in steps}
    exact, doubts = _in_float64(unwrap(model), steps, copies, call, witnesses)
    after = copied(model)
    made = fold_into(unwrap(after), steps, copies)
    own, notes = compare(unwrap(model), unwrap(after), witnesses, *call, modes=EVAL, half_units=HALF_UNITS)
    if not own:
        raise Refused(
            "the model returns no floating point tensor, so a fold cannot be checked: fold the part of it that returns "
            "scores"
        )
    scaled: tuple[str, ...] = ()
    if not exact:
        scaled = compare_scaled(unwrap(model), unwrap(after), steps, witnesses, call, own[0].allowed)
    return after, made, exact + own, tuple(dict.fromkeys((*doubts, *notes, *scaled)))


def _blamed(
    model: Model, steps: Sequence[Step], copies: Sequence[str], call: Call, error: Deviation
) -> tuple[Step, Deviation]:
    """The step that deviates alone, looked for first where outputs begin to deviate; it may have acted from afar."""
    suspects = sorted(steps, key=lambda step: clean_path(step.witness) != error.site)
    for step in suspects if len(steps) > 1 else ():
        try:
            _tried(model, [step], copies, call)
        except Deviation as alone:
            return step, alone
    if clean_path(suspects[0].witness) != error.site and len(steps) > 1:
        raise error
    return suspects[0], error


def copied(model: Model) -> Model:
    """Raises BadInput where it cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        reason = shortened(told(error), lines=1, width=100)
        raise BadInput(
            f"{type(model).__name__} cannot be copied ({reason}), and a fold is tried on a copy first: drop cached "
            "activations and open handles"
        ) from error


def _in_float64(
    model: nn.Module, steps: Sequence[Step], copies: Sequence[str], call: Call, witnesses: dict[str, None]
) -> tuple[tuple[Agreement, ...], tuple[str, ...]]:
    """In float64 the algebra shows without roundings: casts to float32 in a forward are float64 too."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    before = copied(model).double()
    after = copied(before)
    fold_into(after, steps, copies)
    exact_call = mapped(call, wide)
    try:
        with Float32AsFloat64():
            found, notes = compare(before, after, witnesses, *exact_call, modes=EVAL)
    except ModelError as error:
        return (), (f"not checked in float64: {error}",)
    except Deviation as error:
        off = error.agreement
        if off is None or not off.deviation <= ALLOWED[torch.float32]:
            raise
        # an operator that computes in float32 whatever comes in; the comparison in the model's dtype decides
        found, notes = (
            (off,),
            (
                f"something in the model computes in float32: in float64 outputs moved by {off.deviation:.1e} of the "
                "largest, as roundings of float32 do",
            ),
        )
    if not found:
        return found, notes
    allowed = found[0].allowed if found[0].deviation <= found[0].allowed else ALLOWED[torch.float32]
    with Float32AsFloat64():
        return found, (*notes, *compare_scaled(before, after, steps, witnesses, exact_call, allowed))


def _measured(error: Deviation) -> str:
    if error.__cause__ is not None:
        return f"undone: with it folded the model fails ({told(error.__cause__)})"
    text = str(error).partition(". In ")[2].partition(". Nothing was changed")[0]
    return f"undone, the function would change: in {text}"
