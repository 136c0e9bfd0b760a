"""A state dict as names with shapes and dtypes, whose values are read one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from normscope.doctor.wording import listed
from normscope.errors import BadInput

if TYPE_CHECKING:
    import torch

PREFERRED = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")
"""where a checkpoint of a training keeps the model, in the order in which they are looked for"""
DEEPEST = 4
"""levels of nested dictionaries in which a state dict is looked for"""


@dataclass(frozen=True)
class Stored:
    """One tensor: what it is, and how to read it."""

    shape: tuple[int, ...]
    dtype: str
    """without the ``torch.`` prefix"""
    read: Callable[[], torch.Tensor]

    @property
    def size(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count


@dataclass
class StoredState:
    tensors: dict[str, Stored]
    source: str = ""
    """the file, for the report"""
    config: Mapping[str, Any] | None = None
    """what the ``config.json`` beside the weights says"""
    notes: list[str] = field(default_factory=list)


def chosen_state(tree: Mapping[Any, Any], what: str) -> tuple[dict[str, Any], list[str]]:
    """The state dict inside nested dictionaries, and what was left out, in words.

    ``tree`` holds tensors, or descriptions of tensors, as leaves with a ``shape``. Tensors at the top are the state
    dict; else the one dictionary that holds tensors by name, or the first of ``PREFERRED`` among several.

    Raises:
        BadInput: nothing with a shape is found under a string.
    """
    notes: list[str] = []
    inside: Any = tree
    for _ in range(DEEPEST):
        here = {k: v for k, v in inside.items() if isinstance(k, str) and hasattr(v, "shape")}
        if here:
            return here, notes
        nests = [k for k, v in inside.items() if isinstance(k, str) and _holds(v)]
        if not nests:
            break
        name = next((p for p in PREFERRED if p in nests), nests[0])
        others = [k for k, v in inside.items() if isinstance(k, str) and k != name and _holds(v, named=False)]
        if others:
            notes.append(f"{what}: checked {name!r}; it also holds {listed([repr(k[:40]) for k in others])}")
        inside = inside[name]
    held = listed(sorted({type(v).__name__ for v in tree.values()})) or "nothing"
    raise BadInput(
        f"{what} holds no named tensors (only {held}); it must hold a state dict, as model.state_dict() gives"
    )


def _holds(tree: Any, *, named: bool = True) -> bool:
    """Whether a tensor stands in here, at most ``DEEPEST`` levels down; dictionaries may be shared.

    ``named``: under strings, as in a state dict; an optimizer numbers its tensors.
    """
    level, seen = [tree], set[int]()
    for _ in range(DEEPEST):
        below = []
        for one in level:
            if not isinstance(one, Mapping) or id(one) in seen:
                continue
            seen.add(id(one))
            values = [value for key, value in one.items() if isinstance(key, str) or not named]
            if any(hasattr(value, "shape") for value in values):
                return True
            below += values
        level = below
    return False


def in_memory(state: Mapping[Any, Any]) -> StoredState:
    """A state dict that is loaded already: tensors, or NumPy arrays.

    Raises:
        BadInput: it holds no tensor by name.
    """
    import numpy as np
    import torch

    found, notes = chosen_state(state, "the state dict")
    tensors: dict[str, Stored] = {}
    for name, value in found.items():
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "fiub":
                continue
            value = torch.from_numpy(np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="))))
        if not isinstance(value, torch.Tensor):
            continue
        tensors[name] = Stored(tuple(value.shape), str(value.dtype).removeprefix("torch."), value.detach)
    if not tensors:
        raise BadInput("the state dict holds no tensors; pass what model.state_dict() gives")
    return StoredState(tensors, notes=notes)
