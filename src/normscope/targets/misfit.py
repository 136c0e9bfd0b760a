"""Why weights do not fit a model, in a few lines: names that one of the two lacks, other shapes, the likely fix."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.parameter import is_lazy

from normscope.doctor.wording import listed, plural


def misfit(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> str:
    """What is in the way, one line each, and what to do; "" where names and shapes are those of the model.

    >>> print(misfit(torch.nn.Linear(4, 3), {"weight": torch.ones(5, 4), "gain": torch.ones(3)}))
    1 name of the model is missing: bias
    1 name is not the model's: gain
    1 tensor has another shape: weight is (5, 4), in the model (3, 4)
    Build the model with the settings that these weights were saved with.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in tensors]
    strange = [name for name in tensors if name not in own]
    apart = other_shapes(own, tensors)
    shapes = [f"{n} is {tuple(tensors[n].shape)}, in the model {tuple(own[n].shape)}" for n in apart]
    lines = [
        f"{plural(len(missing), 'name')} of the model {_is(missing)} missing: {listed(missing)}",
        f"{plural(len(strange), 'name')} {_is(strange)} not the model's: {listed(strange)}",
        f"{plural(len(apart), 'tensor')} {'has' if len(apart) == 1 else 'have'} another shape: {listed(shapes)}",
    ]
    said = [line for line, found in zip(lines, (missing, strange, apart), strict=True) if found]
    return "\n".join([*said, _fix(own, tensors)]) if said else ""


def other_shapes(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that both have, of tensors with different shapes."""
    return [n for n, t in tensors.items() if n in own and not is_lazy(own[n]) and own[n].shape != t.shape]


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _fix(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> str:
    if prefix := _prefix(tensors, own):
        return f"All names of the model stand there behind {prefix!r}: take it off, or name the model that has it."
    if prefix := _prefix(own, tensors):
        return f"All names stand in the model behind {prefix!r}: put it before them, or name that part of the model."
    if not any(name in own for name in tensors):
        return "Not one name is the model's: name the model that these weights were saved from."
    return "Build the model with the settings that these weights were saved with."


def _prefix(longer: Mapping[str, torch.Tensor], shorter: Mapping[str, torch.Tensor]) -> str:
    """What stands before every name of one, with the shapes, in the other; "" where nothing does, or more than one."""
    first = next(iter(shorter), "")
    starts = [name.removesuffix(first) for name in longer if first and name.endswith(f".{first}")]
    fit = [s for s in starts if all(_alike(longer.get(s + name), t) for name, t in shorter.items())]
    return fit[0] if len(fit) == 1 else ""


def _alike(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and (is_lazy(one) or is_lazy(other) or one.shape == other.shape)
