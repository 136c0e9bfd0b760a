"""Layers of other frameworks, known by the classes that they inherit from: nothing is imported to look."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def refuse_other_methods(obj: Any, home: type, methods: Sequence[str]) -> None:
    """Raise UnknownNormalization where ``obj`` computes by methods of its own, not by those of ``home``."""
    for name in methods:
        if getattr(type(obj), name, None) is not getattr(home, name, None):
            refuse(
                obj,
                f"inherits from {qualified_name(home)} but overrides {name}, so it may compute something else. "
                "normscope.identify(layer, example) finds what it computes; or say it with normscope.NormSpec(...)",
            )


def refuse(obj: Any, why: str) -> NoReturn:
    raise UnknownNormalization(f"{qualified_name(type(obj))} {why}.")
