"""Normalizations under a mask that do not need the composite path.

- By stored statistics, every element on its own: what does not count goes in as 0, and comes out as 0.
- Statistic sets that count as a whole or not at all (a layer norm under a mask of positions): the same.
- A mask that is one for all channels, of batch, group and instance norm: the native kernels take it, and sum over what
  counts as if there were no more, so that how far a batch was padded changes no bit.
- The same of batch norm, where there is no native kernel: the elements that count are copied together, normalized, and
  put back.

Any other mask is for the composite path.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normscope.functional.served import codes, fraction_of, movable, served
from normscope.functional.shared_mask import shared_mask
from normscope.functional.stretches import apart, stretches, together
from normscope.kernels import dispatch
from normscope.kernels.elementary import axes_of, spreads
from normscope.kernels.follow_counted import follow_counted
from normscope.spec import NormSpec, RunningState


def masked(
    input: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    state: RunningState | None,
    training: bool,
    mask: Tensor,
) -> Tensor | None:
    """None leaves the call, and its errors, to the composite path."""
    mask = mask[(None,) * (input.dim() - mask.dim())]
    if mask.dtype != torch.bool or not spreads(mask.shape, input.shape) or spec.remainder != "error":
        return None
    if (spec.running is not None and not training) or _leaves_sets_whole(spec, input, mask):
        y = served(input.masked_fill(~mask, 0.0), spec, weight, bias, state, training)
        return None if y is None else y.masked_fill(~mask, 0.0)
    y = _natively(input, spec, weight, bias, state, mask)
    return _together(input, spec, weight, bias, state, mask) if y is None else y


def _natively(
    input: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    state: RunningState | None,
    mask: Tensor,
) -> Tensor | None:
    call = codes(input, spec, weight, bias, state)
    if call is None or (state is not None and not (movable(spec) and dispatch.follows(call))):
        return None
    counts = shared_mask(mask, input, call)
    found = None if counts is None else dispatch.norm_masked(input, counts, weight, bias, call)
    if found is None:
        return None
    y, stats = found
    if state is not None and spec.running is not None:
        whose = repr(spec.stats)
        if not torch.compiler.is_compiling():
            whose += f" in an input of shape {tuple(input.shape)}"
        fraction, correction = fraction_of(spec, state), float(spec.running.correction)
        state.batches += follow_counted(state.mean, state.var, stats.detach(), fraction, correction, whose)
    return y


def _leaves_sets_whole(spec: NormSpec, input: Tensor, mask: Tensor) -> bool:
    """Of a spec without state, which sets that do not count would move; with eps, without which zeros divide by 0."""
    if spec.running is not None or spec.eps == 0:
        return False
    return all(axis.kept or mask.shape[axis.dim] == 1 for axis in axes_of(spec, tuple(input.shape)))


def _together(
    input: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    state: RunningState | None,
    mask: Tensor,
) -> Tensor | None:
    # how many elements count is known only where a call computes at once
    if torch.compiler.is_compiling() or dispatch.transforming() or dispatch.tracing():
        return None
    joined = _one_set_a_channel(spec)
    if joined is None:
        return None
    (channels,) = [axis.dim for axis in axes_of(spec, tuple(input.shape)) if axis.kept]
    places = [dim for dim, size in enumerate(mask.shape) if size != 1]
    if not places or channels in places:
        return None
    rest = [channels, *(dim for dim in range(input.dim()) if dim not in (*places, channels))]
    if len(places) == 2 and forward_ad._current_level < 0:
        found = stretches(mask.squeeze(tuple(rest)))
        if found is not None:
            order = [places[0], *rest, places[1]]
            moved = input.permute(order)
            y = served(together(moved, found), joined, weight, bias, state, True)
            return None if y is None else _back(apart(y, found, moved.shape, moved.detach()), order)
    order = [*places, *rest]
    moved = input.permute(order)
    rows = moved.flatten(0, len(places) - 1)
    index = mask.permute(order).flatten().nonzero().squeeze(1)
    y = served(rows.index_select(0, index), joined, weight, bias, state, True) if index.numel() else None
    if y is None:
        return None
    whole = _back(y.new_zeros(rows.shape).index_copy(0, index, y).view(moved.shape), order)
    return whole.contiguous() if input.is_contiguous() else whole


def _back(moved: Tensor, order: list[int]) -> Tensor:
    """Axes in ``order`` where they were."""
    return moved.permute([order.index(dim) for dim in range(moved.dim())])


@lru_cache(maxsize=1024)
def _one_set_a_channel(spec: NormSpec) -> NormSpec | None:
    """The same of elements (M, C, ...), where the channels alone are kept and all that is stored lives on them."""
    on_channels = {spec.weight, spec.bias} <= {None, "", "c"} and spec.running_axes == "c"
    if spec.pattern.kept != ("c",) or ("c",) not in spec.pattern.left or not on_channels or spec.whiten:
        return None
    return spec.replace(stats="b c ... -> c", ndim=None, sizes={}, sample_axis=None)
