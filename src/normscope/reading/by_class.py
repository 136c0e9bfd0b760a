"""Layers known by the classes that they inherit from, and what overrides those: nothing is imported to look."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn

from normscope.reading.base import UnknownNormalization, qualified_name


def home_of(obj: Any, package: str, names: Collection[str]) -> type | None:
    """The class of ``package`` (``"flax.nnx."``) and one of these names that an object inherits from."""
    return next(
        (
            cls
            for cls in type(obj).__mro__
            if cls.__module__.startswith(package) and cls.__qualname__ in names
        ),
        None,
    )


def put_on(obj: Any, methods: Iterable[str]) -> str:
    """The first of these methods that was put on one object and hides its class's; "" where none was. Python calls
    ``__call__`` of the class whatever was put on an object.

    >>> import torch
    >>> norm = torch.nn.LayerNorm(4)
    >>> norm.forward = lambda x: x
    >>> put_on(norm, ("__call__", "forward"))
    'forward'
    """
    own = getattr(obj, "__dict__", {})
    return next((name for name in methods if name in own and name != "__call__"), "")


def has_put_on(name: str) -> str:
    """Words for a method that was put on an object."""
    return f"has a {name} put on it that is not its class's, so it may compute something else"


def refuse_other_methods(obj: Any, home: type, methods: Sequence[str]) -> None:
    """Raise UnknownNormalization where ``obj`` computes by methods of its own, not by those of ``home``."""
    if found := put_on(obj, methods):
        refuse(
            obj,
            f"{has_put_on(found)}. Define it in a subclass, and normscope.identify(layer, example) finds what it "
            "computes; or say it with normscope.NormSpec(...)",
        )
    for name in methods:
        if getattr(type(obj), name, None) is not getattr(home, name, None):
            refuse(
                obj,
                f"inherits from {qualified_name(home)} but overrides {name}, so it may compute something else. "
                "normscope.identify(layer, example) finds what it computes; or say it with normscope.NormSpec(...)",
            )


def refuse(obj: Any, why: str) -> NoReturn:
    raise UnknownNormalization(f"{qualified_name(type(obj))} {why}.")
