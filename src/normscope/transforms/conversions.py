"""One normalization layer made into another kind: what is carried over, and what is refused and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import normscope.nn as own
from normscope.errors import BadInput
from normscope.transforms.frozen import frozen_parts

MOST_GROUPS = 32
"""as in Wu and He 2018"""
BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
RENORM = (own.BatchRenorm1d, own.BatchRenorm2d, own.BatchRenorm3d)
GHOST = (own.GhostBatchNorm1d, own.GhostBatchNorm2d, own.GhostBatchNorm3d)
SYNC = (nn.SyncBatchNorm, own.SyncBatchNorm)
OF_BATCHES = (*BATCH, *RENORM, *GHOST, *SYNC)
"""those whose training normalizes by the batch and stores it"""
KNOWN: tuple[type, ...] = (
    *OF_BATCHES, *INSTANCE, nn.GroupNorm,
    own.BatchNorm1d, own.BatchNorm2d, own.BatchNorm3d,
    own.InstanceNorm1d, own.InstanceNorm2d, own.InstanceNorm3d,
    own.GroupNorm, own.ChannelsFirstLayerNorm, own.FrozenBatchNorm,
)  # fmt: skip
"""exactly these classes: a subclass has code of its own, which would be gone"""
UNTOLD = "does not tell how many axes its input has: give a sample"
Made = nn.Module | str
"""the new layer, or the reason why there is none"""


@dataclass(frozen=True)
class Old:
    """What is there."""

    module: Any
    shapes: tuple[tuple[int, ...], ...]
    """of its inputs on the sample; empty without one"""
    groups: int | None = None
    size: int | None = None
    """of virtual batches"""
    remainder: str = "error"

    @property
    def channels(self) -> int:
        """Size of axis 1."""
        module = self.module
        if isinstance(module, nn.GroupNorm):
            return int(module.num_channels)
        if isinstance(module, nn.LayerNorm):
            return int(module.normalized_shape[0])
        return int(module.num_features)

    @property
    def ndim(self) -> int | None:
        """Axes of its input with the batch axis; None where neither the class nor a sample tells."""
        if self._class_dims is not None and (self._class_dims > 1 or isinstance(self.module, INSTANCE)):
            return self._class_dims + 2
        return len(self.shapes[0]) if self.shapes else None

    @property
    def dims(self) -> int | None:
        """1, 2 or 3, as in the name of a batch norm; None where neither the class nor a sample tells."""
        if self._class_dims is not None:
            return self._class_dims
        return max(len(self.shapes[0]) - 2, 1) if self.shapes else None

    @property
    def _class_dims(self) -> int | None:
        for kinds in (BATCH, INSTANCE, RENORM, GHOST):
            for dims, kind in enumerate(kinds, start=1):
                if isinstance(self.module, kind):
                    return dims
        return None

    @property
    def positions_certain(self) -> bool:
        """Whether every input has positions beside samples and channels."""
        if self.shapes:
            return all(len(shape) > 2 and _size(shape[2:]) > 1 for shape in self.shapes)
        return self.ndim is not None


def groups_of(channels: int) -> int:
    """The rule: as many groups as divide the channels, at most 32, with at least two channels each; else one.

    >>> [groups_of(c) for c in (64, 32, 48, 6, 7, 1)]
    [32, 16, 24, 3, 1, 1]
    """
    return max((g for g in range(1, MOST_GROUPS + 1) if channels % g == 0 and channels >= 2 * g), default=1)


def make(to: str, old: Old) -> Made:
    """The layer of another kind in place of ``old``, with its gain, bias, eps, flags, dtype and device."""
    module = old.module
    if frozen_parts(module):
        return "is frozen: unfreeze it first"
    if type(module) not in KNOWN:
        return f"is a {type(module).__qualname__}, whose own code would be dropped"
    if _has_hooks(module):
        return "has hooks, which belong to the module that it is: remove them first"
    try:
        made = KINDS[to](old)
    except BadInput as error:  # an eps of 0, or positions that virtual batches cannot have
        return str(error)
    if isinstance(made, nn.Module):
        told = isinstance(made, nn.GroupNorm) or (isinstance(made, GHOST) and repr(made) != repr(module))
        if type(made) is type(module) and not told:
            return f"is a {type(made).__name__} already"
        _carry(module, made)
    return made


def _group(old: Old) -> Made:
    channels = old.channels
    groups = groups_of(channels) if old.groups is None else old.groups
    if channels % groups:
        return f"has {channels} channels, which {groups} groups do not divide"
    if channels == groups and not old.positions_certain:
        return "would have one channel a group, and no positions are certain: sets of one element"
    if isinstance(old.module, nn.GroupNorm) and old.module.num_groups == groups:
        return f"is a group norm of {groups} groups already"
    made: nn.Module = _home(old).GroupNorm(
        groups, channels, old.module.eps, _affine(old.module), **_place(old.module)
    )
    return made


def _layer(old: Old) -> Made:
    if old.channels == 1:
        return "has one channel, so every position would be a set of one element"
    return own.ChannelsFirstLayerNorm(old.channels, old.module.eps, _affine(old.module), **_place(old.module))


def _instance(old: Old) -> Made:
    if old.ndim is None or old.ndim < 3:
        return "may get inputs (N, C), which an instance norm takes for one sample; give a sample that shows (N, C, L)"
    if not old.positions_certain:
        return "has one position on the sample, so every set would have one element"
    kind = getattr(_home(old), f"InstanceNorm{old.ndim - 2}d")
    made: nn.Module = kind(old.channels, old.module.eps, affine=_affine(old.module), **_place(old.module))
    return made


def _batch(old: Old) -> Made:
    if old.dims is None:
        return UNTOLD
    home = nn if isinstance(old.module, (*RENORM, *GHOST)) else _home(old)
    return _of_batches(getattr(home, f"BatchNorm{old.dims}d"), old)


def _renorm(old: Old) -> Made:
    return UNTOLD if old.dims is None else _of_batches(getattr(own, f"BatchRenorm{old.dims}d"), old)


def _ghost(old: Old) -> Made:
    if old.dims is None:
        return UNTOLD
    updates = getattr(old.module, "updates", "each")
    virtual = {"size": old.size, "remainder": old.remainder, "updates": updates}
    return _of_batches(getattr(own, f"GhostBatchNorm{old.dims}d"), old, **virtual)


def _of_batches(kind: Any, old: Old, **more: Any) -> nn.Module:
    momentum = getattr(old.module, "momentum", 0.1)
    made: nn.Module = kind(
        old.channels, old.module.eps, momentum, _affine(old.module), **more, **_place(old.module)
    )
    return made


def _sync(old: Old) -> Made:
    if not isinstance(old.module, OF_BATCHES):
        return "is no batch norm"
    module = old.module
    kind: Any = own.SyncBatchNorm if type(module).__module__.startswith(own.__name__) else nn.SyncBatchNorm
    made: nn.Module = kind(
        module.num_features, module.eps, module.momentum, _affine(module), **_place(module)
    )
    return made


def _frozen(old: Old) -> Made:
    if not isinstance(old.module, OF_BATCHES) or old.module.running_mean is None:
        return "stores no statistics of batches that could be frozen"
    return own.FrozenBatchNorm(old.channels, old.module.eps, **_place(old.module))


def _ours(old: Old) -> Made:
    if type(old.module).__module__.startswith(own.__name__):
        return "is a layer of normscope.nn already"
    return _counterpart(old, own, "normscope.nn")


def _torch(old: Old) -> Made:
    if type(old.module).__module__.startswith(nn.__name__):
        return "is a layer of torch.nn already"
    if getattr(old.module, "running_correction", 1) != 1:
        return "stores a biased variance, which no layer of torch.nn does"
    return _counterpart(old, nn, "torch.nn")


def _counterpart(old: Old, home: Any, called: str) -> Made:
    module = old.module
    kind = getattr(home, type(module).__name__, None)
    if kind is None:
        return f"has no counterpart in {called}"
    if isinstance(module, nn.GroupNorm):
        made: nn.Module = kind(
            module.num_groups, module.num_channels, module.eps, _affine(module), **_place(module)
        )
        return made
    state = (module.momentum, _affine(module), module.track_running_stats)
    over = {"process_group": module.process_group} if isinstance(module, SYNC) else {}
    made = kind(module.num_features, module.eps, *state, **over, **_place(module))
    return made


KINDS: dict[str, Callable[[Old], Made]] = {
    "group": _group,
    "layer": _layer,
    "instance": _instance,
    "batch": _batch,
    "sync": _sync,
    "frozen": _frozen,
    "renorm": _renorm,
    "ghost": _ghost,
    "ours": _ours,
    "torch": _torch,
}
SAME = ("ours", "torch")
"""whose layers compute what those before computed"""


def _carry(old: Any, new: Any) -> None:
    """Parameters as the objects they are, statistics where both store them, and the mode."""
    for name in ("weight", "bias"):
        held = getattr(old, name, None)
        if name in new._buffers:
            if held is not None:
                new._buffers[name] = held.detach().clone()
        elif isinstance(held, nn.Parameter) or held is None:
            setattr(new, name, held)
        else:  # a buffer of a frozen norm
            setattr(new, name, nn.Parameter(held.detach().clone()))
    untracked = isinstance(old, OF_BATCHES) and old.running_mean is None
    alike = isinstance(old, OF_BATCHES) and isinstance(new, OF_BATCHES)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        held = getattr(old, name, None)
        if isinstance(held, Tensor) and (alike or new._buffers.get(name) is not None):
            new._buffers[name] = held.detach().clone()
        elif untracked and alike and not isinstance(new, RENORM):  # which cannot do without
            new._buffers[name] = None
    if alike and not (untracked and isinstance(new, RENORM)):
        new.track_running_stats = old.track_running_stats
    for name in ("float32_statistics", "running_correction"):
        if hasattr(old, name) and hasattr(new, name):
            setattr(new, name, getattr(old, name))
    new.train(old.training)


def _home(old: Old) -> Any:
    """normscope.nn for a layer of it that torch.nn has too."""
    kind = type(old.module)
    return own if kind.__module__.startswith(own.__name__) and hasattr(nn, kind.__name__) else nn


def _affine(module: Any) -> bool:
    return getattr(module, "weight", None) is not None or getattr(module, "bias", None) is not None


def _place(module: nn.Module) -> dict[str, Any]:
    held = next((t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()), None)
    return {} if held is None else {"device": held.device, "dtype": held.dtype}


def _has_hooks(module: nn.Module) -> bool:
    return any(value for name, value in vars(module).items() if name.endswith("_hooks"))


def _size(sizes: tuple[int, ...]) -> int:
    return int(torch.Size(sizes).numel())
