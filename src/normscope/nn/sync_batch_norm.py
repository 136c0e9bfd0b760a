"""Synchronized batch norm: batch norm by the statistics of all ranks of a process group together.

    y = weight * (x - mean) / sqrt(var + eps) + bias

mean and var (biased) are over the elements of a channel on all ranks, which may hold different numbers of samples, or
none; running statistics follow, run <- (1 - momentum) run + momentum batch, the variance with M / (M - 1), M of all
ranks, so that they are the same bits on every rank. Outputs, input gradients and running statistics are those of one
process on the whole batch; gradients of weight and bias are of a rank's own samples, to be added up over ranks
(DistributedDataParallel takes the mean).

One collective forward and one backward, on any device and backend: counts, means and sums of squared deviations are
merged in float64 (Chan, Golub and LeVeque 1979), the sums of the backward pass added. Evaluation, a world of one rank,
and a process without torch.distributed: `BatchNorm1d`, with its exactness. Ioffe and Szegedy 2015,
https://arxiv.org/abs/1502.03167; over ranks as in Peng et al. 2018, https://arxiv.org/abs/1711.07240, section 3.3.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch import distributed as dist

from normscope.distributed import world_of
from normscope.errors import BadInput
from normscope.functional import normalize
from normscope.functional.outside_programs import outside_programs
from normscope.nn.agreement import agreed
from normscope.nn.batch_norm import _BatchNorm
from normscope.nn.masking import Lengths, by_element, filled, is_packed, masked_leaf, valid
from normscope.nn.torch_tools import Proxy, refuse_script
from normscope.spec import RunningState


class SyncBatchNorm(_BatchNorm):
    """Batch norm of inputs (N, C, ...) over the ranks of a process group: ``torch.nn.SyncBatchNorm``, on CPUs too.

    Arguments: torch's, num_features, eps=1e-5, momentum=0.1 (None: the plain average of all batches), affine=True,
    track_running_stats=True, process_group=None (all ranks), device, dtype, bias=True; ``float32_statistics=True``:
    running statistics stay float32 in a half module; and ``running_correction=1``: as in `BatchNorm1d`.
    Called with ``mask=``, ``lengths=`` or a packed sequence: statistics are over the elements that count on all ranks.
    Shapes: parameters and statistics (C,). Input and output float16, bfloat16, float32 or float64. The state dict is
    that of torch's, both ways. It is no ``torch.nn.SyncBatchNorm`` by class, but of its base class:
    DistributedDataParallel refuses those on CPUs.

    In training every rank of the group calls the layer equally often, forward and backward; one without data passes
    an input of no samples. First derivatives only. torch.compile breaks the graph at the collective; torch.jit.script
    takes neither this layer nor torch's.

    Raises ValueError as `BatchNorm1d`; BadInput (a ValueError) where all ranks together hold one value a channel; and
    ModelError where another rank has gone, or does not come within the time limit of its process group.

    >>> import torch
    >>> norm = SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm2d(3)))[0]
    >>> norm, norm.ranks
    (SyncBatchNorm(3, eps=1e-05, momentum=0.1, affine=True, ...), 1)
    """

    _ndim = (2, None)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        float32_statistics: bool = True,
        running_correction: int = 1,
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
            running_correction=running_correction,
        )
        self.process_group = process_group

    def forward(
        self, input: Any, mask: Tensor | None = None, lengths: Lengths | None = None, fill: str = "zero"
    ) -> Any:
        """As `BatchNorm1d`, in training by the statistics of all ranks. Masks: see `normscope.nn.masking`; lengths run
        along the last axis.
        """
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        if not self.training or self.ranks == 1:
            return super().forward(input, mask, cast(Any, lengths), fill)
        return self._over_ranks(input, mask, lengths, fill)

    @outside_programs
    def _over_ranks(self, input: Any, mask: Tensor | None, lengths: Lengths | None, fill: str) -> Any:
        if is_packed(self, input, mask, lengths, fill):
            return by_element(input, self.forward)
        self._check_input_dim(input)
        counts = None
        if mask is not None or lengths is not None:
            counts = valid(type(self).__name__, input, mask, lengths)
        state, counter = None, self.num_batches_tracked
        if self.track_running_stats and self.running_mean is not None:
            before = 0 if counter is None else int(counter)
            state = RunningState(self.running_mean, self.running_var, before)
        group = self.process_group or dist.group.WORLD
        agreed(self, group, input, self.num_features, 1)
        spec, weight, bias = self.spec, self.weight, self.bias
        y = normalize(input, spec, weight, bias, running=state, mask=counts, group=group)
        if state is not None and counter is not None:
            counter.fill_(state.batches)  # as it was where a mask left nothing to follow on any rank
        return y if counts is None else filled(y, spec, bias, counts, fill)

    @property
    def ranks(self) -> int:
        """Ranks whose statistics are taken together; 1 where torch.distributed does not run."""
        return world_of(self.process_group)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise BadInput(
                "SyncBatchNorm takes an input of 2 axes or more, samples first and "
                f"{self.num_features} channels second; got an input of shape {tuple(input.shape)}. Move the channels "
                "there (x.movedim), or make the layer for their number."
            )

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any | None = None) -> nn.Module:
        """Every batch norm of a model, torch.nn's and normscope.nn's, made one of these; the rest as it is.

        As torch's: parameters and statistics are the objects they are, and children are replaced in place; a norm that
        is called in several places stays one. Norms with the state of a batch norm and a forward of their own
        (`BatchRenorm1d`, `GhostBatchNorm1d`) are left. ``normscope.transforms.convert(model, "sync")`` gives a report,
        and ``convert(model, "batch", sample=x)`` is the way back.
        """
        return _synchronized(module, process_group, {})

    def __prepare_scriptable__(self) -> SyncBatchNorm:
        refuse_script(self)


def _synchronized(module: nn.Module, group: Any, made: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in made:
        return made[module]
    made[module] = new = _of(module, group) if _is_batch_norm(module) else module
    for name, child in list(module._modules.items()):
        if child is not None:
            new.add_module(name, _synchronized(child, group, made))
    return new


def _is_batch_norm(module: nn.Module) -> bool:
    """By its arithmetic: not those with only the state of one, or with a forward of their own."""
    forwards = (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward, _BatchNorm.forward)
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and type(module).forward in forwards


def _of(old: Any, group: Any) -> SyncBatchNorm:
    new = SyncBatchNorm(
        old.num_features,
        old.eps,
        old.momentum,
        old.affine,
        old.track_running_stats,
        group or getattr(old, "process_group", None),
        bias=old.bias is not None,
        float32_statistics=getattr(old, "float32_statistics", True),
        running_correction=getattr(old, "running_correction", 1),
    )
    new.weight, new.bias = old.weight, old.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(new, name, getattr(old, name))
    new._keep_statistics()
    new.train(old.training)
    return new
