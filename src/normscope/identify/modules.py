"""Identification of a torch module: of a float64 copy, by moving its inputs, its parameters and its buffers.

The order of the probes: what each tensor does (a gain, a bias, a stored mean, something else); then, with gains 1 and
biases 0, which normalization the bare function is; then what is stored and how it moves; then everything is put
back and the whole is compared with the reference on fresh inputs, in training and in evaluation.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from torch import nn

from normscope.errors import BadInput, ModelError, told
from normscope.identify.as_stated import as_stated
from normscope.identify.box import box_of, shape_of
from normscope.identify.constant_input import gradient_at_constant
from normscope.identify.given_affine import given_affine, on_their_axes
from normscope.identify.identification import identify_box
from normscope.identify.masks import mask_argument, probe_mask, with_everything_valid
from normscope.identify.module_box import ModuleBox, box_of_module, call_of
from normscope.identify.module_casts import casts, machine_epsilon
from normscope.identify.module_mode import (
    GAIN,
    InMode,
    biases_multiplied,
    changes_shape,
    depends_on_chance,
    look,
    remembers,
    same_in_both,
    with_room,
)
from normscope.identify.module_parameters import NoAxes
from normscope.identify.module_state import NotOfTheFamily, Whole, reads_what_it_moves, whole_of
from normscope.identify.module_verified import Verified, verified
from normscope.identify.patched_forward import uncompiled
from normscope.identify.repeats import global_generators_kept
from normscope.identify.result import Evidence, Identification
from normscope.identify.spelling import names_of
from normscope.identify.tensor_roles import generic_values

MANY = 12
"""tensors of a module beyond which they are not moved one by one: a norm has five"""


def identify_module(
    module: nn.Module, example: Any, layout: str | None = None, training: bool | None = None
) -> Identification:
    """Which normalization a torch module is, by its behaviour, its parameters and its buffers.

    The module itself is never called or written: all happens in copies on the CPU, float64 with casts to float32
    redirected, and bfloat16 for the order of casts. Forward hooks that act on the output are part of it.

    Arguments:
        module: any module of one varied tensor whose output has the shape of its input.
        example: that tensor (its values do not matter, its shape does), an array, a shape, a tuple of arguments or a
            dict of keywords; all but the first floating tensor is passed as it is.
        layout: names of the input's axes, ``"b c h w"``.
        training: the mode to identify; None for the mode that the module is in. Where statistics are stored, the
            other mode is identified and verified too.

    Raises BadInput for modules without values (lazy, meta) or that cannot be copied, and where the example holds no
    floating array; ModelError where the module raises on the example.

    >>> found = identify_module(nn.InstanceNorm2d(6, eps=1e-3), (4, 6, 3, 5))
    >>> print(found.spec)
    b c ... -> b c; rank 3 or more; centered; std, biased; eps 0.001 inside the root; no weight; no bias
    """
    keras = sys.modules.get("keras")
    if keras and isinstance(module, keras.Layer):  # on torch, layers are modules too
        if training is not None:
            raise BadInput(
                f"training is for torch modules; got training={training} for a Keras layer. Identify the function of "
                "each mode: lambda x: layer(x, training=True)"
            )
        return identify_box(box_of(module, example), shape_of(example), layout=layout)
    with global_generators_kept():
        answer = _identified(module, example, layout, training)
    return as_stated(answer, uncompiled(module))


def _identified(module: nn.Module, example: Any, layout: str | None, training: bool | None) -> Identification:
    """See `identify_module`, which it is but for what torch wraps and the random numbers that a module may draw."""
    box = with_everything_valid(box_of_module(module, call_of(example)))
    names_of(layout, box.shape)  # a layout that does not fit is refused before anything runs
    here_trains = box.module.training if training is None else training
    name = f"module {box.name}"
    answer = Identification(name=f"{name}, in {'training' if here_trains else 'evaluation'}")
    if box.note:
        answer = _noted(answer, box.note)
    box = replace(box, name=name)
    here_box = box if training is None else box.in_mode(training)
    shape, here_box = box.shape, with_room(here_box)
    if chance := depends_on_chance(here_box):
        reason = f"it is random: with other random numbers the output moves by {chance:.2g} of the largest"
        return replace(answer, reason=reason)
    if reason := changes_shape(here_box) or remembers(here_box):
        return replace(answer, reason=reason)
    if (count := len(generic_values(here_box))) > MANY:
        bare = identify_box(here_box, here_box.shape, layout=layout)
        note = f"it has {count} tensors, more than a normalization: it was judged as a function of its input alone"
        return replace(bare, name=answer.name, notes=(*answer.notes, *bare.notes, note))
    here = look(here_box, here_trains, layout)
    if here.core.reason is not None:
        answer = replace(answer, notes=(*answer.notes, *here.core.notes))
        return _opaque(answer, here, layout, reads_what_it_moves(here) or here.core.reason)
    there, unlike = _other_mode(here_box, here, layout)
    if unlike:
        answer = _noted(answer, unlike)
    try:
        whole = whole_of(here, there, bool(unlike), layout)
    except (NotOfTheFamily, NoAxes) as contradiction:
        return _opaque(answer, here, layout, str(contradiction))
    if whole is None:
        bare = identify_box(here_box, here_box.shape, layout=layout)
        notes = (*answer.notes, "none of its tensors acts as a stored variance")
        evidence = (*bare.evidence, *here.tensor_evidence)
        return replace(answer, fixed=bare.fixed, reason=bare.reason, evidence=evidence, notes=notes)
    modes = [here] if there is None else [here, there]
    checked = verified(whole, modes, shape)
    if checked.contradiction:
        answer = replace(answer, max_error=checked.error)
        said = biases_multiplied(here)
        reason = f"{said}; {checked.contradiction}" if said else checked.contradiction
        evidence = (*whole.evidence, checked.evidence)
        return _opaque(answer, here, layout, reason, evidence)
    found = _finished(answer, whole, here, module, training, checked)
    assert found.spec is not None
    given = given_affine(here_box, found.spec, found.weight, found.bias, layout)
    if given is None:
        return found
    notes = (*found.notes, given.note)
    return replace(found, spec=given.spec, weight=given.weight, bias=given.bias, notes=notes)


def _other_mode(box: ModuleBox, here: InMode, layout: str | None) -> tuple[InMode | None, str]:
    """The mode that was not asked for; None where it is the same function, or unlike any member (and then how)."""
    other = box.in_mode(not here.training)
    if same_in_both(here.box, other):
        return None, ""
    word = "training" if not here.training else "evaluation"
    try:
        if depends_on_chance(other):
            return None, f"in {word} it is random, so that mode was not identified"
        if said := remembers(other):
            return None, f"in {word} {said}; that mode was not identified"
        there = look(other, not here.training, layout)
    except ModelError as error:
        return None, f"in {word} it raises, so that mode was not seen ({told(error.__cause__ or error)})"
    if there.core.reason is not None:
        return None, f"in {word} it is no normalization of the family: {there.core.reason}"
    if there.fixed and not (here.fixed or there.named("mean", "nonlinear")):
        return None, f"in {word} it is a fixed map without stored statistics"
    return there, ""


def _finished(
    answer: Identification,
    whole: Whole,
    here: InMode,
    module: nn.Module,
    training: bool | None,
    checked: Verified,
) -> Identification:
    """Casts, gradients and masks of what was verified, and the answer."""
    found = [*whole.evidence]
    if whole.spec.eps is None:
        if follows := machine_epsilon(module, whole, here, training):
            found.append(follows)
        else:
            whole = whole.replaced(eps=2.0**-52)
    cast, cast_evidence = casts(module, whole, here, training)
    found += cast_evidence
    if gradient := gradient_at_constant(here.box):
        found.append(gradient)
    notes = [*answer.notes, *whole.notes]
    argument = mask_argument(here.box.module)
    if argument is not None and not here.fixed and (mask := probe_mask(here.box, argument)):
        found.append(mask.evidence)
        if not mask.honoured:
            notes.append(mask.evidence.conclusion)
    weight, bias = whole.values.read(here.own)
    spec = whole.spec if cast is None else whole.spec.replace(cast=cast)
    return replace(
        answer,
        spec=spec,
        mode=whole.mode,
        weight=weight,
        bias=bias,
        max_error=checked.error,
        resolution=checked.resolution,
        sizes=here.core.sizes,
        evidence=(*found, checked.evidence),
        equivalent=tuple(other.replace(cast=spec.cast) for other in whole.equivalent),
        notes=tuple(notes),
        half=cast_evidence[-1],
    )


def _opaque(
    answer: Identification, here: InMode, layout: str | None, reason: str, evidence: tuple[Evidence, ...] = ()
) -> Identification:
    """Out of the family by what its tensors do; as a function of its input alone it may still be a member.

    Where they only multiply and add, the function counts: its gain and bias are made of several tensors. Where gain
    and bias follow another input of the call, they are an input.
    """
    bare = identify_box(here.box, here.box.shape, layout=layout)
    evidence = evidence or (*here.core.evidence, *here.tensor_evidence)
    if bare.spec is None:
        return replace(answer, reason=reason, evidence=evidence)
    mode = "batch" if bare.spec.properties(here.box.shape).couples_samples else "input"
    if given := given_affine(here.box, bare.spec, bare.weight, bare.bias, layout):
        notes = (*answer.notes, *bare.notes, given.note)
        found = replace(bare, spec=given.spec, weight=given.weight, bias=given.bias)
        return replace(found, name=answer.name, mode=mode, notes=notes)
    if names := _made_of(here):
        tensors = f"several tensors: {names}" if "," in names else f"one tensor, {names}"
        multiplied = biases_multiplied(here)
        multiplied = "" if GAIN in multiplied else multiplied  # then the bias is made of both
        said = f"its gain and bias are {'as they act' if multiplied else f'made of {tensors}'}"
        said = f"{multiplied}; {said}" if multiplied else said
        notes = (*answer.notes, *bare.notes, said)
        return replace(on_their_axes(bare, here, layout), name=answer.name, mode=mode, notes=notes)
    notes = (*answer.notes, f"with its numbers as they are it computes: {bare.spec}")
    return replace(answer, reason=reason, evidence=evidence, notes=notes)


def _made_of(here: InMode) -> str:
    """The tensors, where all that they do is to multiply and to add, in both modes alike; "" elsewhere."""
    acting = here.named("gain", "bias", "mean", "nonlinear", "mixed")
    affine = all(
        role.kind in ("gain", "bias", "mean") for role in acting
    )  # a bias that is subtracted: "mean"
    straight = all(gain.straight for gain in here.gains.values())
    if not (affine and straight and same_in_both(here.box, here.box.in_mode(not here.training))):
        return ""
    return ", ".join(role.name for role in acting)


def _noted(answer: Identification, note: str) -> Identification:
    return replace(answer, notes=(*answer.notes, note))
