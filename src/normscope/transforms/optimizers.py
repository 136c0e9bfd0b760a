"""An optimizer goes on after a transform has replaced parameters of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normscope.doctor import arguments
from normscope.doctor.refusals import unwrap
from normscope.doctor.wording import clean_path, listed, plural
from normscope.errors import BadInput

Optimizer = torch.optim.Optimizer | None
Named = dict[str, Tensor]


def checked(optimizer: Optimizer, model: nn.Module, *, inplace: bool) -> None:
    """Whether an optimizer can follow a transform of this model.

    Raises:
        BadInput: it is no optimizer, a copy is transformed, it holds nothing of the model, or it keeps all parameters
            as one vector.
    """
    if optimizer is None:
        return
    arguments.settings(optimizer, None, None, "")
    if not inplace:
        raise BadInput(
            "an optimizer holds the parameters of this model, and without inplace=True a copy is changed: pass both, "
            "or make a new optimizer for the result"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadInput(
            "LBFGS remembers all parameters as one vector, out of which none can be taken: make a new one for the "
            "result"
        )
    mine = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
        raise BadInput("the optimizer holds no parameter of this model: is it that of another copy?")


def named(model: nn.Module) -> Named:
    """Every parameter, under each of its names."""
    return {clean_path(name): p for name, p in unwrap(model).named_parameters(remove_duplicate=False)}


def follow(
    optimizer: torch.optim.Optimizer, before: Named, model: nn.Module, beside: Mapping[str, str] | None = None
) -> None:
    """Make the optimizer hold the parameters that the model has now.

    Those that stayed keep their state, group and place. Those that are gone leave it with their state. A new one joins
    the group of what had its name, or of the parameter that ``beside`` names for it, without a state; where there is
    none, it is left out. Groups stay, also empty ones, which schedulers count.

    Args:
        before: `named` of the model as it was.
        beside: name of a new parameter -> name of one whose group it joins.
    """
    now = named(model)
    held, known = ({id(p) for p in names.values()} for names in (now, before))
    new: dict[int, list[tuple[str, Tensor]]] = {}
    for name, like in _joining(before, now, beside or {}).items():
        if like is not None:
            new.setdefault(id(like), []).append((name, now[name]))
    for group in optimizer.param_groups:
        joining = [one for p in group["params"] for one in new.get(id(p), ())]
        stays = [id(p) in held or id(p) not in known for p in group["params"]]
        for parameter, stay in zip(group["params"], stays, strict=True):
            if not stay:
                optimizer.state.pop(parameter, None)
        _refill(group, "params", stays, [p for _, p in joining])
        if "param_names" in group:
            _refill(group, "param_names", stays, [name for name, _ in joining])


def told(
    optimizer: Optimizer, before: Named, now: Named, beside: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """What becomes of an optimizer, for a report; ``now`` may be `named` of a copy."""
    if optimizer is None:
        return ()
    groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
    gone = list({id(p): name for name, p in before.items() if name not in now and id(p) in groups}.values())
    joining = _joining(before, now, beside or {}, by_name=True)
    joined = [name for name, like in joining.items() if like is not None and id(like) in groups]
    out = [name for name in joining if name not in joined]
    parts = [f"{plural(len(gone), 'parameter')} gone from it ({listed(gone)})"] if gone else []
    if joined:
        parts.append(f"{plural(len(joined), 'new parameter')} in it ({listed(joined)})")
    if out:
        parts.append(f"not in it, so not trained by it: {listed(out)}, see add_param_group")
    return (f"optimizer: {'; '.join(parts) or 'all parameters stay in it'}",)


def _joining(
    before: Named, now: Named, beside: Mapping[str, str], *, by_name: bool = False
) -> dict[str, Tensor | None]:
    """Name of each new parameter, once -> the one whose group it joins. ``by_name``: ``now`` is of a copy."""
    known = {id(p) for p in before.values()}
    seen: set[int] = set()
    found: dict[str, Tensor | None] = {}
    for name, parameter in now.items():
        new = name not in before if by_name else id(parameter) not in known
        if new and id(parameter) not in seen:
            seen.add(id(parameter))
            like = before.get(name)
            found[name] = before.get(beside.get(name, "")) if like is None else like
    return found


def _refill(group: dict[str, Any], key: str, stays: list[bool], more: list[Any]) -> None:
    """In place: other objects may hold the list."""
    group[key][:] = [one for one, stay in zip(group[key], stays, strict=True) if stay] + more
