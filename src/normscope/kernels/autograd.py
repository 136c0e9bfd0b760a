"""Gradients of the operators: autograd.Functions for calls that Python makes, and those of the operators in programs.

A backward pass is one native call. Under ``create_graph=True`` (double backward) it is done again by
`normscope.kernels.composite`, whose steps have derivatives of any order: that costs a forward pass, and only then.
What is kept for backward is the input, a few numbers a set, and the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from normscope.kernels import composite, ops
from normscope.kernels.formulas import DBIAS, DWEIGHT, DX, Recipe, parameter_shape, recipe_of, spec_of
from normscope.kernels.layout import KEPT, PARAMETER

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
"""of x, weight and bias"""


Following = tuple[Tensor, Tensor, float, float]
"""stored mean, stored variance, momentum, correction of the variance that is stored"""


class Norm(Function):
    """By the statistics of the input, which the stored ones of ``running`` follow where given."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        recipe: Tensor,
        running: Following | None,
    ) -> Tensor:
        y, stats = followed(x, weight, bias, recipe, running)
        ctx.save_for_backward(x, stats, weight)
        ctx.recipe = recipe
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, stats, weight = ctx.saved_tensors
        want = _want(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            return (*again(dy, x, weight, ctx.bias, _numbers(ctx.recipe), want), None, None)
        found = ops.norm_backward(dy, None, x, stats, weight, ctx.recipe, want)
        return (*shaped(found, weight, ctx.bias, want), None, None)


class NormMasked(Function):
    """By the elements where a mask is True, and the statistics of each set, which have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mask: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        codes: tuple[float, ...],
    ) -> tuple[Tensor, Tensor]:
        y: Tensor
        stats: Tensor
        y, stats = ops.norm_masked(x, mask, weight, bias, *codes)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, mask, stats, weight)
        ctx.codes = codes
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return y, stats

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * 5 if dy is None else (*_masked_gradients(ctx, dy, ops.norm_masked_backward), None)


class AddNorm(Function):
    """x + residual and its normalization; what is kept is the sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, recipe: Tensor
    ) -> tuple[Tensor, Tensor]:
        y: Tensor
        total: Tensor
        y, total, stats = ops.add_norm(x, residual, weight, bias, recipe)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, stats, weight)
        ctx.recipe = recipe
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> tuple[Tensor | None, ...]:
        total, stats, weight = ctx.saved_tensors
        for_x, for_residual, for_weight, for_bias, _ = ctx.needs_input_grad
        if dy is None:
            return dsum if for_x else None, dsum if for_residual else None, None, None, None
        want = _want((for_x or for_residual, for_weight, for_bias))
        dx: Tensor | None
        if torch.is_grad_enabled():
            dx, dweight, dbias = again(dy, total, weight, ctx.bias, _numbers(ctx.recipe), want)
            dx = dx + dsum if dx is not None and dsum is not None else dx
        else:
            found = ops.norm_backward(dy, dsum, total, stats, weight, ctx.recipe, want)
            dx, dweight, dbias = shaped(found, weight, ctx.bias, want)
        return dx if for_x else None, dx if for_residual else None, dweight, dbias, None


