"""Any normalization, by its specification."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import has_torch_function_variadic

from normscope.distributed import world_of
from normscope.errors import BadInput
from normscope.functional.masked import masked
from normscope.functional.served import served
from normscope.functional.synchronized import synchronized
from normscope.kernels import composite
from normscope.kernels.regular import ask, only_tensors
from normscope.spec import NormSpec, RunningState


def normalize(
    input: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    running: RunningState | None = None,
    training: bool = True,
    mask: Tensor | None = None,
    group: Any = None,
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
        group: a process group (``torch.distributed.group.WORLD`` is all ranks) over whose ranks statistics are taken,
            by a norm that normalizes by the batch; every rank makes the call, with samples of its own, or with none.
            First derivatives only.

    Returns a tensor of the shape and dtype of ``input``. Half types are computed in float32.
    Raises BadInput where arguments do not fit each other, PatternError where the shape does not fit the spec,
    ModelError where another rank of ``group`` has gone.

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
            group=group,
        )
    only_tensors("normalize", input, weight=weight, bias=bias, mask=mask)
    if input.is_nested:
        raise BadInput(
            "normalize takes dense tensors, got a nested one. Pad it, and pass mask=, True where it is valid"
        )
    state = running if spec.running else None
    if group is not None and (training or spec.running is None) and world_of(group) > 1:
        return synchronized(input, spec, weight, bias, state, mask, group)
    if mask is None:
        y = served(input, spec, weight, bias, state, training)
    else:
        y = masked(input, spec, weight, bias, state, training, mask)
    if y is not None:
        return y
    return composite.normalize(input, spec, weight, bias, running=running, training=training, mask=mask)
