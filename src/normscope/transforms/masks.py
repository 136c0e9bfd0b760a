"""Which elements of a batch count, and where they lie in what comes into a norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normscope.doctor.nested import mapped, tensors
from normscope.errors import BadInput, told
from normscope.spec import NormSpec
from normscope.spec.bound import BoundSpec
from normscope.spec.pattern import tokenize

Mask = Callable[[Any], Any] | str | Tensor | Sequence[Tensor] | None
"""a function of a batch, the key of a batch that is a dict, one mask for data of one batch, or one a batch"""
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Valid:
    """The mask of one batch."""

    mask: Tensor
    """boolean, True where an element counts; axis 0 is samples unless it has the axes of what it is laid on"""
    shapes: tuple[tuple[int, ...], ...]
    """of the floating point inputs of the batch"""

    def cleaned(self, inputs: Inputs) -> Inputs:
        """The inputs with 0 where the mask is False; with 0 for NaN where it does not fit them, whose axes may stand in
        another order. For looking at, not for the model."""

        def clean(t: Tensor) -> Tensor:
            if not (t.is_floating_point() or t.is_complex()):
                return t
            mask = _over_leading(self.mask, t)
            return t.masked_fill(t.isnan() if mask is None else ~mask.to(t.device), 0)

        args, kwargs = mapped(inputs, clean)
        return args, kwargs

    def placed(self, shape: tuple[int, ...], spec: NormSpec) -> Tensor | str:
        """The mask so that it broadcasts to a norm's input of this shape, or why it has no place there.

        A mask of as many axes lies as it is, where it is alike for all features, or has the shape of an input of the
        model. Any other has samples on axis 0 and steps or positions, in their order, on the rest.

        >>> from normscope.spec import families
        >>> valid = Valid(torch.ones(4, 7, dtype=torch.bool), ())
        >>> valid.placed((4, 3, 7), families.batch_norm()).shape
        torch.Size([4, 1, 7])
        >>> valid.placed((4, 3, 5), families.batch_norm())
        'the mask (4, 7) has no place in its input (4, 3, 5): of b and ...0, axes of 4 and 5, none takes them'
        """
        bound = spec.bind(shape)
        features = _features(spec, bound)
        found = [self.mask] if self._as_it_is(shape, bound, features) else []
        found += _by_axes(self.mask, bound, features)
        if not found:
            rest = [axis for axis in bound.axes if axis.name not in features]
            names, sizes = (" and ".join(str(getattr(a, k)) for a in rest) for k in ("name", "size"))
            folded = self.mask.ndim > 1 and self.mask.numel() in (axis.size for axis in rest)
            why = (
                "it is as large, and not alike along the axis of features; give one of size 1 there"
                if tuple(self.mask.shape) == shape
                else f"axis of {self.mask.numel()} may hold its axes in either order; give a mask of that one axis"
                if folded
                else f"of {names}, axes of {sizes}, none takes them"
            )
            return f"the mask {tuple(self.mask.shape)} has no place in its input {shape}: {why}"
        first = found[0].expand(shape)
        if any(not torch.equal(other.expand(shape), first) for other in found[1:]):
            return (
                f"the mask {tuple(self.mask.shape)} fits its input {shape} in {len(found)} ways; give one with "
                f"{len(shape)} axes, of size 1 where it is alike"
            )
        return found[0]

    def _as_it_is(self, shape: tuple[int, ...], bound: BoundSpec, features: set[str]) -> bool:
        mask = tuple(self.mask.shape)
        if len(mask) != len(shape) or any(a not in (1, b) for a, b in zip(mask, shape, strict=True)):
            return False
        own = {axis.dim for axis in bound.axes if axis.name in features and axis.size > 1}
        return mask in self.shapes or all(self._alike(dim) for dim in own)

    def _alike(self, dim: int) -> bool:
        return bool((self.mask == self.mask.narrow(dim, 0, 1)).all())


def resolved(mask: Mask, batch: Any, number: int, inputs: Inputs, *, only: bool) -> Valid | None:
    """The mask of the batch with this number. ``only``: it is all the data.

    Raises:
        BadInput: there is none for this batch, or it is not boolean.
    """
    if mask is None:
        return None
    found = _found(mask, batch, number, only)
    try:
        tensor = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"a mask is a boolean tensor; got {type(found).__name__}: {told(error)}") from error
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    if tensor.ndim == 0 or not (whole and bool(((tensor == 0) | (tensor == 1)).all())):
        raise BadInput(
            f"a mask is boolean, True where an element counts, or holds 0 and 1; got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}. Compare first: lengths > position"
        )
    shapes = tuple(tuple(t.shape) for _, t in tensors(inputs) if t.is_floating_point())
    return Valid(tensor.bool().detach(), shapes)


def _found(mask: Any, batch: Any, number: int, only: bool) -> Any:
    if isinstance(mask, str):
        if isinstance(batch, Mapping) and mask in batch:
            return batch[mask]
        held = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise BadInput(f"mask={mask!r} is the key of a batch that is a dict, and batch {number} holds {held}")
    if isinstance(mask, (Tensor, np.ndarray)):
        if only:
            return mask
        raise BadInput(
            "mask is one tensor and data are batches: give a list of as many masks, or mask=lambda batch: ..."
        )
    if callable(mask):
        try:
            return mask(batch)
        except Exception as error:
            raise BadInput(f"mask failed on batch {number}: {told(error)}") from error
    if not isinstance(mask, Sequence):
        raise BadInput(
            f"mask is a function of a batch, a key of it, a tensor or a list of them; got {type(mask).__name__}"
        )
    if number >= len(mask):
        raise BadInput(f"mask holds {len(mask)} masks, and there are more batches")
    return mask[number]


def _features(spec: NormSpec, bound: BoundSpec) -> set[str]:
    """The axes that statistics are stored on, steps aside."""
    names = {name for group in tokenize(spec.running_axes) for name in group}
    return {axis.name for axis in bound.axes if axis.name in names and axis.name != "t"}


def _by_axes(mask: Tensor, bound: BoundSpec, features: set[str]) -> list[Tensor]:
    """Every way to lay samples on the samples' axis, and the other axes, in order, on what are no features."""
    if bound.sample_dim is None or bound.ragged:
        return []
    if mask.ndim > 1:
        mask = mask.reshape(mask.shape[0], *(size for size in mask.shape[1:] if size != 1))
    axes = bound.axes
    samples = [i for i, a in enumerate(axes) if a.dim == bound.sample_dim and a.name not in (*features, "t")]
    rest = [i for i, axis in enumerate(axes) if i not in samples and axis.name not in features]
    split = [axes[i].size for i in samples]
    if mask.shape[0] != int(np.prod(split)):
        return []
    found = []
    for places in combinations(rest, mask.ndim - 1):
        if tuple(axes[i].size for i in places) != tuple(mask.shape[1:]):
            continue
        at = [*samples, *places]
        order = sorted(range(len(at)), key=at.__getitem__)
        laid = mask.reshape(*split, *mask.shape[1:]).permute(order)
        laid = laid.reshape([axes[i].size if i in at else 1 for i in range(len(axes))])
        found.append(_joined(laid, bound))
    return found


