"""A specification, with parameters and state, on the way that dispatch knows."""

from __future__ import annotations

from torch import Tensor

from normscope.kernels import dispatch
from normscope.kernels.elementary import has_virtual_batches, state_axes
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
