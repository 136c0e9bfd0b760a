"""A module in one of its modes: what each tensor does there, and which normalization the bare function is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from normscope.errors import ModelError
from normscope.identify.gains import Gain, laws_of_gains
from normscope.identify.hooks_that_act import CALLS
from normscope.identify.identification import ROOM, identify_box
from normscope.identify.module_box import Array, ModuleBox, as_array, tensors_of
from normscope.identify.probing import Prober, direction
from normscope.identify.result import Evidence, Identification
from normscope.identify.second_size import roomy
from normscope.identify.tensor_roles import STRAIGHT, Role, generic_values, roles

GAIN = "is added before the gain"
"""said of a bias that the gain multiplies"""


@dataclass(frozen=True)
class InMode:
    """One mode of a module, probed."""

    box: ModuleBox
    training: bool
    roles: dict[str, Role]
    gains: dict[str, Gain]
    """law of each tensor that is a gain"""
    neutral: ModuleBox
    """gains 1, biases and stored means 0, stored variances 1; what does anything else at random numbers"""
    core: Identification
    """of the neutral function"""
    own: dict[str, Array]
    """the module's own tensors"""
    generic: dict[str, Array]
    """random numbers in their place"""
    moved: tuple[str, ...]
    """tensors that a call changes"""

    def named(self, *kinds: str) -> list[Role]:
        return [role for role in self.roles.values() if role.kind in kinds]

    @property
    def tensor_evidence(self) -> tuple[Evidence, ...]:
        """What each tensor was found to do."""
        found = [gain.evidence for gain in self.gains.values()]
        words = {"bias": "is added: the bias", "mean": "is subtracted before the gain: a stored mean"}
        for kind, does in words.items():
            for role in self.named(kind):
                numbers: dict[str, float | int | str | tuple[int, ...]] = {"shape": role.shape}
                found.append(
                    Evidence(f"{role.name} {does}", f"{role.name} moved, at random other tensors", numbers)
                )
        return tuple(found)

    @property
    def fixed(self) -> bool:
        """Every output is a straight function of its own input."""
        return self.core.fixed is not None


def look(box: ModuleBox, training: bool, layout: str | None) -> InMode:
    """Probe a module in the mode that it is in. Raises ModelError where it raises."""
    x, other = direction(box.shape, 101), direction(box.shape, 102)
    found = roles(box, (x, other))
    settings: dict[str, Array] = {}
    for role in found.values():
        if role.kind == "mixed":
            settings[role.name] = generic_values(box)[role.name]
        elif role.kind != "none":
            settings[role.name] = np.full(role.shape, 0.0 if role.kind in ("bias", "mean") else 1.0)
    level = box.set(settings)
    laws = laws_of_gains(level, {role.name: role for role in found.values() if role.kind == "gain"}, x)
    generic = generic_values(box)
    neutral = level.set({name: _neutral(gain, generic[name]) for name, gain in laws.items()})
    own = {name: as_array(tensor) for name, tensor in tensors_of(box.module).items()}
    _, moved = box.set(generic).moved(x)
    core = identify_box(neutral, box.shape, layout=layout)
    return InMode(box, training, found, laws, neutral, core, own, generic, moved)


def _neutral(gain: Gain, generic: Array) -> Array:
    """Values under which a gain is 1; gains that add have none of their own, and random ones do not cancel."""
    if gain.offset is None and gain.straight:
        return generic
    return np.full(generic.shape, 1.0 - (gain.offset or 0.0))


def with_room(box: ModuleBox) -> ModuleBox:
    """The box with an example of ordinary size: longer along axes of one element, smaller where it is large.

    Along an axis of one element nobody can tell what is averaged over.
    """
    shape = roomy(Prober(box, box.roundoff), box.shape, ROOM)
    return box if shape == box.shape else box.with_shape(shape)


def same_in_both(one: ModuleBox, other: ModuleBox) -> bool:
    """Whether two modes of one module give the same outputs and write nothing, at random tensors."""
    values = generic_values(one)
    x = direction(one.shape, 103)
    try:
        (y, moved), (z, also) = (box.set(values).moved(x) for box in (one, other))
    except ModelError:  # a mode that raises is another mode
        return False
    return bool(np.array_equal(y, z, equal_nan=True)) and not moved and not also


def biases_multiplied(mode: InMode) -> str:
    """What is said of the biases that reach the output as multiples of themselves; "" where all are just added."""
    x, gains, said = direction(mode.box.shape, 103), mode.named("gain"), []
    for bias in mode.named("bias"):
        parts = []
        for value in (1.0, 2.0):
            at = mode.neutral.set({gain.name: np.full(gain.shape, value) for gain in gains})
            parts.append(at.set({bias.name: np.ones(bias.shape)})(x) - at(x))
        if np.max(np.abs(parts[1] - parts[0])) > STRAIGHT * np.max(np.abs(parts[1])):
            said.append(f"{bias.name} {GAIN}, which multiplies it")
        elif abs(factor := float(np.median(parts[0])) - 1.0) > STRAIGHT:
            said.append(f"{bias.name} is added {factor + 1:g} times, where a bias is added once")
    return " and ".join(said)


def changes_shape(box: ModuleBox) -> str:
    """Why a module whose output has another shape is no normalization; "" for others."""
    shape = box(direction(box.shape, 104)).shape
    if shape == box.shape:
        return ""
    return f"an input of shape {box.shape} gives an output of shape {shape}; a normalization keeps the shape"


def remembers(box: ModuleBox) -> str:
    """How later calls of one module differ from the first, its tensors put back before each; "" where none does.

    A counter in a forward or in a hook is no tensor: no other probe would see it, as each calls a fresh copy.
    """
    x, fork = direction(box.shape, 104), box.fork()
    tensors = {name: as_array(tensor) for name, tensor in tensors_of(fork).items()}
    first = box.output_of(fork, x)
    for call in range(2, CALLS + 1):
        fork = replace(box, module=fork).set(tensors).fork()
        y = box.output_of(fork, x)
        if not np.array_equal(first, y, equal_nan=True):
            apart = 1.0 if y.shape != first.shape else float(np.nanmax(np.abs(y - first)))
            apart /= float(np.nanmax(np.abs(first), initial=0.0)) or 1.0
            return (
                "it has state that is no tensor of it: with its tensors put back, one input gives another output in "
                f"call {call} (by {apart:.2g} of the largest)"
            )
    return ""


def depends_on_chance(box: ModuleBox) -> float:
    """Largest change of the output with other random numbers, over the largest output."""
    x = direction(box.shape, 104)
    one, other = box(x), replace(box, seed=box.seed + 1)(x)
    if np.array_equal(one, other, equal_nan=True):
        return 0.0
    if one.shape != other.shape:
        return 1.0
    return float(np.nanmax(np.abs(one - other)) / (np.nanmax(np.abs(one)) or 1.0))
