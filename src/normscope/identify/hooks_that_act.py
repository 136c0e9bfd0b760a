"""Whether the forward hooks that somebody put on a module act on its output: then they are part of what it computes.

Most hooks only record. They are tried once, as copies, on a copy of the module, and left out where no bit changes.
"""

from __future__ import annotations

import dis
import functools
from dataclasses import replace
from itertools import pairwise
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from normscope.errors import BadInput, ModelError, told
from normscope.identify.float64_copy import copied
from normscope.identify.owners_hooks import own_hooks
from normscope.identify.probing import direction

if TYPE_CHECKING:
    from normscope.identify.module_box import ModuleBox

LARGE = 2.0**20
"""size of the second input: a clamp shows there"""
CALLS = 8
"""in a row: a hook may count them"""
ACT = "its forward hooks act on its output, and are part of what is told here"
IDLE = "its forward hooks leave its output as it is, and were left out"
UNSEEN = "its forward hooks return nothing, do not run on a copy, and were left out"


def with_hooks_that_act(plain: ModuleBox, module: nn.Module) -> ModuleBox:
    """The box of a copy without hooks, or one with copies of them where they act, and a note of it.

    Raises:
        BadInput: where hooks that return something do not run on a copy.
    """
    hooks = own_hooks(module)
    if not hooks:
        return plain
    try:
        hooked = replace(plain, module=copied(module, plain.dtype, owners_hooks=True))
        return replace(hooked, note=ACT) if _differ(plain, hooked) else replace(plain, note=IDLE)
    except (BadInput, ModelError) as error:
        if all(_returns_nothing(hook) for hook in hooks):
            return replace(plain, note=UNSEEN)
        raise BadInput(
            f"a module is identified on a copy, and the forward hooks of {plain.name} do not run on one "
            f"({told(error.__cause__ or error)}), so that what they do to the output is not known. Remove them first: "
            "handle.remove()"
        ) from error


def _differ(plain: ModuleBox, hooked: ModuleBox) -> bool:
    """Whether one bit of an output is another: in either mode, on an ordinary input or a large one, with the module's
    tensors or others, or in one of some calls in a row. Raises ModelError where it runs without the hooks only."""
    others = {name: 1.5 * value + 0.25 for name, value in plain.tensors().items()}
    for training in (False, True):
        for settings in ({}, others):
            one, two = (box.in_mode(training).set(settings) for box in (plain, hooked))
            for size in (1.0, LARGE):
                x = size * direction(plain.shape, 105)
                mine, theirs = one.fork(), two.fork()
                for _ in range(CALLS if size == 1.0 and not settings else 1):
                    try:
                        y = one.output_of(mine, x)
                    except ModelError:  # in a mode that does not run
                        break
                    if not np.array_equal(y, two.output_of(theirs, x), equal_nan=True):
                        return True
    return False


def _returns_nothing(hook: Any) -> bool:
    """Whether every way out of a hook returns None, so that it does not replace the output.

    >>> _returns_nothing(lambda module, inputs, output: output * 2)
    False
    >>> _returns_nothing(lambda module, inputs, output: None)
    True
    """
    while not isinstance(hook, FunctionType):
        if isinstance(hook, functools.partial):
            hook = hook.func
        elif isinstance(hook, MethodType):
            hook = hook.__func__
        elif (call := type(hook).__dict__.get("__call__")) is not None:
            hook = call
        else:
            return False
    steps = list(dis.get_instructions(hook))
    return all(
        (one.opname != "RETURN_CONST" or one.argval is None)
        and (one.opname != "RETURN_VALUE" or (before.opname == "LOAD_CONST" and before.argval is None))
        for before, one in pairwise(steps)
    )
