"""A residual added and the sum normalized, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import has_torch_function_variadic

from normscope.kernels import dispatch
from normscope.kernels.regular import ask, only_tensors, same, trailing


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """The sum ``input + residual`` and its layer norm, in one pass: returns (layer norm of the sum, sum).

    The sum has the dtype of ``input`` and is rounded to it before it is normalized. Shapes: both inputs
    (..., *normalized_shape). Raises BadInput where they differ in shape or dtype, else as `layer_norm`.

    >>> import torch
    >>> add_layer_norm(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 0.0, 1.0]), (3,), eps=0.0)
    (tensor([-1.0690, -0.2673,  1.3363]), tensor([1., 2., 4.]))
    """
    if has_torch_function_variadic(input, residual, weight, bias):
        return ask(
            add_layer_norm,
            (input, residual, weight, bias),
            input,
            residual,
            normalized_shape,
            weight=weight,
            bias=bias,
            eps=eps,
        )
    same("add_layer_norm", input, residual)
    call = trailing("layer", input, normalized_shape, weight, bias, eps)
    if call is None:
        only_tensors("add_layer_norm", input, weight=weight, bias=bias)
        total = input + residual
        return F.layer_norm(total, normalized_shape, weight, bias, eps), total
    return dispatch.add_norm(input, residual, weight, bias, call)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum ``input + residual`` and its RMS norm, in one pass: returns (RMS norm of the sum, sum).

    The sum has the dtype of ``input`` and is rounded to it before it is normalized. Shapes: both inputs
    (..., *normalized_shape). Raises BadInput where they differ in shape or dtype, else as `rms_norm`.

    >>> import torch
    >>> add_rms_norm(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 0.0]), (2,))
    (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    if has_torch_function_variadic(input, residual, weight):
        return ask(
            add_rms_norm,
            (input, residual, weight),
            input,
            residual,
            normalized_shape,
            weight=weight,
            eps=eps,
        )
    same("add_rms_norm", input, residual)
    call = trailing("rms", input, normalized_shape, weight, None, eps)
    if call is None:
        only_tensors("add_rms_norm", input, weight=weight)
        total = input + residual
        return F.rms_norm(total, normalized_shape, weight, eps), total
    return dispatch.add_norm(input, residual, weight, None, call)
