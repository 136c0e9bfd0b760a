"""Which axes a module's gain, bias and stored statistics live on, and how to read their values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normscope.identify.decimals import shortest
from normscope.identify.module_box import Array
from normscope.identify.module_mode import InMode
from normscope.identify.parameter_axes import Placed, place
from normscope.identify.partition import Factor, Partition
from normscope.identify.result import Identification
from normscope.identify.spelling import spellings
from normscope.identify.stored_statistics import Stored
from normscope.identify.tensor_roles import Role
from normscope.spec import BoundSpec, NormSpec, PatternError


class NoAxes(Exception):
    """A tensor lives on no axes that a specification can name. The text says which tensor."""


ROUNDING = 1e-12
"""what fitted gains and biases of a function of size 1 may be off by"""
LAST_BITS = 1e-14
"""relative: what the digits of a gain stop at"""


@dataclass(frozen=True)
class Values:
    """Where the values of the affine part come from."""

    spec: NormSpec
    """with the axes of weight and bias"""
    weight: tuple[tuple[Role, float], ...]
    """tensors that multiply, each with its offset; with several, the weight is their product"""
    weight_place: Placed | None
    bias: tuple[Role, ...]
    bias_place: Placed | None

    constants: tuple[Array | None, Array | None] = (None, None)
    """weight and bias that are written in the code, where no tensor is"""

    def read(self, tensors: dict[str, Array]) -> tuple[Array | None, Array | None]:
        """Weight and bias in the shapes that the specification says."""
        weight, bias = self.constants
        if self.weight_place is not None:
            offsets = (0.0,) if len(self.weight) == 1 else tuple(offset for _, offset in self.weight)
            parts = [o + _spread(tensors, role) for (role, _), o in zip(self.weight, offsets, strict=True)]
            weight = self.weight_place.read(np.prod(parts, axis=0))
        if self.bias_place is not None:
            bias = self.bias_place.read(np.sum([_spread(tensors, role) for role in self.bias], axis=0))
        return weight, bias


def affine_values(
    core: Identification, mode: InMode, layout: str | None, stored: Sequence[Role] = ()
) -> Values:
    """The neutral function that ``core`` names, with the axes of the gains and biases of a mode.

    Of several ways to write the axes of the sets, the family whose parameters and ``stored`` statistics live where
    these do comes first. What the neutral function multiplies by although all gains are 1 is written in the code: a
    fixed gain.

    Raises NoAxes where a tensor lives on no axes of any spelling.
    """
    gains = tuple((role, mode.gains[role.name].offset or 0.0) for role in mode.named("gain"))
    biases = tuple(mode.named("bias"))
    spec, constants = _constants(core)
    for what, roles, value in zip(
        ("gain", "bias"), ([role for role, _ in gains], biases), constants, strict=True
    ):
        if roles and value is not None:
            names = " and ".join(role.name for role in roles)
            raise NoAxes(
                f"besides {names} it has a {what} that is no tensor of it, of shape {value.shape}: a specification has "
                "one of them"
            )
    written = any(value is not None for value in constants)  # on axes as the neutral function has them
    found: list[tuple[int, Values]] = []
    refused = NoAxes("")
    for named, own in [(spec, None)] if written else spelled(spec, mode.box.shape, layout):
        try:
            where_gain = _place(named, [role for role, _ in gains], mode.box.shape, own)
            where_bias = _place(named, biases, mode.box.shape, own)
            where_state = _place(named, stored, mode.box.shape, own)
        except NoAxes as error:
            refused = error
            continue
        strange = sum(
            one is not None and one.axes not in ("", own) for one in (where_gain, where_bias, where_state)
        )
        told = named.replace(
            weight=named.weight if where_gain is None else where_gain.axes,
            weight_offset=gains[0][1] if len(gains) == 1 else 0.0,
            bias=named.bias if where_bias is None else where_bias.axes,
        )
        found.append((strange, Values(told, gains, where_gain, biases, where_bias, constants)))
    if not found:
        raise refused
    return min(found, key=lambda pair: pair[0])[1]


def spelled(
    spec: NormSpec, shape: tuple[int, ...], layout: str | None
) -> Iterator[tuple[NormSpec, str | None]]:
    """The same function with its axes written in other ways, each with where the family's parameters live."""
    wide = tuple(3 if size == 1 else size for size in shape)  # along one element, kept and erased look alike
    try:
        bound, shape = spec.bind(wide), wide
    except PatternError:
        bound = spec.bind(shape)
    ragged = bound.sample_dim if bound.ragged else None
    dims = tuple(
        (Factor(size, False),)
        if dim == ragged
        else tuple(Factor(axis.size, axis.kept or axis.size == 1) for axis in bound.axes if axis.dim == dim)
        for dim, size in enumerate(shape)
    )
    stays = {
        axis.dim: "inner" if axis.name == _inner(bound, axis.dim) else "outer"
        for axis in bound.axes
        if axis.name in spec.sizes
    }
    for spelling in spellings(Partition(shape, dims, bound.segments, ragged), layout, stays):
        axes = spelling.spec
        yield (
            spec.replace(
                stats=axes.stats,
                ndim=axes.ndim,
                sizes=axes.sizes,
                remainder=axes.remainder,
                weight=None,
                bias=None,
            ),
            spelling.own,
        )


