"""Reader for calls of the operators ``normscope::*``, as programs hold them that were traced or exported.

Their integers say the axes (written by ``kernels/layout.py``, taken apart by ``kernels/formulas.py``); here the axes
get the names that people use. An operator that adds a residual first is not read: what it normalizes is no tensor that
went in.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from normscope.reading.base import CallReading, Reader
from normscope.spec import Running
from normscope.spec.axes import last_axes

if TYPE_CHECKING:
    from normscope.kernels.formulas import Recipe
    from normscope.spec import NormSpec

BY_INPUT = ("norm", "normalize", "norm_packed", "norm_only_packed")
BY_STATE = ("fixed", "normalize_by", "fixed_packed")
ONE_NAME = {"weight": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
CODES = ("axes", "split", "options", "eps", "gain", "offset")


def _read_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallReading | None:
    schema: Any = getattr(getattr(func, "default", func), "_schema", None)
    home, _, name = schema.name.partition("::") if schema is not None else ("", "", "")
    if home != "normscope" or name not in (*BY_INPUT, *BY_STATE):
        return None
    from normscope.kernels.formulas import recipe_of

    given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
    tensors = {ours: given[theirs] for theirs, ours in ONE_NAME.items() if given.get(theirs) is not None}
    packed = given["recipe"].tolist() if "recipe" in given else [given[code] for code in CODES]
    recipe = recipe_of([*map(int, packed[:3]), *packed[3:]])
    spec = _spec(recipe, given["x"].dim(), "weight" in tensors, "bias" in tensors, name in BY_STATE)
    couples = spec.properties().couples_samples
    mode = "running" if name in BY_STATE else "batch" if couples else "input"
    return CallReading(spec, f"normscope.{name}", given["x"], tensors, mode)


@lru_cache
def _spec(recipe: Recipe, ndim: int, weight: bool, bias: bool, stored: bool) -> NormSpec:
    from normscope.kernels.formulas import spec_of

    found = spec_of(recipe, ndim, weight, bias)
    kept, erased = found.pattern.kept, found.pattern.erased
    running = Running(momentum=0.0) if stored else None  # this call moves nothing
    affine = {"weight": found.weight, "bias": found.bias}
    if not recipe.split and (*kept, *erased) == found.pattern.names:
        last = last_axes(len(erased))
        where = {field: last if names else names for field, names in affine.items()}  # "" is one scalar
        return found.replace(stats=f"... {last} -> ...", ndim=(ndim, ndim), running=running, **where)
    factors = next((" ".join(group) for group in found.pattern.left if len(group) > 1), "")

    def named(text: str) -> str:
        names = {"a0": "b", "a1": "c"} if factors != "a1 i1" else {"a0": "b", "a1": "g", "i1": "c"}
        return re.sub(r"[ai]\d+", lambda match: names.get(match[0], match[0].replace("a", "x")), text)

    def joined(text: str | None) -> str | None:
        """Two factors of one input axis are one axis of a parameter."""
        return text if text is None else named(text.replace(factors, f"({factors})") if factors else text)

    return found.replace(
        stats=named(found.stats),
        ndim=(ndim, ndim),
        sizes={named(name): size for name, size in found.sizes.items()},
        running=running,
        **{field: joined(names) for field, names in affine.items()},
    )


READER = Reader(needs="normscope.kernels.ops", knows=(), read_call=_read_call)
