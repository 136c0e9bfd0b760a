"""The operators by ctypes: what ``native/shim.cpp`` does, for a PyTorch that it was not tested with.

Memory is of torch; a call holds addresses of tensors that local names keep alive while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Array, c_int64
from typing import Any

import torch
from torch import Tensor

from normscope.kernels import library
from normscope.kernels.elementary import spreads
from normscope.kernels.formulas import DBIAS, DWEIGHT, DX, Recipe, recipe_of, statistics_dtype
from normscope.kernels.formulas import (
    update_running as update_running,  # a few numbers a channel: torch's own will do
)
from normscope.kernels.structs import (
    BFLOAT16,
    FIXED,
    FIXED_BACKWARD,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    NO_MEMORY,
    NORM,
    NORM_BACKWARD,
    UNSERVED,
    NsCall,
    NsRecipe,
)

DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float64: FLOAT64}


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *codes: float) -> tuple[Tensor, Tensor]:
    y, stats = torch.empty_like(x), _statistics(x, recipe_of(codes))
    _run(NORM, codes, {"x": x}, {}, {"y": y}, {"weight": weight, "bias": bias, "stats": stats})
    return y, stats


def norm_out(x: Tensor, weight: Tensor | None, bias: Tensor | None, *codes_and_out: Any) -> None:
    *codes, out = codes_and_out
    if out.shape != x.shape or out.dtype != x.dtype:
        raise RuntimeError("normscope: out is not of x's shape and dtype")
    stats = _statistics(x, recipe_of(codes))
    _run(NORM, codes, {"x": x}, {}, {"y": out}, {"weight": weight, "bias": bias, "stats": stats})


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *codes: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, total, stats = torch.empty_like(x), torch.empty_like(x), _statistics(x, recipe_of(codes))
    if residual.shape == x.shape and residual.stride() != x.stride():
        x, residual = _laid(x, y), _laid(residual, y)
    flat = {"weight": weight, "bias": bias, "stats": stats}
    _run(NORM, codes, {"x": x, "residual": residual}, {}, {"y": y, "sum": total}, flat)
    return y, total, stats


def fixed(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, *codes: float
) -> Tensor:
    y = torch.empty_like(x)
    _run(FIXED, codes, {"x": x}, {}, {"y": y}, {"weight": weight, "bias": bias, "mean": mean, "var": var})
    return y


def norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, *codes_and_want: float
) -> tuple[Tensor, Tensor, Tensor]:
    flat = {"weight": weight, "stats": stats}
    return _backward(NORM_BACKWARD, codes_and_want, x, {"dy": dy, "dsum": dsum}, flat)


def fixed_backward(
    dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, *codes_and_want: float
) -> tuple[Tensor, Tensor, Tensor]:
    flat = {"weight": weight, "mean": mean, "var": var}
    return _backward(FIXED_BACKWARD, codes_and_want, x, {"dy": dy}, flat)


def norm_masked(
    x: Tensor, mask: Tensor, weight: Tensor | None, bias: Tensor | None, *codes: float
) -> tuple[Tensor, Tensor]:
    y, stats = torch.empty_like(x), _statistics(x, recipe_of(codes), 1)
    _run(NORM, codes, {"x": x}, {}, {"y": y}, {"weight": weight, "bias": bias, "stats": stats}, mask=mask)
    return y, stats


def norm_masked_backward(
    dy: Tensor, x: Tensor, mask: Tensor, stats: Tensor, weight: Tensor | None, *codes_and_want: float
) -> tuple[Tensor, Tensor, Tensor]:
    flat = {"weight": weight, "stats": stats}
    return _backward(NORM_BACKWARD, codes_and_want, x, {"dy": dy}, flat, mask)


def moments(x: Tensor, mask: Tensor | None, *codes: float) -> Tensor:
    stats = _statistics(x, recipe_of(codes), int(mask is not None))
    _run(NORM, codes, {"x": x}, {}, {"y": x}, {"stats": stats}, ("y",), mask=mask)
    return stats


def norm_backward_by(
    dy: Tensor, x: Tensor, stats: Tensor, sums: Tensor, weight: Tensor | None, *codes: float
) -> Tensor:
    if sums.dtype != torch.float64:
        raise RuntimeError("normscope: sums are float64")
    dx, flat = torch.empty_like(x), {"weight": weight, "stats": stats, "sums": sums}
    _run(NORM_BACKWARD, codes, {"x": x}, {"dy": dy}, {"dx": dx}, flat)
    return dx


def _statistics(x: Tensor, recipe: Recipe, more: int = 0) -> Tensor:
    rows = (3 if recipe.center else 1) + more
    return x.new_zeros((rows, recipe.sets(x)), dtype=statistics_dtype(x.dtype))


def _backward(
    what: int,
    codes_and_want: Sequence[float],
    x: Tensor,
    gradients: Mapping[str, Tensor | None],
    flat: Mapping[str, Tensor | None],
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    *codes, want = codes_and_want
    want, count = int(want), recipe_of(codes).parameters(x)
    weight = flat["weight"]
    dtype = statistics_dtype(x.dtype) if weight is None else weight.dtype
    dx = torch.empty_like(x)
    dweight = x.new_zeros(count if want & DWEIGHT else 0, dtype=dtype)
    dbias = x.new_zeros(count if want & DBIAS else 0, dtype=dtype)
    flat = {
        **flat,
        "dweight": dweight if want & DWEIGHT else None,
        "dbias": dbias if want & DBIAS else None,
    }
    _run(what, codes, {"x": x}, gradients, {"dx": dx}, flat, () if want & DX else ("dx",), mask)
    return dx if want & DX else x.new_empty(0), dweight, dbias


def _run(
    what: int,
    codes: Sequence[float],
    as_x: Mapping[str, Tensor],
    as_y: Mapping[str, Tensor | None],
    results: Mapping[str, Tensor],
    flat: Mapping[str, Tensor | None],
    unwanted: Sequence[str] = (),
    mask: Tensor | None = None,
) -> None:
    """One call of the kernels, tensors by the names of `NsCall`'s fields.

    ``as_x`` lie as x does; ``as_y`` are laid as the results do; both are packed where no kernel serves their strides.
    ``flat`` are one value for each parameter or set.
    """
    x, recipe = as_x["x"], recipe_of(codes)
    given = {name: t for name, t in as_y.items() if t is not None}
    vectors = {name: t.contiguous() for name, t in flat.items() if t is not None}
    for one, other in (("weight", "bias"), ("mean", "var")):
        if one in vectors and other in vectors:
            vectors[other] = vectors[other].to(vectors[one].dtype)
    _check(x, recipe, {**as_x, **given, **results}, vectors, mask)
    if x.numel() == 0:
        return
    parameters = next((vectors[n] for n in ("weight", "bias", "dweight", "dbias") if n in vectors), x)
    call = NsCall(
        what=what,
        dtype=DTYPES[x.dtype],
        weight_dtype=DTYPES[parameters.dtype],
        stored_dtype=DTYPES[vectors["mean"].dtype] if "mean" in vectors else 0,
        ndim=x.ndim,
        threads=torch.get_num_threads(),
        recipe=NsRecipe(recipe.axes, recipe.split, recipe.options, recipe.eps, recipe.gain, recipe.offset),
        sizes=_numbers(x.shape),
    )
    if mask is not None:
        steps = [s if n > 1 else 0 for s, n in zip(mask.stride(), mask.shape, strict=True)]
        call.mask, call.mask_strides = mask.data_ptr(), _numbers(steps)

    def attempt(inputs: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> int:
        first = next(iter(made.values()))
        laid = {name: _laid(t, first) for name, t in given.items()}
        call.x_strides, call.y_strides = _numbers(inputs["x"].stride()), _numbers(first.stride())
        for name, t in {**inputs, **laid, **vectors, **made}.items():
            setattr(call, name, None if name in unwanted else t.data_ptr())
        return library.run(call)

    code = attempt(as_x, results)
    if code == UNSERVED:
        packed = {n: torch.empty_like(t, memory_format=torch.contiguous_format) for n, t in results.items()}
        code = attempt({name: t.contiguous() for name, t in as_x.items()}, packed)
        for name, t in packed.items():
            if name not in unwanted:
                results[name].copy_(t)
    if code:
        raise RuntimeError(
            "normscope: out of memory"
            if code == NO_MEMORY
            else "normscope: no native kernel serves these axes"
        )


def _check(
    x: Tensor,
    recipe: Recipe,
    shaped: Mapping[str, Tensor],
    vectors: Mapping[str, Tensor],
    mask: Tensor | None,
) -> None:
    if mask is not None and (mask.dtype != torch.bool or not spreads(mask.shape, x.shape)):
        raise RuntimeError("normscope: mask is not boolean, or not of x's axes, each of its size or 1")
    for name, t in {**shaped, **vectors}.items():
        if t.dtype not in DTYPES:
            raise RuntimeError(f"normscope: {name} is not of dtype float32, float64, bfloat16 or float16")
    for name, t in shaped.items():
        if t.shape != x.shape or t.dtype != x.dtype:
            raise RuntimeError(f"normscope: {name} is not of x's shape and dtype")
    sets, parameters, masked = recipe.sets(x), recipe.parameters(x), mask is not None
    counts = {
        **dict.fromkeys(("weight", "bias"), (parameters, "parameters")),
        **dict.fromkeys(("mean", "var"), (sets, "sets")),
        "stats": (sets * ((3 if recipe.center else 1) + masked), "statistics"),
        "sums": (2 * sets, "sums"),
    }
    for name, t in vectors.items():
        count, each = counts.get(name, (t.numel(), ""))
        if t.numel() != count:
            raise RuntimeError(f"normscope: {name} has {t.numel()} values where there are {count} {each}")
    if "stats" in vectors and vectors["stats"].dtype != statistics_dtype(x.dtype):
        raise RuntimeError("normscope: stats are float32, or float64 where x is")


def _laid(t: Tensor, like: Tensor) -> Tensor:
    """At the strides of another, copied where need be."""
    return t if t.stride() == like.stride() else torch.empty_like(like).copy_(t)


def _numbers(values: Sequence[int]) -> Array[c_int64]:
    return (c_int64 * len(values))(*values)
