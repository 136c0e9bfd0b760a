"""A plan carried out on a copy of a graph, and both run; what does not hold is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normscope.doctor.wording import listed
from normscope.errors import NormscopeError, told
from normscope.transforms.agreement import ALLOWED, VACUOUS, Deviation, distance
from normscope.transforms.folding.checking import HALF_UNITS
from normscope.transforms.onnx_folding.carry_out import NotFinite, fold_into, moved
from normscope.transforms.onnx_folding.plan import Stays, Step, plan
from normscope.transforms.report import Agreement

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

    from normscope.targets.onnx_model import OnnxModel

    Arrays = dict[str, NDArray[Any]]

ROUNDINGS = 16.0
"""by how much more outputs may move than when each number that a fold touches is moved by one unit in the last place:
the fold rounds each once, and adds in another order"""


@dataclass(frozen=True)
class Checked:
    """A folded graph, what of the plan it holds, and how its outputs compare."""

    model: Any
    planned: list[Step | Stays]
    agreements: tuple[Agreement, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> list[Step]:
        return [one for one in self.planned if isinstance(one, Step)]


def check(model: OnnxModel, given: Arrays, *, clone_shared: bool) -> Checked:
    """Plans, folds a copy and compares; a scale that does not hold is left, and the rest planned again.

    Raises Deviation where outputs deviate and no scale can be blamed, and BadTarget for a graph that is broken.
    """
    from normscope.targets.onnx_files import readable  # a floor above

    refused: dict[str, str] = {}
    while True:
        with readable("the graph"):
            checked = Checked(model, plan(model.graph, clone_shared=clone_shared, refused=refused))
            if not checked.steps:
                return checked
            try:
                after = fold_into(model.graph, checked.steps)
            except NotFinite as error:
                culprit = next(step for step in checked.steps if error.layer in step.layers)
                refused[culprit.site] = str(error)
                continue
        folded = _rebuilt(model, after)
        blamed, agreements, notes = _compared(model, folded, checked.steps, given)
        if blamed is None:
            return Checked(folded, checked.planned, agreements, notes)
        refused[blamed[0].site] = blamed[1]


def _rebuilt(model: OnnxModel, proto: ModelProto) -> OnnxModel:
    """A graph beside whose file the same weights lie."""
    graph = model.graph
    return type(model)(type(graph)(proto, folder=graph.folder))


def _compared(
    before: OnnxModel, after: OnnxModel, steps: Sequence[Step], given: Arrays
) -> tuple[tuple[Step, str] | None, tuple[Agreement, ...], tuple[str, ...]]:
    """The first step that does not hold, with what was measured; else how far the outputs are apart."""
    shaken = _rebuilt(before, moved(before.graph, steps))
    witnesses = _witnesses(steps)
    held = [getattr(torch, layer.dtype) for step in steps for layer in step.layers]
    dtype: torch.dtype = max(held, key=lambda one: torch.finfo(one).eps)
    usual = ALLOWED.get(dtype, HALF_UNITS * torch.finfo(dtype).eps)
    word = str(dtype).removeprefix("torch.")
    farthest, site = 0.0, ""
    agreements: tuple[Agreement, ...] = ()
    notes: list[str] = []
    vague: list[str] = []
    for names in before.portions(given, list(witnesses)):
        old, noisy = before.values(given, names), shaken.values(given, names)
        new = _folded_values(after, given, names)
        for name in names:
            off, allowed = distance([new[name]], [old[name]]), _allowed([noisy[name]], [old[name]], usual)
            step = witnesses[name]
            if not off <= allowed:
                what = f"its output would be {off:.1e} of the largest away, and {word} allows {allowed:.1e}"
                return (step, f"undone, the function would change: {what}"), (), ()
            if off > farthest:
                farthest, site = off, step.site
            if _vague(off, allowed, usual):
                vague.append(step.site)
        if not agreements:
            agreements, notes = _outputs(before, old, new, noisy, usual, word)
    if site:
        notes.append(
            f"at the sites themselves values moved by at most {farthest:.1e} of the largest ({site})"
        )
    if vague:
        notes.append(
            f"cannot tell at {listed(vague)}: rounding the numbers that are folded moves values there as much; compare "
            "in float64, or on data of another scale"
        )
    return None, agreements, tuple(notes)


def _witnesses(steps: Sequence[Step]) -> dict[str, Step]:
    """Values that both graphs make, each with the step that would change it first."""
    made = {layer.output: layer.output for step in steps for layer in step.layers}
    for step in steps:
        if step.where == "before":
            made[step.layers[0].output] = step.found.output
    found: dict[str, Step] = {}
    for step in steps:
        for layer in step.layers:
            found.setdefault(made[layer.output], step)
    return found


def _outputs(
    model: OnnxModel,
    old: dict[str, Tensor],
    new: dict[str, Tensor],
    noisy: dict[str, Tensor],
    usual: float,
    word: str,
) -> tuple[tuple[Agreement, ...], list[str]]:
    """How far the graph's outputs are apart; raises Deviation."""
    real = [name for name in model.output_names if old[name].is_floating_point()]
    notes = []
    for name in model.output_names:
        if name not in real and old[name].shape == new[name].shape and old[name].numel():
            same = float((old[name] == new[name]).double().mean())
            notes.append(
                f"output {name} holds no floating point numbers; {same:.1%} of its values are the same"
            )
    if not real:
        return (), notes
    before, after = [old[name] for name in real], [new[name] for name in real]
    allowed = _allowed([noisy[name] for name in real], before, usual)
    agreement = Agreement("eval", word, distance(after, before), allowed)
    if not agreement.difference <= allowed:
        raise Deviation(
            f"the outputs of the folded graph would be {agreement.difference:.1e} of the largest away from those "
            f"before, and {word} allows {allowed:.1e}, although every folded place agrees. Nothing was written. "
            "Something in the graph amplifies roundings: compare it on real data",
            None,
            agreement,
        )
    if not any(bool((t.isfinite() & (t != 0)).any()) for t in before):
        notes.append(
            "cannot tell from the outputs, they are zero or not finite: give inputs that come to something"
        )
    elif _vague(agreement.difference, allowed, usual):
        notes.append(
            f"cannot tell from the outputs: rounding the same numbers moves them so far that {allowed:.1e} is allowed"
        )
    return (agreement,), notes


def _allowed(noisy: list[Tensor], old: list[Tensor], usual: float) -> float:
    noise = distance(noisy, old)
    return max(usual, ROUNDINGS * noise) if noise < float("inf") else usual


def _vague(off: float, allowed: float, usual: float) -> bool:
    """So much is allowed, and used, that a fold which is wrong might pass."""
    return allowed > max(VACUOUS, usual) and off > usual


def _folded_values(after: OnnxModel, given: Arrays, names: list[str]) -> dict[str, Tensor]:
    try:
        return after.values(given, names)
    except (NormscopeError, ValueError) as error:
        raise Deviation(
            f"the folded graph fails where the original runs: {told(error)}. Nothing was written; please "
            "report this graph",
            None,
        ) from error