class Fixed(Function):
    """By stored statistics, which have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        recipe: Tensor,
    ) -> Tensor:
        y: Tensor = ops.fixed(x, mean, var, weight, bias, recipe)
        # x is kept for the weight's gradient alone. Training between this and backward moves the statistics: what was
        # normalized by is kept.
        ctx.save_for_backward(x, mean.clone(), var.clone(), weight)
        ctx.recipe = recipe
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight = ctx.saved_tensors
        for_x, _, _, for_weight, for_bias, _ = ctx.needs_input_grad
        want = _want((for_x, for_weight, for_bias))
        if torch.is_grad_enabled():
            dx, dweight, dbias = again(dy, x, weight, ctx.bias, _numbers(ctx.recipe), want, (mean, var))
        else:
            found = ops.fixed_backward(dy, x, mean, var, weight, ctx.recipe, want)
            dx, dweight, dbias = shaped(found, weight, ctx.bias, want)
        return dx, None, None, dweight, dbias, None


def followed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, recipe: Tensor, running: Following | None
) -> tuple[Tensor, Tensor]:
    """The normalization and its statistics, which the stored ones now follow."""
    y: Tensor
    y, stats = ops.norm(x, weight, bias, recipe)
    if running is not None and x.numel():
        mean, var, momentum, correction = running
        ops.update_running(mean, var, stats, momentum, x.numel() / stats.shape[1], correction)
    return y, stats


def _want(needed: tuple[bool, ...]) -> int:
    return DX * needed[0] | DWEIGHT * needed[1] | DBIAS * needed[2]


def _numbers(recipe: Tensor) -> Recipe:
    return recipe_of(recipe.tolist())


def shaped(
    found: tuple[Tensor, Tensor, Tensor],
    weight: Tensor | None,
    bias: tuple[torch.Size, torch.dtype] | None,
    want: int,
) -> Grads:
    """What a backward operator gave, in the parameters' shapes; the bias in its own dtype. A view is made where it
    changes something, since each takes a microsecond.
    """
    dx, dweight, dbias = found
    if want & DWEIGHT and weight is not None and weight.dim() != 1:
        dweight = dweight.view(weight.shape)
    if want & DBIAS and bias is not None and (len(bias[0]) != 1 or bias[1] is not dbias.dtype):
        dbias = dbias.view(bias[0]).to(bias[1])
    return (
        dx if want & DX else None,
        dweight if want & DWEIGHT else None,
        dbias if want & DBIAS else None,
    )


def again(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: tuple[torch.Size, torch.dtype] | None,
    recipe: Recipe,
    want: int,
    state: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
) -> Grads:
    """The backward pass as something that can be differentiated: forward once more by `composite`, and through it.

    The values that it is differentiated by are views made here, so that a weight that was itself computed from x does
    not count twice. The bias enters by its shape: its own value has no influence.
    """
    with torch.enable_grad():
        spec = spec_of(recipe, x.ndim, weight is not None, bias is not None)
        value = x.view_as(x)
        w = None if weight is None else weight.view_as(weight)
        b = None if bias is None else torch.zeros(bias[0], dtype=bias[1], device=x.device, requires_grad=True)
        places = parameter_shape(x, recipe, PARAMETER)
        w_placed, b_placed = (None if t is None else t.reshape(places) for t in (w, b))
        if state is None:
            y = composite.normalize(value, spec, w_placed, b_placed, mask=mask)
        else:
            sets = parameter_shape(x, recipe, KEPT)
            mean, var = (t.reshape(sets) for t in state)
            y = composite.fixed(value, spec, mean, var, w_placed, b_placed)
        inputs = [t if want & bit else None for t, bit in ((value, DX), (w, DWEIGHT), (b, DBIAS))]
        found = iter(torch.autograd.grad(y, [t for t in inputs if t is not None], dy, create_graph=True))
        dx, dweight, dbias = (None if t is None else next(found) for t in inputs)
        return dx, dweight, dbias


# The operators in programs ------------------------------------------------------------------------------------------


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, *ctx.codes = inputs
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.save_for_backward(x, output[1], weight)


def _norm_gradient(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, stats, weight = ctx.saved_tensors
    want = _want(ctx.needs_input_grad)
    return (*_gradient(ctx, dy, None, x, stats, weight, want), *[None] * 6)


def _keep_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, weight, bias, *ctx.codes = inputs
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.save_for_backward(output[1], output[2], weight)


def _add_norm_gradient(ctx: Any, dy: Tensor, dsum: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    total, stats, weight = ctx.saved_tensors
    for_x, for_residual, for_weight, for_bias, *_rest = ctx.needs_input_grad
    want = _want((for_x or for_residual, for_weight, for_bias))
    dx, dweight, dbias = _gradient(ctx, dy, dsum, total, stats, weight, want)
    return (dx if for_x else None, dx if for_residual else None, dweight, dbias, *[None] * 6)


def _gradient(
    ctx: Any, dy: Tensor, dsum: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, want: int
) -> Grads:
    if torch.is_grad_enabled():
        dx, dweight, dbias = again(dy, x, weight, ctx.bias, recipe_of(ctx.codes), want)
        return dx + dsum if dx is not None and dsum is not None else dx, dweight, dbias
    found = torch.ops.normscope.norm_backward(dy, dsum, x, stats, weight, *ctx.codes, want)
    return shaped(found, weight, ctx.bias, want)


def _keep_fixed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mean, var, weight, bias, *ctx.codes = inputs
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.save_for_backward(x, mean, var, weight)


def _fixed_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, mean, var, weight = ctx.saved_tensors
    for_x, _, _, for_weight, for_bias, *_rest = ctx.needs_input_grad
    want = _want((for_x, for_weight, for_bias))
    if torch.is_grad_enabled():
        dx, dweight, dbias = again(dy, x, weight, ctx.bias, recipe_of(ctx.codes), want, (mean, var))
    else:
        found = torch.ops.normscope.fixed_backward(dy, x, mean, var, weight, *ctx.codes, want)
        dx, dweight, dbias = shaped(found, weight, ctx.bias, want)
    return (dx, None, None, dweight, dbias, *[None] * 6)


def _keep_masked(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, mask, weight, bias, *ctx.codes = inputs
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.save_for_backward(x, mask, output[1], weight)


def _masked_gradient(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_masked_gradients(ctx, dy, torch.ops.normscope.norm_masked_backward), *[None] * 6)


def _masked_gradients(
    ctx: Any, dy: Tensor, backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> tuple[Tensor | None, None, Tensor | None, Tensor | None]:
    """Of x, mask, weight and bias."""
    x, mask, stats, weight = ctx.saved_tensors
    for_x, _, for_weight, for_bias, *_rest = ctx.needs_input_grad
    want = _want((for_x, for_weight, for_bias))
    if torch.is_grad_enabled():
        dx, dweight, dbias = again(dy, x, weight, ctx.bias, recipe_of(ctx.codes), want, mask=mask)
    else:
        found = backward(dy, x, mask, stats, weight, *ctx.codes, want)
        dx, dweight, dbias = shaped(found, weight, ctx.bias, want)
    return dx, None, dweight, dbias


for _name, _backward, _setup in (
    ("normalize_masked", _masked_gradient, _keep_masked),
    ("normalize", _norm_gradient, _keep_norm),
    ("add_normalize", _add_norm_gradient, _keep_add_norm),
    ("normalize_by", _fixed_gradient, _keep_fixed),
):
    torch.library.register_autograd(f"normscope::{_name}", _backward, setup_context=_setup, lib=ops.FRAGMENT)
