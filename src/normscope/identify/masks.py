"""Whether a module that takes a mask, or lengths, honours it: what is masked must not reach what is not."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from normscope.errors import ModelError
from normscope.identify.module_box import ModuleBox
from normscope.identify.result import Evidence

MASKS = (
    "mask",
    "attention_mask",
    "padding_mask",
    "key_padding_mask",
    "pad_mask",
    "input_mask",
    "x_mask",
    "masks",
)
LENGTHS = ("lengths", "lens", "input_lengths", "seq_lens", "seq_lengths", "length", "x_lengths")


@dataclass(frozen=True)
class Trial:
    """One way to say which elements count."""

    form: str
    value: torch.Tensor
    everything: torch.Tensor
    """the value of the same form that masks nothing"""
    valid: NDArray[np.bool_]
    """broadcast to the input"""


@dataclass(frozen=True)
class MaskFinding:
    """What a mask argument does."""

    honoured: bool
    """content under the mask leaves valid outputs as they were"""
    evidence: Evidence


def mask_argument(module: nn.Module) -> str | None:
    """The name of the argument of ``forward`` that says which elements count."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return None
    return next((name for name in names if name in MASKS + LENGTHS), None)


def probe_mask(box: ModuleBox, argument: str) -> MaskFinding | None:
    """Try the usual shapes and senses of a mask; None where the module takes none of them.

    A form is honoured where other content under the mask leaves every valid output bit for bit as it was, while the
    mask itself makes a difference.
    """
    random = np.random.default_rng(51)
    x = random.standard_normal(box.shape) + 0.5
    taken: list[tuple[Trial, float, float]] = []
    for trial in _trials(argument, box.shape):
        other = np.where(trial.valid, x, 7 + 3 * random.standard_normal(box.shape))
        try:
            masked = _passing(box, argument, trial.value)
            one, two = masked(x), masked(other)
            everything = _passing(box, argument, trial.everything)(x)
        except ModelError:
            continue
        erased = trial.valid & (one == 0) & (everything != 0) if one.shape == box.shape else np.True_
        if erased.any() or not everything.any():  # another form or sense is meant
            continue
        leak = float(np.max(np.abs(one - two)[trial.valid]))
        effect = float(np.max(np.abs(one - everything)[trial.valid]))
        taken.append((trial, leak, effect))
        if leak == 0 and effect > 0:
            return _finding(argument, trial, leak, effect)
    return _finding(argument, *min(taken, key=lambda found: found[1])) if taken else None


def _finding(argument: str, trial: Trial, leak: float, effect: float) -> MaskFinding:
    if leak == 0 and effect > 0:
        what = f"{argument} is honoured ({trial.form}): what is masked does not reach what is valid"
    elif leak == 0:
        what = f"{argument} makes no difference to valid outputs, and other content under it neither"
    else:
        what = f"{argument} is not honoured: content under the mask changes valid outputs"
    evidence = Evidence(
        what,
        f"two inputs that differ only under the mask ({trial.form})",
        {"largest change of a valid output": leak, "largest effect of the mask": effect},
    )
    return MaskFinding(leak == 0, evidence)


def with_everything_valid(box: ModuleBox) -> ModuleBox:
    """The box with a mask that masks nothing, where the module asks for a mask and the example has none."""
    argument = mask_argument(box.module)
    if argument is None or not _required(box.module, argument) or argument in box.call.kwargs:
        return box
    if len(box.call.args) > list(inspect.signature(box.module.forward).parameters).index(argument):
        return box
    x = np.random.default_rng(52).standard_normal(box.shape)
    for trial in _trials(argument, box.shape):
        made = _passing(box, argument, trial.everything)
        try:
            y = made(x)
        except ModelError:
            continue
        if y.shape == x.shape and np.isfinite(y).all() and y.any():
            return made
    return box


def _passing(box: ModuleBox, argument: str, value: torch.Tensor) -> ModuleBox:
    """The box with this value of a keyword."""
    return replace(box, call=replace(box.call, kwargs={**box.call.kwargs, argument: value}))


def _required(module: nn.Module, argument: str) -> bool:
    parameter = inspect.signature(module.forward).parameters[argument]
    return parameter.default is inspect.Parameter.empty


def _trials(argument: str, shape: tuple[int, ...]) -> Iterator[Trial]:
    if len(shape) < 2:
        return
    if argument in LENGTHS:
        for dim in range(1, len(shape)):
            lengths = np.maximum(1, shape[dim] - 1 - np.arange(shape[0]) % shape[dim])
            place = np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
            valid = place < lengths.reshape([-1] + [1] * (len(shape) - 1))
            value = torch.from_numpy(lengths)
            yield Trial(
                f"valid lengths along axis {dim}",
                value,
                torch.full_like(value, shape[dim]),
                np.broadcast_to(valid, shape),
            )
        return
    forms: list[tuple[str, tuple[int, ...]]] = [
        (f"axes 0 and {dim}", (0, dim)) for dim in range(1, len(shape))
    ]
    if len(shape) > 2:
        forms.append(("all axes", tuple(range(len(shape)))))
    for what, axes in forms:
        sizes = [shape[d] for d in axes]
        kept = (np.add.outer(np.arange(sizes[0]), np.arange(int(np.prod(sizes[1:])))) % 3 != 1).reshape(sizes)
        wide = kept.reshape([shape[d] if d in axes else 1 for d in range(len(shape))])
        valid = np.broadcast_to(wide, shape)
        for layout, array in ((what, kept), (f"{what}, other axes of size 1", wide)):
            yes, no = torch.from_numpy(array.copy()), torch.from_numpy(~array)
            every, number = torch.ones_like(yes), yes.double()
            yield Trial(f"boolean on {layout}, True is valid", yes, every, valid)
            yield Trial(f"boolean on {layout}, True is masked", no, ~every, valid)
            yield Trial(f"numbers on {layout}, 1 is valid", number, torch.ones_like(number), valid)
