"""Where one side computes in float32: what that makes of the other, and how far the answer then reaches."""

from __future__ import annotations

from dataclasses import replace

from normscope.identify.box import ROUNDOFF
from normscope.identify.compare_fields import READ_OFF
from normscope.identify.compare_sides import ModuleSide, Side


def in_one_precision(a: Side, b: Side) -> tuple[Side, Side]:
    """The two with one eps of the dtype: beside a side of float32 that of float32, in which a module then runs."""
    if max(a.roundoff, b.roundoff) < ROUNDOFF["float32"]:
        return a, b
    return _in_float32(a), _in_float32(b)


def _in_float32(side: Side) -> Side:
    if side.spec is None or side.spec.eps is not None:
        return side
    side = replace(side, spec=side.spec.replace(eps=2 * ROUNDOFF["float32"]))
    if not isinstance(side, ModuleSide):
        return side
    import torch

    from normscope.identify.module_box import box_of_module

    box = box_of_module(side.original, side.boxes["eval"].call, torch.float32)
    boxes = {"train": box.in_mode(True), "eval": box.in_mode(False)}
    return replace(side, boxes=boxes, roundoff=box.roundoff)


def precision(a: Side, b: Side) -> str:
    """The dtype in which the two were compared."""
    return "float64" if max(a.roundoff, b.roundoff) < ROUNDOFF["float32"] else "float32"


def both_fixed(a: Side, b: Side) -> bool:
    """One is a fixed map of every element, and so is the other, found as such or normalizing by stored statistics."""
    maps = [
        side.fixed or (side.spec is not None and side.spec.running is not None and not side.spec.whiten)
        for side in (a, b)
    ]
    return all(maps) and (a.fixed or b.fixed)


def precision_notes(a: Side, b: Side) -> list[str]:
    """What an answer in float32 leaves open."""
    roundoff = max(a.roundoff, b.roundoff)
    if roundoff < ROUNDOFF["float32"]:
        return []
    return [
        "decided to the precision of float32, in which one of them computes: values that differ by less than "
        f"{READ_OFF * roundoff:.1g} of their size are not told apart"
    ]
