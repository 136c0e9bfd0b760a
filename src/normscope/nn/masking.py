"""Elements that do not count: what layers take as ``mask=``, ``lengths=`` and packed sequences.

A mask is True where an element counts. Statistics, running ones too, are exact over these elements; whatever stands at
the others, NaN included, reaches neither outputs nor gradients, and its own gradient is 0. The output there is 0, or
the bias where ``fill="bias"``. A set without an element leaves its running statistics, and a batch without one the
counter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from normscope.errors import BadInput
from normscope.functional import normalize
from normscope.kernels import dispatch
from normscope.kernels.elementary import axes_of, place, spreads
from normscope.nn.torch_tools import leaf
from normscope.spec import NormSpec, RunningState

FILLS = ("zero", "bias")
Lengths = Tensor | Sequence[int]


def valid(
    layer: str,
    input: Tensor,
    mask: Tensor | None,
    lengths: Lengths | None,
    *,
    samples: int = 0,
    time: int = -1,
    axes: int = 3,
) -> Tensor:
    """The elements that count, as one boolean mask that broadcasts to ``input``.

    Arguments:
        layer: its name, for errors.
        mask: boolean, with as many axes as ``input``, each of its size or 1.
        lengths: whole numbers (B,), one for each sample: positions from there on along the axis ``time`` do not count.
        samples, time: the axes of ``input`` that ``lengths`` is about.
        axes: how many an input has at least that has positions beside samples and features.

    With both, an element counts where both say so. Raises BadInput where either does not fit.

    >>> valid("LayerNorm", torch.zeros(2, 3, 4), None, [1, 3], time=1).squeeze(2)
    tensor([[ True, False, False],
            [ True,  True,  True]])
    """
    if lengths is not None and input.dim() < axes:
        raise BadInput(
            f"{layer} takes lengths of an input with an axis of positions, {axes} axes or more; got one of shape "
            f"{tuple(input.shape)}, whose axes are samples and features. Leave lengths out, or pass mask=."
        )
    found = None if lengths is None else _within(layer, input, lengths, samples, time)
    if mask is None:
        if found is None:
            raise BadInput(f"{layer} takes a mask or lengths here; got neither. Pass one of them.")
        return found
    _fits(layer, input, mask)
    return mask if found is None else mask & found


def normalize_valid(
    input: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor,
    fill: str = "zero",
    *,
    running: RunningState | None = None,
    training: bool = True,
) -> Tensor:
    """`normscope.normalize` under a mask, with 0 or (``fill="bias"``) the bias where it is False.

    Raises BadInput where ``fill`` is neither.

    >>> from normscope.spec import families
    >>> x, mask = torch.tensor([[1.0, 3.0], [9.0, 9.0]]), torch.tensor([[True], [False]])
    >>> normalize_valid(x, families.layer_norm(eps=0.0), None, torch.ones(2), mask, "bias")
    tensor([[0., 2.],
            [1., 1.]])
    """
    y = normalize(input, spec, weight, bias, running=running, training=training, mask=mask)
    return filled(y, spec, bias, mask, fill)


def normalize_masked(
    layer: Any,
    input: Tensor,
    mask: Tensor | None,
    lengths: Lengths | None,
    fill: str,
    *,
    time: int = -1,
    axes: int = 3,
) -> Tensor:
    """What a layer without state computes, by its ``spec``, ``weight`` and ``bias``, of the elements that count."""
    counts = valid(type(layer).__name__, input, mask, lengths, time=time, axes=axes)
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    return normalize_valid(input, layer.spec, weight, bias, counts, fill)


def masked_leaf(
    layer: torch.nn.Module, input: Any, mask: Tensor | None, lengths: Lengths | None, fill: str
) -> Tensor:
    """The call of ``layer`` as one node of the graph that torch.fx traces, with what is not the default."""
    given = {
        "mask": mask,
        "lengths": lengths,
        "fill": None if isinstance(fill, str) and fill == "zero" else fill,
    }
    return leaf(layer, input, **{name: value for name, value in given.items() if value is not None})


def filled(y: Tensor, spec: NormSpec, bias: Tensor | None, mask: Tensor, fill: str) -> Tensor:
    """``y``, which is 0 where the mask is False, with the bias there if ``fill`` asks for it."""
    known_fill(fill)
    if fill == "zero" or bias is None or spec.bias is None:
        return y
    axes = axes_of(spec, tuple(y.shape))
    everywhere = place(bias, spec.bias, axes).expand([axis.size for axis in axes]).reshape(y.shape)
    return torch.where(mask, y, everywhere.to(y.dtype))


def known_fill(fill: str) -> None:
    """Raise BadInput where ``fill`` is none: before anything is computed or moves, and where there is no mask too."""
    if fill not in FILLS:
        raise BadInput(f"fill says what stands where the mask is False, 'zero' or 'bias'; got {fill!r}.")


def is_packed(
    layer: Any,
    input: Any,
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
    fill: str = "zero",
) -> bool:
    """Whether a layer was called with a packed sequence: it then returns one, packed alike.

    Raises BadInput where something came with it that holds for padded inputs alone, and where ``fill`` is unknown.
    """
    known_fill(fill)
    if not isinstance(input, PackedSequence):
        return False
    beside = " and ".join(name for name, value in (("mask", mask), ("lengths", lengths)) if value is not None)
    if beside:
        raise BadInput(
            f"{type(layer).__name__} takes a packed sequence alone, which says its lengths; got {beside} beside it. "
            "Leave that out, or unpack the sequence (pad_packed_sequence)."
        )
    return True


def not_packed(layer: Any, input: Any, fill: str = "zero") -> None:
    """Raise BadInput where a layer that takes none is called with a packed sequence, or ``fill`` is unknown."""
    known_fill(fill)
    if isinstance(input, PackedSequence):
        raise BadInput(
            f"{type(layer).__name__} takes a tensor; got a packed sequence. Unpack it (pad_packed_sequence), and pass "
            "lengths=, where the layer has positions or time steps."
        )


def by_element(packed: Any, norm: Callable[[Tensor], Tensor]) -> Tensor:
    """A packed sequence through a norm of its elements (M, features), among which there is no padding."""
    return _with_data(packed, norm(packed.data))


def by_sequence(packed: Any, norm: Callable[..., Tensor]) -> Tensor:
    """A packed sequence of features through a norm of (B, features, L), with ``lengths=``."""
    padded, lengths = pad_packed_sequence(
        PackedSequence(packed.data, packed.batch_sizes), batch_first=True
    )  # in the order of the data, longest first
    y = norm(padded.movedim(1, -1), lengths=lengths).movedim(-1, 1)
    sizes = packed.batch_sizes.tolist()
    return _with_data(packed, torch.cat([y[:size, step] for step, size in enumerate(sizes)]))


def _with_data(packed: PackedSequence, data: Tensor) -> Tensor:
    """A packed sequence, called a tensor as in the signature of every forward."""
    like = PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    return cast(Tensor, like)


def _fits(layer: str, input: Tensor, mask: Any) -> None:
    """Fewer axes would broadcast too, and (N, L) to (N, C, L) silently along the channels where N is C."""
    fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and spreads(mask.shape, input.shape)
    if fits and mask.device != input.device:
        raise BadInput(
            f"{layer} takes a mask on the device of its input, {input.device}; got one on {mask.device}. Use "
            "mask.to(x.device)."
        )
    if not fits:
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise BadInput(
            f"{layer} takes a boolean mask, True where an element counts, with the axes of the input "
            f"{tuple(input.shape)}, each of its size or 1; got {got}. Add axes of size 1, as in mask[:, None]."
        )


def _within(layer: str, input: Tensor, lengths: Lengths, samples: int, time: int) -> Tensor:
    try:
        numbers = torch.as_tensor(lengths, device=input.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"{layer} takes lengths as whole numbers, one for each of the {input.shape[samples]} samples; got "
            f"{lengths!r}. Pass a list or a tensor of integers."
        ) from error
    batch, positions = (
        input.shape[dim] if -input.dim() <= dim < input.dim() else -1 for dim in (samples, time)
    )
    whole = not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)
    if not whole or tuple(numbers.shape) != (batch,) or samples % input.dim() == time % input.dim():
        raise BadInput(
            f"{layer} takes lengths as whole numbers, one for each of the samples on axis {samples} of an input "
            f"{tuple(input.shape)}; got {numbers.dtype} of shape {tuple(numbers.shape)}. Positions run along axis "
            f"{time}; where they do not, pass mask=."
        )
    # a program, or a function that is being transformed, has no numbers yet
    open_numbers = is_compiling() or dispatch.transforming() or dispatch.tracing() or numbers.is_meta
    if batch and not open_numbers:
        low, high = (int(end) for end in numbers.aminmax())
        if low < 0 or high > positions:
            raise BadInput(
                f"{layer} takes lengths from 0 to the {positions} positions that an input {tuple(input.shape)} has "
                f"along axis {time}; got {low if low < 0 else high}. Count the positions of that axis."
            )
    inside = torch.arange(positions, device=input.device) < numbers[:, None]
    shape = [1] * input.dim()
    shape[samples], shape[time] = batch, positions
    first = samples % input.dim() < time % input.dim()
    return (inside if first else inside.T).reshape(shape)
