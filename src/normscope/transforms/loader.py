"""Data as calls of a model: a batch, or a loader of batches; labels among them are not read."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from normscope.doctor import arguments
from normscope.doctor.nested import named_inputs
from normscope.doctor.refusals import unwrap
from normscope.errors import BadInput, told
from normscope.transforms.masks import Mask, Valid, resolved

LABELS = ("labels", "label", "targets", "target")
"""keyword arguments that are left out where a forward can do without"""
BITS = 128
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Loader:
    """Batches of a model's inputs, as often as they are asked for.

    Args:
        data: one batch (a tensor for ``model(x)``, a tuple for ``model(*args)``, a dict for ``model(**kwargs)``), or an
            iterable of batches such as a DataLoader. Of a batch ``(inputs, labels)`` from a loader only what the
            forward requires is passed.
        inputs: what of a batch is the input, where that cannot be told: ``lambda batch: batch["image"]``.
        mask: which elements of a batch count, in the forms of `masks.Mask`.

    >>> loader = Loader([(torch.ones(4, 3), torch.zeros(4)), (torch.ones(2, 3), torch.zeros(2))], nn.Linear(3, 1))
    >>> [args[0].shape[0] for args, kwargs in loader.calls()], loader.samples, loader.notes
    ([4, 2], 6, ['1 of 2 values of each batch was passed to the model, the others were not read'])
    """

    data: Any
    model: nn.Module
    inputs: Callable[[Any], Any] | None = None
    mask: Mask = None
    samples: int = 0
    """of the last complete pass"""
    batches: int = 0
    valid: int = 0
    """elements of masks that are True, and of how many"""
    masked: int = 0
    notes: list[str] = field(default_factory=list)
    _passes: int = 0
    _sum: int = 0
    _first: int | None = None
    """`content` of the first complete pass"""

    @property
    def repeats(self) -> bool:
        """Whether a second pass is possible."""
        return not isinstance(self.data, Iterator)

    @property
    def content(self) -> int:
        """Sum over samples of a hash of each: it does not depend on the order and on the cut into batches."""
        return self._sum

    def calls(self) -> Iterator[Call]:
        """One pass over the data, see `masked_calls`."""
        for args, kwargs, _ in self.masked_calls():
            yield args, kwargs

    def masked_calls(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Valid | None]]:
        """One pass over the data, each batch with its mask.

        Raises:
            BadInput: the data are no batches, cannot be told from labels, or cannot be run over again; or a mask is no
                mask.
        """
        if self._passes and not self.repeats:
            raise BadInput(
                f"data is a {type(self.data).__name__} that can be run over once, and another pass is needed; pass a "
                "list of batches or a DataLoader"
            )
        self._passes += 1
        self.samples = self.batches = self.valid = self.masked = self._sum = 0
        for batch in self._batches():
            args, kwargs = arguments.moved(self._call(batch), self.model)
            valid = resolved(self.mask, batch, self.batches, (args, kwargs), only=batch is self.data)
            seen = (args, kwargs) if valid is None else valid.cleaned((args, kwargs))
            rows = arguments.validate(*seen)
            self.samples += rows
            self.batches += 1
            if valid is not None:
                self.valid += int(valid.mask.sum())
                self.masked += valid.mask.numel()
                seen = seen[0], {**seen[1], "mask": valid.mask}
            self._sum = (self._sum + _content(seen[0], seen[1], rows)) % 2**BITS
            yield args, kwargs, valid
        if isinstance(self.mask, (list, tuple)) and len(self.mask) != self.batches:
            raise BadInput(f"mask holds {len(self.mask)} masks, and there are {self.batches} batches")
        if self._first is None:
            self._first = self._sum
        if self._first != self._sum:
            self._note(
                "the data were not the same in each pass (random augmentation, a sampler that draws anew): norms got "
                "statistics of different samples, and the fingerprint is of the last pass"
            )

    def _batches(self) -> Iterator[Any]:
        if isinstance(self.data, (Tensor, np.ndarray, tuple, Mapping)):
            yield self.data
            return
        try:
            found = iter(self.data)
        except TypeError:
            raise BadInput(
                f"data is a batch (tensor, tuple, dict) or an iterable of batches; got {type(self.data).__name__}"
            ) from None
        yield from found

    def _call(self, batch: Any) -> Call:
        if self.inputs is not None:
            try:
                batch = self.inputs(batch)
            except Exception as error:
                raise BadInput(f"inputs failed on a batch: {told(error)}") from error
            return arguments.as_call(batch)
        if isinstance(batch, list):
            batch = tuple(batch)
        args, kwargs = arguments.as_call(batch)
        least, most, names = _accepted(unwrap(self.model))
        if batch is self.data and not least <= len(args) <= most and args:
            raise BadInput(
                f"data is a tuple of {len(args)}, which is one batch for model(*args), and the forward takes "
                f"{_range(least, most)}; pass a list where it is batches, list(data), or the inputs alone"
            )
        return self._passed(args, least, most), self._named(kwargs, names)

    def _passed(self, args: tuple[Any, ...], least: int, most: float) -> tuple[Any, ...]:
        given = len(args)
        if given in (0, 1, least):
            return args
        if given < least or least != most:
            raise BadInput(
                f"a batch has {given} values and the forward takes {_range(least, most)}, so what is input and what is "
                "label cannot be told; pass inputs=lambda batch: ... that returns the model's inputs"
            )
        verb = "was" if least == 1 else "were"
        self._note(
            f"{least} of {given} values of each batch {verb} passed to the model, the others were not read"
        )
        return args[:least]

    def _named(self, kwargs: dict[str, Any], names: dict[str, bool] | None) -> dict[str, Any]:
        dropped = [
            k for k in kwargs if names is not None and (k not in names or (k in LABELS and not names[k]))
        ]
        if dropped:
            self._note(f"not passed to the model: {', '.join(dropped)}")
        return {key: value for key, value in kwargs.items() if key not in dropped}

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _accepted(model: nn.Module) -> tuple[int, float, dict[str, bool] | None]:
    """Positional arguments that the forward requires and takes at most; its names, and whether each is required."""
    try:
        found = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # scripted
        return 0, math.inf, None
    places = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = sum(p.default is p.empty for p in places)
    most = math.inf if any(p.kind is p.VAR_POSITIONAL for p in found) else len(places)
    if any(p.kind is p.VAR_KEYWORD for p in found):
        return least, most, None
    named = [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return least, most, {p.name: p.default is p.empty for p in named}


def _range(least: int, most: float) -> str:
    if least == most:
        return str(least)
    return f"{least} or more" if most == math.inf else f"{least} to {int(most)}"


def _content(args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> int:
    """Sum of the hashes of the samples: of each, its row of every input."""
    heads: list[str] = []
    tables: list[tuple[NDArray[np.uint8], bool]] = []
    for name, tensor in named_inputs(args, kwargs):
        per_sample = tensor.ndim > 0 and tensor.shape[0] == rows
        flat = (
            tensor.detach()
            .cpu()
            .reshape(rows if per_sample else 1, -1)
            .contiguous()
            .view(torch.uint8)
            .numpy()
        )
        heads.append(f"{name} {tensor.dtype} {tuple(tensor.shape[per_sample:])}")
        tables.append((flat, per_sample))
    head = hashlib.blake2b("; ".join(heads).encode(), digest_size=BITS // 8).digest()
    total: int = 0
    for row in range(rows):
        digest = hashlib.blake2b(head, digest_size=BITS // 8)
        for flat, per_sample in tables:
            digest.update(flat[row if per_sample else 0].tobytes())
        total += int.from_bytes(digest.digest(), "big")
    return int(total % 2**BITS)
