"""What ``identify`` and ``compare`` are pointed at: a layer, a function of an array, a specification.

==========================================  =======================================================================
target                                      is
==========================================  =======================================================================
``package.module:attribute``                a module, a layer, a specification, or a function of one array; a function
                                            that needs no arguments is called, and may return one of these, or a pair
                                            of it and an input. ``f(x=None)`` is a function of an array, and so is what
                                            returns none of these
``torch.nn:LayerNorm(768, eps=1e-6)``       a layer made here; every argument is a literal
``normscope:families.rms_norm(eps=1e-6)``   a named specification, likewise
==========================================  =======================================================================

Only layer classes and the named specifications are made so, from plain literals: a target is no way to run code.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from typing import Any

from normscope.errors import BadTarget
from normscope.spec import NormSpec, families
from normscope.targets import imported
from normscope.targets.failures import blamed

LAYERS = (("torch.nn", "Module"), ("keras.layers", "Layer"))
"""base classes of what may be made: module, name"""
INPUTS = ("x", "X", "input", "inputs", "array", "tensor", "hidden_states")
"""names that an array to normalize goes by"""


def load(target: str) -> tuple[Any, Any]:
    """What a target names, and the input that came with it (None where none did).

    Raises:
        BadTarget: it cannot be imported or made, or is nothing that can be called.

    >>> layer, _ = load("torch.nn:GroupNorm(2, 6, affine=False)")
    >>> layer.num_groups, layer.affine
    (2, False)
    """
    if is_call(target):
        return made(target), None
    value = imported.named(target)
    if isinstance(value, type):
        raise BadTarget(
            f"{target} is a class; write its arguments behind it, {target}(...), or point at an object of it"
        )
    if _needs_nothing(value):
        value = _called(target, value)
    if isinstance(value, tuple) and len(value) == 2:
        return value
    if not _serves(value):
        raise BadTarget(
            f"{target} is a {type(value).__name__}; expected a layer, a function of one array, or a NormSpec"
        )
    return value, None


def _serves(value: Any) -> bool:
    """It can be identified, or compared."""
    return callable(value) or isinstance(value, NormSpec) or hasattr(value, "run")


def _needs_nothing(value: Any) -> bool:
    """A plain function that can be called without arguments. A layer is called with its input."""
    return callable(value) and hasattr(value, "__code__") and not imported.required(value)


def _called(target: str, function: Callable[..., Any]) -> Any:
    """What a function that needs no arguments makes; the function itself where it makes nothing that serves.

    Without a parameter that could be an array it only makes something. With one, its name and default tell, else what
    comes of calling it: a function of an array has None for it, or gives an array. An error under another default is
    one of making.
    """
    first = _first(function)
    if first is None:
        with blamed(f"calling {target}"):
            return function()
    if (first.default is None and first.name in INPUTS) or hasattr(first.default, "shape"):
        return function
    try:
        with blamed(f"calling {target} without arguments"):
            made = function()
    except BadTarget as failure:
        if first.default is None or first.kind is first.VAR_POSITIONAL:
            return function
        raise BadTarget(
            f"{failure}. Where it is itself the function to look at, take the default off {first.name!r}"
        ) from failure.__cause__
    pair = isinstance(made, tuple) and len(made) == 2 and _serves(made[0])
    return made if pair or _serves(made) else function


def _first(function: Callable[..., Any]) -> inspect.Parameter | None:
    """The first parameter that is passed by its place."""
    parameters = inspect.signature(function).parameters.values()
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return next((one for one in parameters if one.kind not in named), None)


def is_call(target: str) -> bool:
    """It is written as a call: a layer to be made."""
    return target.rstrip().endswith(")")


def made(target: str) -> Any:
    """What ``module:Class(literals)`` makes. Raises BadTarget where it is no layer class with literal arguments."""
    module, _, expression = target.partition(":")
    if not module.replace(".", "").isidentifier():
        raise BadTarget(
            f"cannot read the target {target!r}: write package.module:attribute, with a colon before the class, as in "
            "torch.nn:LayerNorm(768)"
        )
    form = f"write it as torch.nn:LayerNorm(768, eps=1e-6), with plain literals; got {target!r}"
    try:
        call = ast.parse(expression.strip(), mode="eval").body
        if not isinstance(call, ast.Call):
            raise BadTarget(f"a layer is made by one call; {form}")
        args = [ast.literal_eval(argument) for argument in call.args]
        kwargs = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg is not None}
        if len(kwargs) != len(call.keywords):
            raise ValueError("** is no literal")
    except (SyntaxError, ValueError) as error:
        raise BadTarget(f"the arguments cannot be read as literals ({error}); {form}") from None
    name = ast.unparse(call.func)
    if not all(part.isidentifier() for part in name.split(".")):
        raise BadTarget(f"a layer is named by its class; {form}")
    make = imported.named(f"{module}:{name}")
    if not _may_be_made(make):
        raise BadTarget(
            f"{module}:{name} is no layer class of PyTorch or Keras and no named specification of normscope.families, "
            "so it is not called. Write a function without arguments that returns the layer, and point at that"
        )
    with blamed(f"making {target}"):
        return make(*args, **kwargs)


def _may_be_made(make: Callable[..., Any]) -> bool:
    if make in [getattr(families, name) for name in families.__all__]:
        return True
    bases = [getattr(sys.modules.get(module), name, None) for module, name in LAYERS]
    return isinstance(make, type) and any(isinstance(base, type) and issubclass(make, base) for base in bases)
