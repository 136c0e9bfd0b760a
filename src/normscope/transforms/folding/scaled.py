"""The folded model on other samples: branches that the sample does not take, and readers that nothing shows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from normscope.doctor.nested import mapped, tensors
from normscope.doctor.wording import clean_path, listed
from normscope.errors import told
from normscope.transforms.agreement import Call, Deviation, distance, first, outputs
from normscope.transforms.folding.carry_out import held
from normscope.transforms.folding.plan import Step

OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled by 10": lambda t: 10 * t,
    "scaled by 100": lambda t: 100 * t,
    "negated": torch.neg,
    "set to zero": torch.zeros_like,
}
"""what becomes of the floating point tensors of the sample"""
ROUNDINGS = 16
"""times what a rounding of every folded weight does to the original, which may be at a threshold there"""


def compare_scaled(
    before: nn.Module,
    after: nn.Module,
    steps: Sequence[Step],
    witnesses: dict[str, None],
    call: Call,
    allowed: float,
) -> tuple[str, ...]:
    """Outputs may move by ``allowed`` of the largest there too, or as far as roundings move them in the original.

    Samples on which the original fails or is not finite are left out, and told. Raises Deviation.
    """
    if not any(t.is_floating_point() for _, t in tensors(call)):
        return ()
    left = []
    for name, change in OTHERS.items():
        other: Call = mapped(call, _of_numbers(change))
        try:
            old = outputs(before, other, "eval")
        except Exception:
            left.append(name)
            continue
        if not all(bool(t.isfinite().all()) for t in old):
            left.append(name)
            continue
        try:
            new = outputs(after, other, "eval")
        except Exception as error:
            raise Deviation(
                f"In eval the folded model fails on the sample {name}: {told(error)}", None
            ) from error
        off = distance(new, old)
        if off <= allowed or off <= ROUNDINGS * _rounded(before, steps, other, old):
            continue
        site = clean_path(first((before, after, None), (other, other), "eval", witnesses, allowed))
        raise Deviation(
            f"{site or 'the model itself'}: the first module whose output deviates. In eval it differs on the sample "
            f"{name}: outputs would be {off:.1e} of the largest away from those before, and {allowed:.1e} is allowed. "
            "Nothing was changed",
            site,
        )
    return (
        (f"not compared on the sample {listed(left, len(OTHERS))}: the model fails or is not finite there",)
        if left
        else ()
    )


def _of_numbers(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: change(tensor) if tensor.is_floating_point() else tensor


def _rounded(model: nn.Module, steps: Iterable[Step], call: Call, old: list[Tensor]) -> float:
    """How far outputs move where each weight that is folded moves by a unit in its last place."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    maps = {one.weight: one for step in steps for one in (*step.maps, *filter(None, [step.centered]))}
    for one in maps.values():
        for name in (one.weight, one.bias) if one.has_bias else (one.weight,):
            tensor = held(moved, name)
            signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor) * 2 - 1
            with torch.no_grad():
                tensor.add_(signs * tensor.abs() * torch.finfo(tensor.dtype).eps)
    return distance(outputs(moved, call, "eval"), old)
