"""Batch whitening: channels, in groups, decorrelated over samples and positions, each with variance 1 then.

    y = weight * W (x - mean) + bias,    W S W^T = 1,    S = covariance + eps I, one k by k matrix a group of k channels

Training whitens by the batch: the covariance is the biased one, over the M elements of a channel. W is S^(-1/2), the
rotation-free one (``"zca"``: Huang, Yang, Lang and Deng 2018, Decorrelated Batch Normalization,
https://arxiv.org/abs/1804.08450), or L^-1 with S = L L^T (``"cholesky"``: Siarohin, Sangineto and Sebe 2019,
https://arxiv.org/abs/1806.00420). Evaluation whitens by what is stored, run <- (1 - momentum) run + momentum batch: the
mean, and the covariance over M (``state="covariance"``) or the matrix W itself (``"whitening"``).
In groups of one channel it is batch norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from normscope.distributed import world_of
from normscope.errors import BadInput
from normscope.functional.whitened_ranks import whitened_over_ranks
from normscope.nn.agreement import agreed
from normscope.nn.arguments import sizes
from normscope.nn.float32_statistics import Float32Statistics
from normscope.nn.masking import Lengths, by_element, filled, is_packed, masked_leaf, valid
from normscope.nn.optional_bias import OptionalBias
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, Unscriptable
from normscope.nn.tracked import by_batch_or_stored, momentum_of
from normscope.nn.whitened_sets import choice, divided, eps_or_zero, large_enough
from normscope.spec import NormSpec, RunningState, families

STATES = ("covariance", "whitening")


class BatchWhiteningState(Unscriptable, Float32Statistics, OptionalBias):
    """Base of `BatchWhitening` and `IterNorm`: parameters, state, and which statistics whiten."""

    method: str
    iterations = 5
    weight: Tensor | None
    bias: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        num_features: int,
        group_size: int,
        eps: float,
        momentum: float | None,
        affine: bool,
        track_running_stats: bool,
        device: Any,
        dtype: Any,
        *,
        eps_at: str,
        state: str,
        bias: bool,
        float32_statistics: bool,
        group: Any,
    ) -> None:
        super().__init__()
        # by name: torch copies and saves no process group
        self._all_ranks = dist.is_available() and group is not None and group is dist.group.WORLD
        self._group = None if self._all_ranks else group
        name = type(self).__name__
        (self.num_features,) = sizes(name, "num_features", num_features, "Give the size of axis 1.")
        (self.group_size,) = sizes(
            name, "group_size", group_size, "Give the channels that are whitened together."
        )
        groups = divided(name, self.num_features, "group_size", self.group_size)
        self.eps, self.eps_at = eps_or_zero(name, eps), choice(name, "eps_at", eps_at, ("variance", "trace"))
        self.state = choice(name, "state", state, STATES)
        self.momentum, self.track_running_stats = momentum, track_running_stats
        self.statistics = ("running_mean", f"running_{self.state}")
        self.float32_statistics = float32_statistics
        self._set_affine(self.num_features, affine, bias, device, dtype)
        shapes = ((self.num_features,), (groups, self.group_size, self.group_size))
        for buffer, shape in zip(self.statistics, shapes, strict=True):
            self.register_buffer(
                buffer, torch.empty(shape, device=device, dtype=dtype) if track_running_stats else None
            )
        counter = torch.zeros((), dtype=torch.long, device=device) if track_running_stats else None
        self.register_buffer("num_batches_tracked", counter)
        self._keep_statistics()
        self.reset_parameters()

    @property
    def group(self) -> Any:
        """The process group over whose ranks training whitens, or None."""
        return dist.group.WORLD if self._all_ranks else self._group

    def reset_running_stats(self) -> None:
        """Mean 0, every matrix the identity, no batch counted; nothing where nothing is stored."""
        mean, matrix = (getattr(self, name) for name in self.statistics)
        if mean is not None and matrix is not None and self.num_batches_tracked is not None:
            mean.zero_()
            matrix.copy_(torch.eye(self.group_size, device=matrix.device))
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Weight 1 and bias 0, where they are; what is stored as new."""
        self.reset_running_stats()
        super().reset_parameters()

    def forward(
        self, input: Tensor, mask: Tensor | None = None, lengths: Lengths | None = None, fill: str = "zero"
    ) -> Tensor:
        """By the batch in training and where nothing is stored, by what is stored else. Masks: see
        `normscope.nn.masking`; lengths run along the last axis.
        """
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        if is_packed(self, input, mask, lengths, fill):
            return by_element(input, self.forward)
        name = type(self).__name__
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise BadInput(
                f"{name} was made for an input (N, {self.num_features}, ...); got an input of shape "
                f"{tuple(input.shape)}. For one sample use x.unsqueeze(0)."
            )
        counts = None
        if mask is not None or lengths is not None:
            counts = valid(name, input, mask, lengths)
        if self.training and self.group is not None and world_of(self.group) > 1:
            return self._over_ranks(input, counts, fill)
        if self.training or getattr(self, self.statistics[0]) is None:
            if input.numel() == self.num_features:
                raise BadInput(
                    f"{name} in training takes the covariance of more than one value a channel; got an input of shape "
                    f"{tuple(input.shape)}. Use a larger batch (drop_last=True in the loader), or eval()."
                )
            large_enough(name, self.spec, input, counts, "a larger batch, smaller groups")
        return by_batch_or_stored(self, input, self.spec, self.weight, self.bias, counts, fill)

    def _over_ranks(self, input: Tensor, mask: Tensor | None, fill: str) -> Tensor:
        mean, matrix = (getattr(self, name) for name in self.statistics)
        state, counter = None, self.num_batches_tracked
        if self.track_running_stats and mean is not None and counter is not None:
            state = RunningState(mean, matrix, int(counter))
        agreed(self, self.group, input, self.num_features, self.group_size)
        y = whitened_over_ranks(input, self.spec, self.weight, self.bias, state, mask, self.group)
        if state is not None and counter is not None:
            counter.fill_(state.batches)  # as it was where a mask left nothing to follow on any rank
        return y if mask is None else filled(y, self.spec, self.bias, mask, fill)

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(
            int(self.group_size),
            self.method,
            int(self.iterations),
            float(self.eps),
            self.eps_at,
            momentum_of(self),
            self.state,
            self.weight is not None,
            self.bias is not None,
            getattr(self, self.statistics[0]) is not None,
        )

    def _said(self, **more: Any) -> str:
        said = {
            "eps": self.eps,
            "momentum": self.momentum,
            **more,
            "eps_at": self.eps_at,
            "state": self.state,
        }
        said |= {"affine": self.affine, "track_running_stats": self.track_running_stats}
        if not self.float32_statistics:
            said["float32_statistics"] = False
        return ", ".join(
            [
                f"{self.num_features}, {self.group_size}",
                *(f"{name}={value!r}" for name, value in said.items()),
            ]
        )


