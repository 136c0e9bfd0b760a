"""``package.module:attribute``: a module, or a callable returning one, ``(model, inputs[, targets])``, or a dict."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from normscope.doctor.source import own_file
from normscope.errors import BadTarget
from normscope.targets import Loaded
from normscope.targets.failures import blamed
from normscope.targets.state_files.folder import weights_of

SHOWN = 12
"""names that are told where one is not there, the nearest first"""


def load(target: str) -> Loaded:
    """Import and call what the string names. The working directory is importable, as for ``python -m``."""
    return loaded(target, named(target))


def named(target: str) -> Any:
    """What the string names, imported and not called.

    Raises:
        BadTarget: it is no import string, cannot be imported, or is not there.
    """
    module_name, colon, attribute = target.partition(":")
    if not colon and Path(target).is_dir():
        weights_of(Path(target))
    if not colon or not module_name or not attribute:
        raise BadTarget(
            f"cannot read the target {target!r}: write package.module:attribute (a module or a function that "
            "returns one), demo, or demo:healthy"
        )
    if "/" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise BadTarget(f"{target!r} looks like a path; write it as an import: {dotted}:{attribute}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with blamed(f"importing {module_name!r}"):
            value: Any = import_module(module_name)
    except BadTarget as failure:
        raise _missing(module_name, failure) from failure.__cause__
    for part in attribute.split("."):
        with blamed(f"looking up {attribute!r} in {module_name!r}"):
            if not hasattr(value, part):
                names = [name for name in dir(value) if not name.startswith("_")]
                break
            value = getattr(value, part)
    else:
        return value
    near = get_close_matches(part, names, n=SHOWN, cutoff=0.5)
    ordered = [*near, *(name for name in names if name not in near)]
    more = ", ..." if len(ordered) > SHOWN else ""
    raise BadTarget(
        f"{module_name!r} has no attribute {attribute!r}; it has: {', '.join(ordered[:SHOWN]) or 'none'}{more}"
    )


def source_of(target: str) -> str:
    """``file.py:1`` of the module that an import string names, once imported; "" for other targets, or elsewhere."""
    module = sys.modules.get(target.partition(":")[0]) if ":" in target else None
    file = own_file(getattr(module, "__file__", None), str(Path.cwd()))
    return f"{file}:1" if file else ""


def _missing(module_name: str, failure: BadTarget) -> BadTarget:
    """The failure of an import; where a module is missing, with what to do about it."""
    cause = failure.__cause__
    if not isinstance(cause, ModuleNotFoundError):
        return failure
    missing = cause.name or module_name
    hint = (
        "run from the folder that holds it, or install it"
        if missing == module_name or module_name.startswith(f"{missing}.")
        else f"{module_name} imports it; install it"
    )
    return BadTarget(f"cannot import {module_name!r}: there is no module {missing!r}; {hint}")


def loaded(target: str, value: Any) -> Loaded:
    """What a target gave, as a model with what came along. Raises BadTarget where there is none."""
    if not isinstance(value, torch.nn.Module) and callable(value):
        needed = required(value)
        if needed:
            raise BadTarget(
                f"{target} needs the arguments {', '.join(needed)}; wrap it in a function without arguments that "
                "returns the model, or (model, inputs)"
            )
        with blamed(f"calling {target}"):
            value = value()
    if isinstance(value, Mapping):
        return _from_mapping(target, dict(value))
    if isinstance(value, tuple) and 2 <= len(value) <= 3 and isinstance(value[0], torch.nn.Module):
        return Loaded(*value)
    if isinstance(value, torch.nn.Module):
        return Loaded(value)
    raise BadTarget(
        f"{target} is a {type(value).__name__}; expected a torch.nn.Module, or a callable that returns one, "
        "(model, inputs), (model, inputs, targets) or a dict of these"
    )


def _from_mapping(target: str, value: dict[Any, Any]) -> Loaded:
    known = [f.name for f in fields(Loaded) if f.init]
    unknown = [str(key) for key in value if key not in known]
    if unknown:
        raise BadTarget(f"{target} returned a dict with {', '.join(unknown)}; known: {', '.join(known)}")
    if not isinstance(value.get("model"), torch.nn.Module):
        raise BadTarget(
            f"{target} returned a dict whose model is a {type(value.get('model')).__name__}; expected a torch.nn.Module"
        )
    return Loaded(**value)


def required(value: Any) -> list[str]:
    """Names of the parameters that have no default."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
