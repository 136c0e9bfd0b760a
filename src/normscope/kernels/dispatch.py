"""Which path a call takes: native kernels, PyTorch's own, or plain torch (`normscope.kernels.composite`).

| the call | goes to | because |
|---|---|---|
| CPU; float32, float64, bfloat16 or float16; axes and options that the kernels serve | native | exact, and fast |
| the same under torch.compile and torch.export | operators with gradients | one node of the program |
| the same under torch.func and forward mode, in tensor subclasses, torch.jit and ONNX export | the rows below | they see through PyTorch's operators, not through ours |
| no native library for it | the rows below | |
| another device than the CPU, and PyTorch has the function | PyTorch's | its kernels there are fast |
| RMS norm on the CPU | PyTorch's | nothing is subtracted, so nothing is lost |
| torch.jit and ONNX export, and PyTorch has the function | PyTorch's | one known node, not its arithmetic |
| any other | plain torch | it computes any specification; and where PyTorch has the function, its kernels on the CPU lose the digits of a large mean: a constant channel of 1e6 comes out as 8.4 instead of the bias |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn import functional as F

from normscope.kernels import composite, library, ops
from normscope.kernels.autograd import AddNorm, Fixed, Norm, NormMasked, followed
from normscope.kernels.elementary import HALF, constant
from normscope.kernels.layout import (
    CENTER,
    INNER_GIVEN,
    KEPT,
    MOST_AXES,
    PARAMETER,
    ROUND_FIRST,
    SCALE_SHIFT,
    SCALES,
    SPLIT_SHIFT,
    Call,
    axis_code,
)
from normscope.spec import NormSpec, Running, RunningState

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""types that are what they seem; any other may do something of its own when an operator is called"""

is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
# Not public, and only these ask without cost; where a PyTorch lacks one, what it has instead is slower.
transforming: Callable[[], bool] = getattr(
    torch._C,
    "_are_functorch_transforms_active",
    lambda: torch._C._functorch.peek_interpreter_stack() is not None,
)
tracing: Callable[[], bool] = torch._C._is_tracing

apply_norm: Callable[..., Tensor] = Norm.apply
apply_norm_masked: Callable[..., tuple[Tensor, Tensor]] = NormMasked.apply
apply_fixed: Callable[..., Tensor] = Fixed.apply
apply_add_norm: Callable[..., tuple[Tensor, Tensor]] = AddNorm.apply


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call, out: Tensor | None = None
) -> Tensor:
    """Normalize by the statistics of the input; into ``out`` where one is given, which has no gradient."""
    recipe = _native(x, call)
    if recipe is None:
        y = _elsewhere(x, weight, bias, call)
        return y if out is None else out.copy_(y)
    if out is not None:
        ops.norm_out(x, weight, bias, recipe, out)
        changed(out)
        return out
    if is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        result = apply_norm(x, weight, bias, recipe, None)
    else:
        result = ops.norm_only(x, weight, bias, recipe)
    return result


