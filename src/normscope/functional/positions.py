"""Norms over the last axes: every position on its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.overrides import has_torch_function_variadic

from normscope.kernels import dispatch
from normscope.kernels.regular import ask, in_order, into, seen_trailing, trailing, writable


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Layer norm: y = weight * (x - mean) / sqrt(var + eps) + bias over the last axes, biased variance.

    As torch.nn.functional.layer_norm. Shapes: input (..., *normalized_shape), weight and bias ``normalized_shape``.
    Source: Ba, Kiros and Hinton 2016.

    >>> import torch
    >>> layer_norm(torch.tensor([1.0, 2.0, 4.0]), (3,), eps=0.0)
    tensor([-1.0690, -0.2673,  1.3363])
    """
    if has_torch_function_variadic(input, weight, bias):
        return ask(
            layer_norm,
            (input, weight, bias),
            input,
            normalized_shape,
            weight=weight,
            bias=bias,
            eps=eps,
            out=out,
        )
    input = in_order(input)
    if out is None and not is_compiling():
        call = seen_trailing("layer", input, normalized_shape, eps)
        y = dispatch.at_once(input, weight, bias, call) if call is not None else None
        if y is not None:
            return y
    call = trailing("layer", input, normalized_shape, weight, bias, eps)
    if call is None:
        return into(F.layer_norm(input, normalized_shape, weight, bias, eps), out)
    return dispatch.norm(
        input, weight, bias, call, out if out is None else writable(out, input, weight, bias)
    )


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """RMS norm: y = weight * x / sqrt(mean(x^2) + eps) over the last axes.

    As torch.nn.functional.rms_norm. ``eps=None`` is the machine epsilon of the dtype (of float32 for half types).
    Shapes: input (..., *normalized_shape), weight ``normalized_shape``. Source: Zhang and Sennrich 2019.

    >>> import torch
    >>> rms_norm(torch.tensor([3.0, 4.0]), (2,))
    tensor([0.8485, 1.1314])
    """
    if has_torch_function_variadic(input, weight):
        return ask(rms_norm, (input, weight), input, normalized_shape, weight=weight, eps=eps, out=out)
    input = in_order(input)
    if out is None and not is_compiling():
        call = seen_trailing("rms", input, normalized_shape, eps)
        y = dispatch.at_once(input, weight, None, call) if call is not None else None
        if y is not None:
            return y
    call = trailing("rms", input, normalized_shape, weight, None, eps)
    if call is None:
        return into(F.rms_norm(input, normalized_shape, weight, eps), out)
    return dispatch.norm(input, weight, None, call, out if out is None else writable(out, input, weight))
