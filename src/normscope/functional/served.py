"""A specification, with parameters and state, on the way that dispatch knows."""

from __future__ import annotations

from torch import Tensor

from normscope.kernels import dispatch
from normscope.kernels.elementary import has_virtual_batches, state_axes
from normscope.kernels.layout import Call
from normscope.kernels.regular import codes_of
from normscope.spec import NormSpec, RunningState


def served(
    input: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    state: RunningState | None,
    training: bool,
) -> Tensor | None:
    """By dispatch, where that knows the way: None leaves the call, and its errors, to the composite path.

    ``state`` is None for a spec without running statistics.
    """
    call = codes(input, spec, weight, bias, state)
    if call is None:
        return None
    if spec.running is None or (training and state is None):
        return dispatch.norm(input, weight, bias, call)
    if state is None:
        return None
    if not training:
        return dispatch.fixed(input, state.mean, state.var, weight, bias, call)
    if not movable(spec):
        return None
    fraction = fraction_of(spec, state)
    y = dispatch.norm_running(input, weight, bias, state.mean, state.var, call, fraction)
    state.batches += 1
    return y


def codes(
    input: Tensor, spec: NormSpec, weight: Tensor | None, bias: Tensor | None, state: RunningState | None
) -> Call | None:
    """Of a call whose tensors are all on the axes where they should be."""
    parameters = [(weight, spec.weight), (bias, spec.bias)]
    if state is not None:
        parameters += [(state.mean, state_axes(spec)), (state.var, state_axes(spec))]
    return codes_of(input, spec, *parameters)


def movable(spec: NormSpec) -> bool:
    """Whether what is stored is moved by mean and variance of one batch."""
    return spec.scale == "std" and not has_virtual_batches(spec)


def fraction_of(spec: NormSpec, state: RunningState) -> float:
    """Of the next update."""
    momentum = spec.running.momentum if spec.running is not None else None
    return 1 / (state.batches + 1) if momentum is None else momentum