def _joined(laid: Tensor, bound: BoundSpec) -> Tensor:
    """From elementary axes to those of the input, of size 1 where the mask is alike."""
    dims: dict[int, list[int]] = {}
    for i, axis in enumerate(bound.axes):
        dims.setdefault(axis.dim, []).append(i)
    sizes, joined = list(laid.shape), []
    for parts in dims.values():
        if any(sizes[i] > 1 for i in parts):
            for i in parts:
                sizes[i] = bound.axes[i].size
        joined.append(int(np.prod([sizes[i] for i in parts])))
    return laid.expand(sizes).reshape(joined)


def _over_leading(mask: Tensor, t: Tensor) -> Tensor | None:
    """The mask on an input of the model: on its leading axes, on its first and its last, or as it is."""
    if t.ndim == mask.ndim:
        return mask if all(a in (1, b) for a, b in zip(mask.shape, t.shape, strict=True)) else None
    if t.ndim < mask.ndim:
        return None
    between = [1] * (t.ndim - mask.ndim)
    if t.shape[: mask.ndim] == mask.shape:
        return mask.reshape(*mask.shape, *between)
    if (t.shape[0], *t.shape[t.ndim - mask.ndim + 1 :]) == tuple(mask.shape):
        return mask.reshape(mask.shape[0], *between, *mask.shape[1:])
    return None
