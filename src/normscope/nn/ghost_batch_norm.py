"""Ghost batch norm: batch norm within virtual batches of consecutive samples.

    y = weight * (x - mean) / sqrt(var + eps) + bias

Training normalizes every virtual batch by its own mean and biased variance: a large batch trains with the noise of
small ones. Evaluation is batch norm's, by running statistics, which follow as ``updates`` says:

- ``"each"``: once per virtual batch, in order, run <- (1 - momentum) run + momentum virtual batch, as in the paper. A
  batch of k virtual ones leaves (1 - momentum)^k of what was stored; ``num_batches_tracked`` counts virtual batches.
- ``"once"``: once per batch, by the mean of the statistics of its virtual batches (each counts the same, a short one
  too), so that momentum means what it means in batch norm.

The variance is stored with M / (M - 1) over the M elements of a virtual batch. With one virtual batch it is batch norm.
Hoffer, Hubara and Soudry 2017, https://arxiv.org/abs/1705.08741, algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from normscope.errors import BadInput
from normscope.functional import batch_norm, normalize
from normscope.kernels.elementary import constant
from normscope.nn.arguments import sizes
from normscope.nn.batch_state import BatchState
from normscope.nn.remembered import fixed, remembered
from normscope.nn.tracked import momentum_of
from normscope.spec import NormSpec, RunningState, families
from normscope.spec.bound import split_samples

REMAINDERS = ("error", "short", "balanced")
UPDATES = ("each", "once")


class _GhostBatchNorm(BatchState):
    """What the three share; they differ in the number of axes they take."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        size: int | None = None,
        number: int | None = None,
        remainder: str = "error",
        updates: str = "each",
        bias: bool = True,
        float32_statistics: bool = True,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            bias=bias,
            float32_statistics=float32_statistics,
        )
        name = type(self).__name__
        if (size is None) == (number is None):
            raise BadInput(
                f"{name} takes the size of its virtual batches or their number, one of the two; got size={size!r}, "
                f"number={number!r}. Write size=32."
            )
        self.size = None if size is None else sizes(name, "size", size, "Write size=32.")[0]
        self.number = None if number is None else sizes(name, "number", number, "Write number=4.")[0]
        for what, given, known in (("remainder", remainder, REMAINDERS), ("updates", updates, UPDATES)):
            if given not in known:
                raise BadInput(
                    f"{name} takes {what} of {', '.join(map(repr, known))}; got {given!r}. Leave it at {known[0]!r}."
                )
        self.remainder, self.updates = remainder, updates

    def _by_batch(self, input: Tensor, mask: Tensor | None) -> Tensor:
        parts = self._parts(input)
        state = None
        if self.training and self.track_running_stats and self.running_mean is not None:
            state = RunningState(self.running_mean, self.running_var, self._counted())
        before = 0 if state is None else state.batches
        if mask is None and (self.updates == "each" or len(parts) < 2):
            y = self._in_turn(input, parts, state)
        else:
            y = normalize(input, self.spec, self.weight, self.bias, running=state, mask=mask)
        if state is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(state.batches - before)
        return y

    def _packed(self, input: PackedSequence) -> Any:
        raise BadInput(
            f"{type(self).__name__} takes virtual batches of samples, and a packed sequence holds them step by step; "
            f"got {len(input.data)} elements. Unpack it (pad_packed_sequence), and pass lengths=."
        )

    def _in_turn(self, input: Tensor, parts: tuple[int, ...], state: RunningState | None) -> Tensor:
        """Every virtual batch through batch norm, one after the other."""
        outputs = []
        for part in torch.split(input, list(parts) or [0]):
            mean = var = None
            momentum = 0.0
            if state is not None and parts:
                state.batches += 1
                mean, var = state.mean, state.var
                momentum = 1.0 / state.batches if self.momentum is None else self.momentum
            outputs.append(batch_norm(part, mean, var, self.weight, self.bias, True, momentum, self.eps))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _counted(self) -> int:
        """Updates so far, where the average needs their number."""
        return (
            int(self.num_batches_tracked)
            if self.momentum is None and self.num_batches_tracked is not None
            else 0
        )

    def _parts(self, x: Tensor) -> tuple[int, ...]:
        """Sizes of the virtual batches. Raises BadInput where the batch does not fall into them, or one has one value
        a channel.
        """
        name, samples = type(self).__name__, x.shape[0]
        step = self.size or self.number or 1
        if self.remainder == "error" and samples % step:
            wanted = f"size {self.size}" if self.size else f"number {self.number}"
            raise BadInput(
                f"{name} with virtual batches of {wanted} needs a batch that falls into them evenly; got an input of "
                f"shape {tuple(x.shape)}. Use remainder='balanced' or 'short', or drop_last=True in the loader."
            )
        parts = _split(*fixed(samples, self.size, self.number, self.remainder))
        if parts and min(parts) * (x.numel() // (samples * x.shape[1])) == 1:
            raise BadInput(
                f"{name} takes the variance of more than one value a channel in every virtual batch; got virtual "
                f"batches of {', '.join(map(str, dict.fromkeys(parts)))} of an input of shape {tuple(x.shape)}. Use "
                "larger ones, or remainder='balanced'."
            )
        return parts

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(
            float(self.eps),
            momentum_of(self),
            self.weight is not None,
            self.bias is not None,
            self.running_mean is not None,
            self._ndim,
            self.size,
            self.number,
            self.remainder,
            self.updates,
        )

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        count = {"size": self.size} if self.size else {"number": self.number}
        tracks = {"track_running_stats": self.track_running_stats}
        return self._said(**tracks, **count, remainder=self.remainder, updates=self.updates)


@constant
def _split(samples: int, size: int | None, number: int | None, remainder: str) -> tuple[int, ...]:
    chosen = {"b": size} if size else {"v": number or 1}
    return split_samples(samples, chosen, "v", "b", remainder)


@remembered
def _spec(
    eps: float,
    momentum: float | None,
    weight: bool,
    bias: bool,
    running: bool,
    ndim: tuple[int, int],
    size: int | None,
    number: int | None,
    remainder: str,
    updates: str,
) -> NormSpec:
    return families.ghost_batch_norm(
        size=size,
        number=number,
        remainder=remainder,
        eps=eps,
        momentum=momentum,
        weight=weight,
        bias=bias,
        running=running,
        updates=updates,
        ndim=ndim,
    )


class GhostBatchNorm1d(_GhostBatchNorm):
    """Ghost batch norm of inputs (N, C) or (N, C, L).

    Arguments: num_features; eps=1e-5; momentum=0.1 (None: the plain average of all updates); affine=True;
    track_running_stats=True; device, dtype; and by name
        size or number: samples of a virtual batch, or virtual batches of a batch. One of the two.
        remainder: what a batch does that is no multiple. ``"error"``; ``"short"``: 33 by 32 is 32 + 1; ``"balanced"``:
            17 + 16, as many as with ``"short"``. A batch below ``size`` is one virtual batch with the latter two.
        updates: ``"each"`` or ``"once"``, see the head of this file.
        bias=True; float32_statistics=True: running statistics stay float32 in a half module.
    Called with ``mask=`` or ``lengths=``: statistics are over the elements that count, the output is 0 elsewhere; a
    virtual batch without any moves nothing.
    Shapes: parameters and statistics (C,). Input and output float16, bfloat16, float32 or float64. The state dict is
    that of ``torch.nn.BatchNorm1d``, both ways. It is no ``torch.nn.BatchNorm1d`` by class, but of its base class.

    Raises BadInput (a ValueError) where the input has another number of axes or channels, where a batch does not fall
    into virtual batches or one has one value a channel, and where an argument is none of the above.

    >>> import torch
    >>> norm = GhostBatchNorm1d(1, size=2, momentum=0.5)
    >>> x = torch.tensor([[1.0], [3.0], [10.0], [30.0]])
    >>> norm(x).round(decimals=2).squeeze().tolist(), norm.running_mean.item(), norm.num_batches_tracked.item()
    ([-1.0, 1.0, -1.0, 1.0], 10.5, 2)
    """

    _ndim = (2, 3)


class GhostBatchNorm2d(_GhostBatchNorm):
    """Ghost batch norm of inputs (N, C, H, W), contiguous or channels-last.

    Arguments, shapes and errors as `GhostBatchNorm1d`.

    >>> import torch
    >>> norm = GhostBatchNorm2d(3, size=32, remainder="balanced")
    >>> norm.spec.stats, norm.spec.bind((33, 3, 4, 4)).segments
    ('(v b) c ... -> v c', (17, 16))
    """

    _ndim = (4, 4)


class GhostBatchNorm3d(_GhostBatchNorm):
    """Ghost batch norm of inputs (N, C, D, H, W).

    Arguments, shapes and errors as `GhostBatchNorm1d`.

    >>> import torch
    >>> GhostBatchNorm3d(3, number=2)(torch.randn(6, 3, 4, 4, 4)).shape
    torch.Size([6, 3, 4, 4, 4])
    """

    _ndim = (5, 5)
