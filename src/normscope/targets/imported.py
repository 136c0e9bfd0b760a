"""``package.module:attribute``: a module, or a callable returning one, ``(model, inputs[, targets])``, or a dict."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from normscope.errors import BadTarget
from normscope.targets import Loaded


def load(target: str) -> Loaded:
    """Import and call what the string names. The working directory is importable, as for ``python -m``."""
    module_name, colon, attribute = target.partition(":")
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
        value: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        hint = (
            "run from the folder that holds it, or install it"
            if missing == module_name or module_name.startswith(f"{missing}.")
            else f"{module_name} imports it; install it"
        )
        raise BadTarget(f"cannot import {module_name!r}: there is no module {missing!r}; {hint}") from error
    except (Exception, SystemExit) as error:
        raise BadTarget(f"importing {module_name!r} raised {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = [name for name in dir(value) if not name.startswith("_")]
            raise BadTarget(
                f"{module_name!r} has no attribute {attribute!r}; it has: {', '.join(names[:12]) or 'none'}"
            )
        value = getattr(value, part)
    return _loaded(target, value)


def _loaded(target: str, value: Any) -> Loaded:
    if not isinstance(value, torch.nn.Module) and callable(value):
        needed = _required(value)
        if needed:
            raise BadTarget(
                f"{target} needs the arguments {', '.join(needed)}; wrap it in a function without arguments that "
                "returns the model, or (model, inputs)"
            )
        try:
            value = value()
        except (Exception, SystemExit) as error:
            raise BadTarget(f"calling {target} raised {type(error).__name__}: {error}") from error
    if isinstance(value, Mapping) and isinstance(value.get("model"), torch.nn.Module):
        known = {f.name for f in fields(Loaded)}
        unknown = [str(key) for key in value if key not in known]
        if unknown:
            raise BadTarget(
                f"{target} returned a dict with {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return Loaded(**value)
    if isinstance(value, tuple) and 2 <= len(value) <= 3 and isinstance(value[0], torch.nn.Module):
        return Loaded(*value)
    if isinstance(value, torch.nn.Module):
        return Loaded(value)
    raise BadTarget(
        f"{target} is a {type(value).__name__}; expected a torch.nn.Module, or a callable that returns one, "
        "(model, inputs), (model, inputs, targets) or a dict of these"
    )


def _required(value: Any) -> list[str]:
    """Names of the parameters that have no default."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