def at_once(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> Tensor | None:
    """`norm` of a call that nobody checked: None where it is not native, or not plainly regular.

    Checks take longer in Python than a small normalization; the operator makes them.
    """
    try:
        recipe = _native(x, call)
        if recipe is None:
            return None
        if is_grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            return apply_norm(x, weight, bias, recipe, None)
        y: Tensor = ops.norm_only(x, weight, bias, recipe)
        return y
    except (AttributeError, RuntimeError):  # no tensors, or not what the operator takes
        return None


def fixed_at_once(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call
) -> Tensor | None:
    """`fixed` of a call that nobody checked, as `at_once`."""
    try:
        recipe = _native(x, call, "fixed")
        if recipe is None or mean.requires_grad or var.requires_grad or mean.dtype is not var.dtype:
            return None
        if mean.dim() != 1 or var.dim() != 1:
            return None
        if is_grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            return apply_fixed(x, mean, var, weight, bias, recipe)
        y: Tensor = ops.fixed(x, mean, var, weight, bias, recipe)
        return y
    except (AttributeError, RuntimeError):  # no tensors, or not what the operator takes
        return None


def norm_running(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    call: Call,
    momentum: float,
) -> Tensor:
    """Normalize by the statistics of the input, which the stored ones follow in place: all of it, or where either is
    None, none.
    """
    if mean is None or var is None:
        return norm(x, weight, bias, call)
    recipe = _native(x, call)
    if recipe is None or not follows(call):
        return _elsewhere_running(x, weight, bias, mean, var, call, momentum)
    running = call.spec.running
    state = mean, var, float(momentum), 1.0 if running is None else float(running.correction)
    if is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        y = apply_norm(x, weight, bias, recipe, state)
    else:
        y = followed(x, weight, bias, recipe, state)[0]
    changed(mean)
    changed(var)
    return y


def fixed(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    call: Call,
    out: Tensor | None = None,
) -> Tensor:
    """Normalize by stored statistics; into ``out`` where one is given, which has no gradient."""
    recipe = _native(x, call, "fixed")
    if recipe is None or mean.requires_grad or var.requires_grad:
        y = _elsewhere_fixed(x, mean, var, weight, bias, call)
    elif is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        y = apply_fixed(x, mean, var, weight, bias, recipe)
    else:
        y = ops.fixed(x, mean, var, weight, bias, recipe)
    return y if out is None else out.copy_(y)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    """The normalization of x + residual, and that sum."""
    recipe = _native(x, call)
    if recipe is None or type(residual) not in PLAIN:
        if _programmable(x, call):
            codes = _numbers(x.dtype, call, "norm")
            y, total, _ = torch.ops.normscope.add_normalize(x, residual, weight, bias, *codes)
            return y, total
        total = x + residual
        return norm(total, weight, bias, call), total
    if is_grad_enabled() and (
        x.requires_grad
        or residual.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        y, total = apply_add_norm(x, residual, weight, bias, recipe)
    else:
        y, total, _ = ops.add_norm(x, residual, weight, bias, recipe)
    return y, total


def norm_masked(
    x: Tensor, mask: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call
) -> tuple[Tensor, Tensor] | None:
    """Normalize by the elements where a mask is True, with the statistics of each set, in a last row their number.

    The mask has the axes of x, each of its size or 1, and is one for all elements that share a set and a parameter.
    None where no native kernel serves the call.
    """
    if call.options & ROUND_FIRST:
        return None
    y: Tensor
    if _programmable(x, call):
        codes = _numbers(x.dtype, call, "norm")
        y, stats = torch.ops.normscope.normalize_masked(x, mask, weight, bias, *codes)
        return y, stats
    if _native(x, call) is None:
        return None
    numbers = _numbers(x.dtype, call, "norm")
    try:
        return apply_norm_masked(x, mask, weight, bias, numbers)
    except RuntimeError:  # of a layout that the kernels of rows and columns do not know under a mask
        return None


def _native(x: Tensor, call: Call, kind: str = "norm") -> Tensor | None:
    """The packed recipe, where nothing stands against the native kernels."""
    if (
        is_compiling()  # first: what follows is nothing that a compiler could read
        or type(x) not in PLAIN
        or not x.is_cpu
        or transforming()
        or forward_ad._current_level >= 0
        or tracing()
    ):
        return None
    packed = call.derived.get(kind)
    if packed is None:
        packed = call.derived[kind] = _packed(call, kind)
    return packed.get(x.dtype)


def _packed(call: Call, kind: str) -> dict[torch.dtype, Tensor]:
    """The codes as one tensor, for each dtype; none where native kernels do not serve them.

    float64 holds every code: the largest has 52 bits. Real tensors, also where the first call meets fake ones.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    if call.unserved or library.LIBRARY is None:
        return {}
    with _disable_current_modes(), torch.inference_mode(False):
        return {
            dtype: torch.tensor(_numbers(dtype, call, kind), dtype=torch.float64, device="cpu")
            for dtype in DTYPES
            if _in_its_own(dtype, call)
        }


def _in_its_own(dtype: torch.dtype, call: Call) -> bool:
    """Whether the arithmetic is what the kernels do: not where float64 is to be computed in float32."""
    return dtype is not torch.float64 or call.spec.cast.compute != "float32"


def _numbers(dtype: torch.dtype, call: Call, kind: str) -> tuple[int, int, int, float, float, float]:
    axes = call.stored_axes if kind == "fixed" else call.axes
    return axes, call.split, call.options, _eps(dtype, call), call.gain, call.offset


def _eps(dtype: torch.dtype, call: Call) -> float:
    """None is the machine epsilon of the dtype of the arithmetic, which for half types is float32's."""
    if call.eps is not None:
        return float(call.eps)
    return torch.finfo(torch.float32 if dtype in HALF else dtype).eps


def changed(t: Tensor) -> None:
    """Tells autograd that an operator wrote to it, so that a backward pass that needs what it held will say so."""
    if not t.is_inference():
        increment_version(t)


# Everywhere else ----------------------------------------------------------------------------------------------------


def _elsewhere(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call) -> Tensor:
    if _programmable(x, call):
        y: Tensor = torch.ops.normscope.normalize(x, weight, bias, *_numbers(x.dtype, call, "norm"))[0]
        return y
    own, eps = _own(x, weight, call), _eps(x.dtype, call)
    if own == "layer":
        return F.layer_norm(x, x.shape[_first_erased(call) :], weight, bias, eps)
    if own == "rms":
        return F.rms_norm(x, x.shape[_first_erased(call) :], weight, eps)
    if own == "group":
        return F.group_norm(x, _numbers_of_groups(x, call), weight, bias, eps)
    if own == "batch":
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    if own == "instance":
        return F.instance_norm(x, None, None, weight, bias, True, 0.0, eps)
    return composite.normalize(x, call.spec, weight, bias)


def _elsewhere_running(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    call: Call,
    momentum: float,
) -> Tensor:
    running = call.spec.running
    correction = 1.0 if running is None else float(running.correction)
    if _programmable(x, call) and follows(call):
        y: Tensor
        y, stats = torch.ops.normscope.normalize(x, weight, bias, *_numbers(x.dtype, call, "norm"))
        count = x.numel() / stats.shape[1]
        torch.ops.normscope.update_running(mean, var, stats, momentum, count, correction)
        return y
    own, eps = _own(x, weight, call), _eps(x.dtype, call)
    if own == "batch" and correction == 1:
        return F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
    if own == "instance" and correction == 1:
        return F.instance_norm(x, mean, var, weight, bias, True, momentum, eps)
    spec, state = _stateful(call.spec), RunningState(mean, var)
    return composite.normalize(x, spec, weight, bias, running=state, momentum=momentum)


def _elsewhere_fixed(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call
) -> Tensor:
    if _programmable(x, call) and not mean.requires_grad and not var.requires_grad:
        y: Tensor = torch.ops.normscope.normalize_by(
            x, mean, var, weight, bias, *_numbers(x.dtype, call, "fixed")
        )
        return y
    own, eps = _own(x, weight, call), _eps(x.dtype, call)
    if own == "batch":
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
    if own == "instance":
        return F.instance_norm(x, mean, var, weight, bias, False, 0.0, eps)
    return composite.fixed(x, call.spec, mean, var, weight, bias)


def _programmable(x: Tensor, call: Call) -> bool:
    """Whether a program that is being compiled or exported takes the operators with gradients."""
    return (
        is_compiling()
        and x.device.type == "cpu"
        and x.dtype in DTYPES
        and _in_its_own(x.dtype, call)
        and not call.unserved
        and library.LIBRARY is not None
        and not transforming()
        and not torch.onnx.is_in_onnx_export()
    )


def _own(x: Tensor, weight: Tensor | None, call: Call) -> str:
    """The name of PyTorch's function where that is the one to call, else ""."""
    own = _own_function(call)
    if x.device.type != "cpu":
        # all but batch and instance norm want the weight in the input's dtype there
        mixed = weight is not None and weight.dtype != x.dtype
        return "" if mixed and own in ("layer", "rms", "group") else own
    if torch.onnx.is_in_onnx_export():
        return "" if own == "rms" else own  # PyTorch's exporter does not know its own
    if not is_compiling() and tracing():
        return own
    if x.dtype not in DTYPES:  # it says what is wrong with that
        return own
    return own if own == "rms" and x.dtype not in HALF else ""


@constant
def _own_function(call: Call) -> str:
    """Which of PyTorch's five functions computes this, or ""."""
    n = call.ndim + (call.split != 0)
    kinds = [axis_code(call.axes, i) for i in range(n)]
    where = {call.spec.weight, call.spec.bias} - {None}
    if call.unserved or call.gain != 1 or call.offset != 0 or "" in where:
        return ""
    live = PARAMETER if where else 0
    if call.options == SCALES["rms"] << SCALE_SHIFT:
        return "rms" if call.spec.bias is None and not call.split and _trails(kinds, live) else ""
    if call.options != CENTER:
        return ""
    if call.split:
        at_channels = call.split >> SPLIT_SHIFT == 2
        grouped = [KEPT, KEPT | live, live, *[0] * (n - 3)]
        return "group" if at_channels and kinds == grouped else ""
    if n > 1 and kinds == [0, KEPT | live, *[0] * (n - 2)]:
        return "batch"
    if n > 2 and kinds == [KEPT, KEPT | live, *[0] * (n - 2)]:
        return "instance"
    return "layer" if _trails(kinds, live) else ""


def _trails(kinds: list[int], live: int) -> bool:
    kept = kinds.count(KEPT)
    return kept < len(kinds) and kinds == [KEPT] * kept + [live] * (len(kinds) - kept)


@constant
def _first_erased(call: Call) -> int:
    return next(i for i in range(call.ndim) if not axis_code(call.axes, i) & KEPT)


def _numbers_of_groups(x: Tensor, call: Call) -> int:
    given = call.split & (INNER_GIVEN - 1)
    return x.shape[1] // given if call.split & INNER_GIVEN else given


@constant
def follows(call: Call) -> bool:
    """Whether sets that share a stored value follow one another in steps of the number of stored values, and are
    averaged: not so for virtual batches, which update one after the other.
    """
    known = call.derived.get("follows")
    if known is None:
        kept, stored = (
            [i for i in range(MOST_AXES) if axis_code(axes, i) & KEPT]
            for axes in (call.axes, call.stored_axes)
        )
        averaged = kept == stored or "v" not in call.spec.pattern.kept
        known = averaged and kept[len(kept) - len(stored) :] == stored and call.spec.center
        call.derived["follows"] = known
    return bool(known)


@constant
def _stateful(spec: NormSpec) -> NormSpec:
    return spec if spec.running is not None else spec.replace(running=Running())