@remembered
def _spec(
    group_size: int,
    method: str,
    iterations: int,
    eps: float,
    eps_at: str,
    momentum: float | None,
    state: str,
    weight: bool,
    bias: bool,
    running: bool,
) -> NormSpec:
    return families.batch_whitening(
        group_size,
        method=method,
        iterations=iterations,
        eps=eps,
        eps_at=eps_at,
        momentum=momentum,
        state=state,
        weight=weight,
        bias=bias,
        running=running,
    )


class BatchWhitening(BatchWhiteningState):
    """Batch whitening of inputs (N, C, ...), contiguous or not, by the inverse root or the Cholesky factor.

    Arguments: num_features, the number of channels C; group_size, the channels k that are whitened together;
    eps=1e-5, 0 or more; momentum=0.1 (None: the plain average of all batches); affine=True; track_running_stats=True;
    device, dtype; and by name
        method: ``"zca"`` or ``"cholesky"``.
        eps_at: ``"variance"``, eps on the diagonal as in the papers, or ``"trace"``, eps times the mean variance of the
            group, which follows the scale of the input.
        state: ``"covariance"`` or ``"whitening"``, the matrix that is stored. Of a covariance W is made anew at every
            evaluation; a W is there already, but an average of W whitens less well than the W of an average.
        bias=True; float32_statistics=True: what is stored stays float32 in a half module.
        group=None: a process group (``torch.distributed.group.WORLD``: all ranks) over whose ranks training whitens, by
            what they hold together; a rank without data passes an input of no samples.
    Called with ``mask=``, ``lengths=`` or a packed sequence: statistics are over the elements that count, the output is
    0 elsewhere. A mask is one for all channels of a group.
    Shapes: parameters and running_mean (C,); running_covariance (or running_whitening) (C / k, k, k). Input and output
    float16, bfloat16, float32 or float64; covariance and W are computed in float64.

    Raises BadInput (a ValueError) where group_size does not divide num_features, the input has another number of
    channels, training sees one value a channel, or eps is 0 and a set has no more elements than a group has channels:
    its covariance has no inverse.

    >>> import torch
    >>> x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).cumsum(1)  # channels that go together
    >>> y = BatchWhitening(4, 2, eps=0.0, affine=False)(x)
    >>> (y.T @ y / 50)[:2, :2].round(decimals=3).abs()
    tensor([[1., 0.],
            [0., 1.]])
    """

    def __init__(
        self,
        num_features: int,
        group_size: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        method: str = "zca",
        eps_at: str = "variance",
        state: str = "covariance",
        bias: bool = True,
        float32_statistics: bool = True,
        group: Any = None,
    ) -> None:
        self.method = choice("BatchWhitening", "method", method, ("zca", "cholesky"))
        super().__init__(
            num_features,
            group_size,
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            eps_at=eps_at,
            state=state,
            bias=bias,
            float32_statistics=float32_statistics,
            group=group,
        )

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return self._said(method=self.method)
