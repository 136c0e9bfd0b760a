"""From evaluations and specifications to a verdict: the same, not the same, or why it stays undecided."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from normscope.identify.compare_fields import differences, value_differences
from normscope.identify.compare_precision import both_fixed, precision_notes
from normscope.identify.compare_result import Difference

if TYPE_CHECKING:
    from normscope.identify.compare_sides import Both
    from normscope.spec import NormSpec, Sameness


def by_field(both: Both) -> tuple[list[Difference], list[str]]:
    """In what the specifications and the values that are held differ, and notes. Both specifications are known."""
    assert both.spec_a is not None
    assert both.spec_b is not None
    found, notes = differences(both.spec_a, both.spec_b, both.shape), []
    if not both.settable:
        notes.append("one takes no other parameters: they are compared with the values that they hold")
        found = [d for d in found if d.field not in ("weight", "bias")]
    if both.a.frozen != both.b.frozen:
        one, two = ("stored" if side.frozen else "of the input" for side in (both.a, both.b))
        found.append(Difference("statistics in training", one, two, math.nan, "train"))
    if both.a.held is not None and both.b.held is not None:
        held, roundoff = (both.a.held, both.b.held), max(both.a.roundoff, both.b.roundoff)
        found += value_differences(both.spec_a, both.spec_b, *held, both.shape, roundoff)
    return found, notes


def beyond(both: Both, largest: Mapping[str, float]) -> Difference:
    """What differs where no field does: one is no known normalization, or does more than its specification says.

    ``largest`` holds the largest difference of each mode that is not the same.
    """
    one, two = (side.name if side.spec else f"{side.name}, not known" for side in (both.a, both.b))
    modes = [mode for mode in ("train", "eval") if mode in largest]
    mode = "both" if len(modes) == 2 else next(iter(largest))
    return Difference("beyond the specifications", one, two, max(largest.values()), mode)


def decided(
    both: Both, modes: Mapping[str, bool | None], named: Sequence[Difference], evaluations: int
) -> tuple[bool | None, list[str]]:
    """The verdict, and what to know about it."""
    notes = [
        f"{side.name} is not known as a normalization: {side.reason}"
        for side in (both.a, both.b)
        if side.spec is None
    ]
    verdict = None
    if both.spec_a is not None and both.spec_b is not None:
        verdict = _by_specification(both, both.spec_a, both.spec_b)
        if verdict.conditions:
            notes.append(f"by their specifications {verdict}")
        elif verdict.weight:
            notes.append(f"the same function of their weights with {verdict.weight}")
    if any(same is False for same in modes.values()):
        return False, notes
    if None in modes.values():
        return None, notes
    if "train" not in modes and both_fixed(both.a, both.b):
        fixed = (
            "both are fixed affine maps of each element there, which the evaluations they agree on determine"
        )
        return True, [*notes, fixed, *precision_notes(both.a, both.b)]
    if verdict is None:
        return None, [
            *notes,
            f"they agree on all {evaluations} evaluations, which proves nothing about other inputs",
        ]
    if verdict.same and all(d.mode == "parameters" for d in named):
        return True, [*notes, *_for_this_shape(both), *precision_notes(both.a, both.b)]
    why = verdict.reason
    if verdict.same:
        apart = ", ".join(d.field for d in named if d.mode != "parameters")
        why = f"{apart} differ by more than rounding, by less than shows beside the largest output"
    return None, [*notes, f"undecided: {why}, and no input that was tried shows it"]


def proven(both: Both, modes: Mapping[str, bool | None], same: bool | None) -> bool:
    """Whether a mode in which no input tells the two apart is the same on all inputs: by both specifications, or
    because they are fixed maps; an answer that stays undecided although all modes were compared says no."""
    known = both.spec_a is not None and both.spec_b is not None
    settled = same is not None or None in modes.values()
    return same is True or (settled and (known or both_fixed(both.a, both.b)))


def _for_this_shape(both: Both) -> list[str]:
    """Said where inputs of another shape would tell them apart."""
    assert both.spec_a is not None
    assert both.spec_b is not None
    always = both.spec_a.same_function(both.spec_b)
    told = not always.same and both.settable
    return [f"on inputs of shape {both.shape}; for others {always}"] if told else []


def _by_specification(both: Both, a: NormSpec, b: NormSpec) -> Sameness:
    """Of the factors alone where a side's values are what they are, and were compared."""
    if both.settable:
        return a.same_function(b, shape=both.shape)
    return _any_weight(a).same_function(_any_weight(b), shape=both.shape)


def _any_weight(spec: NormSpec) -> NormSpec:
    """With one number as its weight, which makes up for every convention of the scale."""
    return spec.replace(weight="", bias=None, weight_offset=0.0)
