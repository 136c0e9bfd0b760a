"""Norms of (B, C, ...) with parameters on the channels."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.overrides import has_torch_function_variadic

from normscope.kernels import dispatch
from normscope.kernels.regular import (
    ask,
    by_channel,
    into,
    only_tensors,
    plain,
    recipe,
    remembered,
    seen,
    states,
    writable,
)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Group norm: every group of a sample's channels by its mean and biased variance, over positions too.

    As torch.nn.functional.group_norm. Shapes: input (B, C, ...), weight and bias (C,). Source: Wu and He 2018.

    >>> import torch
    >>> group_norm(torch.tensor([[1.0, 3.0, 10.0, 30.0]]), 2, eps=0.0)
    tensor([[-1.,  1., -1.,  1.]])
    """
    if has_torch_function_variadic(input, weight, bias):
        return ask(
            group_norm, (input, weight, bias), input, num_groups, weight=weight, bias=bias, eps=eps, out=out
        )
    call = None
    if (
        by_channel(input, weight, bias)
        and type(num_groups) is int
        and num_groups > 0
        and input.shape[1] % num_groups == 0
        and input.numel() != num_groups  # one value a set, in a batch of one, is an error of torch's
    ):
        call = recipe("group", input.dim(), num_groups, eps)
    if call is None:
        only_tensors("group_norm", input)
        return into(F.group_norm(input, num_groups, weight, bias, eps), out)
    return dispatch.norm(
        input, weight, bias, call, out if out is None else writable(out, input, weight, bias)
    )


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch norm: every channel by its mean and biased variance over samples and positions.

    As torch.nn.functional.batch_norm: with ``training`` by the batch, which the running statistics then follow in
    place (the variance with M / (M - 1)); without, by the running statistics. Shapes: input (B, C, ...), all else (C,).
    Source: Ioffe and Szegedy 2015.

    >>> import torch
    >>> mean, var = torch.zeros(1), torch.ones(1)
    >>> batch_norm(torch.tensor([[1.0], [3.0]]), mean, var, training=True, momentum=0.5, eps=1e-12)
    tensor([[-1.],
            [ 1.]])
    >>> mean, var
    (tensor([1.]), tensor([1.5000]))
    """
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias):
        return ask(
            batch_norm,
            (input, running_mean, running_var, weight, bias),
            input,
            running_mean,
            running_var,
            weight=weight,
            bias=bias,
            training=training,
            momentum=momentum,
            eps=eps,
        )
    if not training and not is_compiling() and running_mean is not None and running_var is not None:
        call = seen("batch", input, 0, eps)
        if call is not None:
            y = dispatch.fixed_at_once(input, running_mean, running_var, weight, bias, call)
            if y is not None:
                return y
    call = None
    # statistics may be float32 beside half parameters, which torch does not allow
    if (
        by_channel(input, weight, bias)
        and by_channel(input, running_mean, running_var)
        and states(running_mean, running_var, training)
    ):
        known = remembered if type(eps) is float and eps >= 0 else recipe
        call = known("batch", input.dim(), 0, eps)
        if call is not None and ((eps <= 0 or input.numel() == input.shape[1]) if training else eps < 0):
            call = None
    if call is None or not isinstance(momentum, (float, int)):
        only_tensors("batch_norm", input)
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if training:
        return dispatch.norm_running(input, weight, bias, running_mean, running_var, call, plain(momentum))
    assert running_mean is not None  # or states() said no
    assert running_var is not None
    return dispatch.fixed(input, running_mean, running_var, weight, bias, call)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Instance norm: every channel of every sample by its mean and biased variance over positions.

    As torch.nn.functional.instance_norm: running statistics follow the mean over samples. Shapes: input (B, C, ...),
    all else (C,). Source: Ulyanov, Vedaldi and Lempitsky 2016.

    >>> import torch
    >>> instance_norm(torch.tensor([[[1.0, 3.0]], [[10.0, 30.0]]]), eps=1e-12)
    tensor([[[-1.,  1.]],
    <BLANKLINE>
            [[-1.,  1.]]])
    """
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias):
        return ask(
            instance_norm,
            (input, running_mean, running_var, weight, bias),
            input,
            running_mean=running_mean,
            running_var=running_var,
            weight=weight,
            bias=bias,
            use_input_stats=use_input_stats,
            momentum=momentum,
            eps=eps,
        )
    call = None
    # statistics may be float32 beside half parameters, which torch does not allow
    if (
        by_channel(input, weight, bias)
        and by_channel(input, running_mean, running_var)
        and states(running_mean, running_var, use_input_stats)
    ):
        samples, channels = input.shape[:2]
        if not use_input_stats:  # one pair of statistics a channel, as in batch norm
            call = recipe("batch", input.dim(), 0, eps)
        elif input.dim() > 2 and input.numel() > samples * channels:
            call = recipe("instance", input.dim(), 0, eps)
    if call is None or not isinstance(momentum, (float, int)):
        only_tensors("instance_norm", input)
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if use_input_stats:
        return dispatch.norm_running(input, weight, bias, running_mean, running_var, call, plain(momentum))
    assert running_mean is not None  # or states() said no
    assert running_var is not None
    return dispatch.fixed(input, running_mean, running_var, weight, bias, call)
