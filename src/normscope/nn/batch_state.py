"""Layers that torch lacks with the parameters, buffers and state dict of its batch norm, and its evaluation.

    evaluation: y = weight * (x - running_mean) / sqrt(running_var + eps) + bias

What a batch does in training is each layer's own (`_by_batch`). They inherit from the base class of torch's batch norms
and of SyncBatchNorm, so that code which re-estimates, freezes or exempts batch norms finds them, and not from
``torch.nn.BatchNorm2d``, which they are not. The one that would turn them into batch norms, convert_sync_batchnorm, is
refused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from normscope.errors import BadInput
from normscope.functional import batch_norm, normalize
from normscope.nn.arguments import positive_eps, sizes
from normscope.nn.float32_statistics import Float32Statistics
from normscope.nn.masking import Lengths, by_element, filled, is_packed, valid
from normscope.nn.optional_bias import OptionalBias
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, Unscriptable, Unsynchronized, leaf
from normscope.spec import NormSpec, RunningState, families


class BatchState(
    Unscriptable, Unsynchronized, Float32Statistics, OptionalBias, nn.modules.batchnorm._BatchNorm
):
    """Base of `BatchRenorm1d` and `GhostBatchNorm1d` and their kind."""

    _ndim: tuple[int, int]
    """fewest and most axes of an input"""

    def __init__(
        self,
        num_features: int,
        eps: float,
        momentum: float | None,
        affine: bool,
        track_running_stats: bool,
        device: Any,
        dtype: Any,
        *,
        bias: bool,
        float32_statistics: bool,
    ) -> None:
        name = type(self).__name__
        (channels,) = sizes(name, "num_features", num_features, "Give the size of axis 1.")
        super().__init__(
            channels, positive_eps(name, eps), momentum, affine, track_running_stats, device, dtype
        )
        self._set_bias(bias)
        self.float32_statistics = float32_statistics
        self._keep_statistics()

    def forward(
        self,
        input: Any,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        fill: str = "zero",
    ) -> Any:
        """By the batch in training and where no statistics are stored, by the stored ones else. Masks: see
        `normscope.nn.masking`; lengths run along the last axis.
        """
        if isinstance(input, Proxy):
            given = {"mask": mask, "lengths": lengths, "fill": None if fill == "zero" else fill}
            return leaf(self, input, **{name: value for name, value in given.items() if value is not None})
        if is_packed(self, input, mask, lengths, fill):
            return self._packed(input)
        self._check_shape(input)
        counts = None
        if mask is not None or lengths is not None:
            counts = valid(type(self).__name__, input, mask, lengths)
        mean, var = self.running_mean, self.running_var
        spec = _stored_spec(float(self.eps), self.weight is not None, self.bias is not None)
        if self.training or mean is None or var is None:
            y = self._by_batch(input, counts)
        elif counts is None:
            return batch_norm(input, mean, var, self.weight, self.bias, eps=self.eps)
        else:
            state = RunningState(mean, var)
            y = normalize(input, spec, self.weight, self.bias, running=state, training=False, mask=counts)
        return y if counts is None else filled(y, spec, self.bias, counts, fill)

    def _packed(self, input: PackedSequence) -> Any:
        return by_element(input, self.forward)

    def _by_batch(self, input: Tensor, mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _check_shape(self, x: Tensor) -> None:
        name, (low, high) = type(self).__name__, self._ndim
        if not low <= x.dim() <= high:
            axes = f"{low}" if low == high else f"{low} or {high}"
            raise BadInput(
                f"{name} takes an input of {axes} axes, samples first and channels second; got an input of shape "
                f"{tuple(x.shape)}. For one sample use x.unsqueeze(0)."
            )
        if x.shape[1] != self.num_features:
            raise BadInput(
                f"{name} was made for {self.num_features} channels on axis 1; got an input of shape {tuple(x.shape)}. "
                "Move the channels there (x.movedim), or make the layer for x.shape[1]."
            )

    def _said(self, **more: Any) -> str:
        """What `extra_repr` gives: the constructor's arguments."""
        said = {"eps": self.eps, "momentum": self.momentum, "affine": self.affine, **more}
        if not self.float32_statistics:
            said["float32_statistics"] = False
        return ", ".join([str(self.num_features), *(f"{name}={value!r}" for name, value in said.items())])


@remembered
def _stored_spec(eps: float, weight: bool, bias: bool) -> NormSpec:
    return families.batch_norm(eps=eps, momentum=0.0, weight=weight, bias=bias)
