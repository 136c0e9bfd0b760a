"""Normalizations as functions: any specification, and the named ones with PyTorch's own signatures.

`batch_norm`, `layer_norm`, `group_norm`, `instance_norm` and `rms_norm` take the arguments of their namesakes in
torch.nn.functional, mean the same, and raise the same errors: a call that is not plainly regular goes to the namesake
itself, which raises or knows better. What differs is how exact they are (see `normscope.kernels`) and how fast.

With ``out=`` the layer, RMS and group norms write their result into a given tensor, for inference.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.overrides import has_torch_function_variadic

from normscope.errors import BadInput
from normscope.kernels import composite, dispatch
from normscope.kernels.elementary import has_virtual_batches, state_axes
from normscope.kernels.regular import (
    ask,
    by_channel,
    codes_of,
    in_order,
    into,
    only_tensors,
    plain,
    recipe,
    remembered,
    same,
    seen,
    seen_trailing,
    states,
    trailing,
    writable,
)
from normscope.spec import NormSpec, RunningState

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm",
    "group_norm",
    "instance_norm",
    "l2_norm",
    "layer_norm",
    "normalize",
    "pixel_norm",
    "rms_norm",
    "scale_norm",
]


def normalize(
    input: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    running: RunningState | None = None,
    training: bool = True,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalize as a specification says: y = (offset + weight) * gain * (x - mean) / denominator + bias.

    Arguments:
        input: floating point, of any shape that ``spec`` fits.
        spec: what to compute, of `normscope.families` or your own `NormSpec`.
        weight, bias: of the shapes that ``spec.bind(input.shape)`` names; None is a factor of 1, and no bias.
        running: stored mean and variance, tensors. With ``training=True`` updated in place, with ``training=False``
            (or under batch renormalization) read.
        training: for a spec with running statistics, normalize by the batch (True) or by ``running`` (False).
        mask: boolean, broadcastable to ``input``, True where an element counts. Statistics are exact over the True
            elements; the output is 0 at the others, and nothing that stands there reaches outputs or gradients.

    Returns a tensor of the shape and dtype of ``input``. Half types are computed in float32.
    Raises BadInput where arguments do not fit each other, PatternError where the shape does not fit the spec.

    >>> import torch
    >>> from normscope import families
    >>> x = torch.tensor([[1.0, 2.0, 4.0, 100.0]])
    >>> normalize(x, families.layer_norm(eps=0.0), mask=x < 10)
    tensor([[-1.0690, -0.2673,  1.3363,  0.0000]])
    """
    if not isinstance(spec, NormSpec):
        raise BadInput(
            f"normalize takes a NormSpec, which says which axes and every convention; got {spec!r}. For a pattern "
            'alone write NormSpec("b c ... -> c")'
        )
    if has_torch_function_variadic(input, weight, bias, mask):
        return ask(
            normalize,
            (input, weight, bias, mask),
            input,
            spec,
            weight=weight,
            bias=bias,
            running=running,
            training=training,
            mask=mask,
        )
    only_tensors("normalize", input, weight=weight, bias=bias, mask=mask)
    if input.is_nested:
        raise BadInput(
            "normalize takes dense tensors, got a nested one. Pad it, and pass mask=, True where it is valid"
        )
    if mask is None:
        y = _fast(input, spec, weight, bias, running if spec.running else None, training)
        if y is not None:
            return y
    return composite.normalize(input, spec, weight, bias, running=running, training=training, mask=mask)


def _fast(
    input: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    state: RunningState | None,
    training: bool,
) -> Tensor | None:
    """By dispatch, where that knows the way: None leaves the call, and its errors, to the composite path."""
    parameters = [(weight, spec.weight), (bias, spec.bias)]
    if state is not None:
        parameters += [(state.mean, state_axes(spec)), (state.var, state_axes(spec))]
    call = codes_of(input, spec, *parameters)
    if call is None:
        return None
    if spec.running is None or (training and state is None):
        return dispatch.norm(input, weight, bias, call)
    if state is None:
        return None
    if not training:
        return dispatch.fixed(input, state.mean, state.var, weight, bias, call)
    if spec.scale != "std" or has_virtual_batches(spec):
        return None
    momentum = spec.running.momentum
    fraction = 1 / (state.batches + 1) if momentum is None else momentum
    y = dispatch.norm_running(input, weight, bias, state.mean, state.var, call, fraction)
    state.batches += 1
    return y


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


def scale_norm(input: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Scale norm: one scalar times the unit vector, y = weight * x / max(|x|, eps) over the last axis.

    Shapes: input (..., D), weight (). Raises BadInput where they do not fit. Source: Nguyen and Salazar 2019.

    >>> import torch
    >>> scale_norm(torch.tensor([3.0, 4.0]), torch.tensor(10.0))
    tensor([6., 8.])
    """
    only_tensors("scale_norm", input, weight=weight)
    return normalize(input, _spec("scale", input.dim(), 0, eps), weight)


def pixel_norm(input: Tensor, eps: float = 1e-8) -> Tensor:
    """Pixel norm: every position by the root of its mean square over channels, y = x / sqrt(mean(x^2) + eps).

    Shapes: input (B, C, ...). Raises BadInput where it is no floating point tensor. Source: Karras et al. 2018,
    section 4.2.

    >>> import torch
    >>> pixel_norm(torch.tensor([[3.0, 4.0]]))
    tensor([[0.8485, 1.1314]])
    """
    only_tensors("pixel_norm", input)
    return normalize(input, _spec("pixel", input.dim(), 0, eps))


def l2_norm(input: Tensor, dim: int = -1, eps: float = 1e-12) -> Tensor:
    """Unit vectors along one axis: y = x / max(|x|, eps), as torch.nn.functional.normalize with p = 2.

    Shapes: input of any. Raises BadInput where ``dim`` is no axis of it.

    >>> import torch
    >>> l2_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    only_tensors("l2_norm", input)
    ndim = input.dim()
    if not -ndim <= dim < ndim:
        raise BadInput(f"dim is an axis of the input, which has {ndim}; got {dim}. The last is -1")
    return normalize(input, _spec("l2", ndim, dim % ndim, eps))


def _spec(kind: str, ndim: int, number: int, eps: float) -> NormSpec:
    call = recipe(kind, ndim, number, eps)
    if call is None:
        raise BadInput(f"eps is a finite number; got {eps!r}. Leave it out for the usual one")
    return call.spec
