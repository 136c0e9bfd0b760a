"""A model's norms against the tensors of a checkpoint: which of their names it lacks, and which names find no norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from normscope.reading import UnknownNormalization, read

if TYPE_CHECKING:
    from normscope.doctor.site import Site

WRAPPERS = ("module.", "_orig_mod.")
"""that data parallelism and ``torch.compile`` put before every name"""
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Lacking:
    """A norm that a checkpoint does not hold all of."""

    site: Site
    names: tuple[str, ...]
    """of its state that are missing: ``running_mean``, ..."""
    held: tuple[str, ...]
    """of its state that are there"""


@dataclass(frozen=True)
class Comparison:
    prefix: str
    """a wrapper's prefix that every name of the checkpoint, or of the model, has and the other has not; "" mostly"""
    loaded: bool | None
    """a tensor that the two have in common has the same values; None where they have none that could tell"""
    lacking: tuple[Lacking, ...]
    strangers: tuple[str, ...]
    """names in the checkpoint that look like a norm's and are not the model's"""


def compare(model: torch.nn.Module, sites: list[Site], state: Mapping[str, torch.Tensor]) -> Comparison:
    """What of the model's norms a checkpoint lacks, and the reverse.

    A norm registered under several names is there if one of them is; so is a tensor that the checkpoint has under
    another name with the same values.
    """
    own = {_bare(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    held = {_bare(name): tensor for name, tensor in state.items()}
    strangers = {name: tensor for name, tensor in held.items() if name not in own}
    names: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    lacking = [
        found
        for site in sites
        if (found := _lacking(site, names, held, list(strangers.values()))) is not None
    ]
    telling = [name for name in own if name in held and _telling(held[name])]
    unknown = [
        name
        for name, tensor in strangers.items()
        if of_a_norm(model, name)
        and not name.endswith(BUFFERS[2])
        and not (_telling(tensor) and any(_equal(mine, tensor) for mine in own.values()))
    ]
    return Comparison(
        prefix=_prefix(list(model.state_dict()), list(state)),
        loaded=any(_equal(own[name], held[name]) for name in telling) if telling else None,
        lacking=tuple(lacking),
        strangers=tuple(unknown),
    )


def of_a_norm(model: torch.nn.Module, name: str) -> bool:
    """Whether a name in a state dict is that of running statistics, or of something that a norm of the model holds."""
    path, _, last = name.rpartition(".")
    if last in BUFFERS:
        return True
    try:
        read(model.get_submodule(path))
    except (AttributeError, UnknownNormalization):
        return False
    return True


def _bare(name: str) -> str:
    """A name without the prefixes of wrappers."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper)
    return name.replace("._orig_mod.", ".")


def _prefix(own: list[str], held: list[str]) -> str:
    for wrapper in WRAPPERS:
        if all(n.startswith(wrapper) for n in held) != all(n.startswith(wrapper) for n in own):
            return wrapper
    return ""


def _lacking(
    site: Site, names: dict[int, list[str]], held: dict[str, torch.Tensor], others: list[torch.Tensor]
) -> Lacking | None:
    missing: list[str] = []
    there: list[str] = []
    for what, tensor in site.tensors.items():
        known = names.get(id(tensor))
        if known is None or what == BUFFERS[2]:
            continue  # computed, or not in any state dict; a counter is NS303's
        elsewhere = any(_telling(other) and _equal(tensor, other) for other in others)
        (there if elsewhere or any(name in held for name in known) else missing).append(what)
    return Lacking(site, tuple(missing), tuple(there)) if missing else None


def _telling(tensor: torch.Tensor) -> bool:
    """Not one number in every place: equality says something."""
    return tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same values, up to a cast."""
    if one.shape != other.shape:
        return False
    other = other.detach().to(one.device, one.dtype)
    return bool(torch.equal(one.detach(), other))


def unmatched(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that only one of a model and a state dict has."""
    own = model.state_dict()
    return [*(name for name in own if name not in state), *(name for name in state if name not in own)]
