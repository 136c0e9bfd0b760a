"""Whether gain and bias come with the call: its further inputs, moved, change these and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isclose
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from normscope.errors import ModelError
from normscope.identify.identification import identify_box
from normscope.identify.module_box import Call, ModuleBox
from normscope.identify.module_mode import InMode
from normscope.identify.result import Identification
from normscope.spec import Cast, NormSpec

Array = NDArray[np.float64]
EPS = 1e-3
"""of itself, within which two eps that were fitted beside other gains are one"""


class Affine(NamedTuple):
    """A specification with gain and bias from an input, and their values at the example."""

    spec: NormSpec
    weight: Array | None
    bias: Array | None
    note: str


def given_affine(
    box: ModuleBox, spec: NormSpec, weight: Array | None, bias: Array | None, layout: str | None
) -> Affine | None:
    """What was found of ``box`` with the source of its gain and bias; None where no further input acts on them alone.

    An example may hide their axes: all ones and zeros are no gain and no bias.
    """
    names, moved = _moved(box)
    if not names:
        return None
    other = identify_box(moved, box.shape, layout=layout)
    if other.spec is None or not _same_but_affine(spec, other.spec, box.shape):
        return None
    note = f"its gain and bias follow {' and '.join(names)}, at the values of the example"
    plain = all(where in (None, "") for where in (spec.weight, spec.bias))
    if plain and spec.running is None and (other.weight is not None or other.bias is not None):
        spec = other.spec.replace(cast=spec.cast)
        weight, bias = _at(other.weight, weight, 1.0), _at(other.bias, bias, 0.0)
    if spec.weight is None and spec.bias is None:
        return None
    return Affine(spec.replace(source="input"), weight, bias, note)


def on_their_axes(bare: Identification, here: InMode, layout: str | None) -> Identification:
    """With gain and bias on the axes that other tensors show, where those held now are one number each."""
    assert bare.spec is not None
    shown = identify_box(here.box.set(here.generic), here.box.shape, layout=layout)
    plain = all(where in (None, "") for where in (bare.spec.weight, bare.spec.bias))
    if not plain or shown.spec is None or not _same_but_affine(bare.spec, shown.spec, here.box.shape):
        return bare
    return replace(
        bare,
        spec=bare.spec.replace(weight=shown.spec.weight, bias=shown.spec.bias, gain=shown.spec.gain),
        weight=_at(shown.weight, bare.weight, bare.spec.gain / shown.spec.gain),
        bias=_at(shown.bias, bare.bias, 0.0),
    )


def _at(shaped: Array | None, value: Array | None, default: float) -> Array | None:
    """One number in the shape that other values have."""
    return None if shaped is None else np.full(shaped.shape, default if value is None else value.item())


def _same_but_affine(one: NormSpec, other: NormSpec, shape: tuple[int, ...]) -> bool:
    if (one.eps is None) != (other.eps is None) or not isclose(one.eps or 0.0, other.eps or 0.0, rel_tol=EPS):
        return False
    plain = [
        spec.replace(
            weight=None,
            bias=None,
            weight_offset=0.0,
            gain=1.0,
            source="parameter",
            running=None,
            cast=Cast(),
            eps=one.eps,
        )
        for spec in (one, other)
    ]
    return bool(plain[0].same_function(plain[1], shape=shape))


def _moved(box: ModuleBox) -> tuple[list[str], ModuleBox]:
    """Names of the further inputs that the output depends on, and the box with other values in all of them."""
    x = np.random.default_rng(61).standard_normal(box.shape)
    start, found, call = box(x), [], box.call
    passed: list[tuple[int | str, Any]] = [*enumerate(box.call.args), *box.call.kwargs.items()]
    for place, value in passed:
        if place == box.call.place or not isinstance(value, torch.Tensor):
            continue
        for other in _others(value):
            try:
                acts = not np.array_equal(
                    replace(box, call=_with(box.call, place, other))(x), start, equal_nan=True
                )
            except ModelError:  # an index that there is none of
                continue
            if acts:
                found.append(f"input {place}")
                call = _with(call, place, other)
                break
    return found, replace(box, call=call)


def _others(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Other values: of numbers other numbers of their size, of indices those of other samples, or the first two."""
    if value.is_floating_point():
        random = (
            torch.rand(value.shape, generator=torch.Generator().manual_seed(61), dtype=torch.float64) + 0.5
        )
        yield (value * (1 + random) + 0.25 * random).to(value.dtype)
    elif value.dtype is not torch.bool and not value.is_complex():
        yield value.roll(1, 0) if value.ndim else value
        yield torch.zeros_like(value)
        yield torch.ones_like(value)


def _with(call: Call, place: int | str, value: torch.Tensor) -> Call:
    args, kwargs = replace(call, place=place).with_input(value)
    return Call(args, kwargs, call.place)
