"""Masks as the native kernels take them: one for all elements that share a parameter, and for all sets of a sample."""

from __future__ import annotations

from math import prod

from torch import Tensor

from normscope.kernels.elementary import constant
from normscope.kernels.layout import KEPT, SPLIT_SHIFT, Call, axis_code


def shared_mask(mask: Tensor, input: Tensor, call: Call) -> Tensor | None:
    """``mask``, whose axes are those of ``input`` or of size 1, whole along the axes that statistics sum over.

    None where no native kernel takes it.

    >>> import torch
    >>> from normscope.kernels.layout import call
    >>> from normscope.spec import families
    >>> batch, x, mask = call(families.batch_norm(), 3), torch.zeros(2, 3, 4), torch.ones(2, 1, 1, dtype=torch.bool)
    >>> shared_mask(mask, x, batch).shape, shared_mask(mask.expand(x.shape), x, batch)
    (torch.Size([2, 1, 4]), None)
    """
    shared = _shared(call)
    if any(mask.shape[dim] != 1 for dim in shared if dim != 0 or dim in call.parameter_dims):
        return None
    # of one value a channel, groups have no axis within them that is one for all parameters
    if shared != (1,) and prod(input.shape[2:]) == 1:
        return None
    sizes = [mask.shape[dim] if dim in shared else size for dim, size in enumerate(input.shape)]
    return mask.expand(sizes).contiguous()


@constant
def _shared(call: Call) -> tuple[int, ...]:
    """Dimensions of the input that kept axes or parameters are on."""
    known: tuple[int, ...] | None = call.derived.get("shared")
    if known is None:
        split = (call.split >> SPLIT_SHIFT) - 1
        dims = [dim for dim in range(call.ndim) for _ in range(1 + (dim == split))]
        kept = (dim for i, dim in enumerate(dims) if axis_code(call.axes, i) & KEPT)
        known = call.derived["shared"] = tuple({*kept, *call.parameter_dims})
    return known