def _inner(bound: BoundSpec, dim: int | None) -> str:
    return [axis.name for axis in bound.axes if axis.dim == dim][-1]


def _constants(core: Identification) -> tuple[NormSpec, tuple[Array | None, Array | None]]:
    """What the neutral function has in place of a weight and a bias; a single factor is a gain."""
    spec, weight, bias = core.spec, core.weight, core.bias
    assert spec is not None
    if weight is not None and np.ptp(weight) <= ROUNDING * np.max(np.abs(weight)):
        gain = float(np.mean(weight))
        spec, weight = spec.replace(weight=None, gain=shortest(spec.gain * gain, LAST_BITS)), None
    if bias is not None and np.max(np.abs(bias)) <= ROUNDING:
        spec, bias = spec.replace(bias=None), None
    return spec, (weight, bias)


def stored_values(spec: NormSpec, mode: InMode) -> Stored | None:
    """The stored mean and variance that a fixed map is made of; None where there is not one of each.

    Raises NoAxes where they live on no axes of the specification.
    """
    means, variances = mode.named("mean"), mode.named("nonlinear")
    if len(means) != 1 or len(variances) != 1:
        return None
    placed = _place(spec, [means[0], variances[0]], mode.box.shape, spec.weight)
    assert placed is not None
    return Stored(means[0].name, variances[0].name, placed, _entries(means[0]), _entries(variances[0]))


def _place(
    spec: NormSpec, roles: Sequence[Role], shape: tuple[int, ...], own: str | None = None
) -> Placed | None:
    """The axes along which any of the tensors varies; of one number, ``own`` where its axes have one element."""
    if not roles:
        return None
    for role in roles:
        if role.entries is None or (role.entries < 0).any():
            raise NoAxes(
                f"{role.name} reaches only some of the outputs, where a weight or a bias has a number for each"
            )
    joint = np.zeros(shape, dtype=np.int64)
    for role in roles:
        joint = joint * int(np.prod(role.shape, initial=1)) + _entries(role)
    placed = place(spec, joint)
    if placed is None:
        names = " and ".join(role.name for role in roles)
        raise NoAxes(f"the numbers of {names} are laid out along no axes of {spec.stats!r}")
    if placed.axes == "" and own and all(role.shape for role in roles):
        size = spec.replace(weight=own).bind(shape).weight_shape
        if size is not None and set(size) == {1}:
            return Placed(own, placed.places.reshape(size))
    return placed


def _entries(role: Role) -> NDArray[np.int64]:
    assert role.entries is not None
    return role.entries


def _spread(tensors: dict[str, Array], role: Role) -> Array:
    """The value that each output element uses."""
    return tensors[role.name].ravel()[_entries(role)]
