"""Weight and bias of the channels, either of which may be left out.

Newer versions of torch's batch, instance and group norm offer a weight without a bias, older ones do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init


class OptionalBias(nn.Module):
    """Mixin: the arguments ``affine`` and ``bias``, for torch's norms in every version of torch."""

    affine: bool

    def _set_bias(self, bias: bool) -> None:
        if self.affine and not bias:
            self.register_parameter("bias", None)

    def _set_affine(self, channels: int, affine: bool, bias: bool, device: Any, dtype: Any) -> None:
        """As torch's norms have them, for a layer that is none of torch's."""
        self.affine = affine
        for name, there in (("weight", affine), ("bias", affine and bias)):
            empty = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if there else None
            self.register_parameter(name, empty)

    def reset_parameters(self) -> None:
        """Weight 1 and bias 0, where they are; running statistics as new."""
        if isinstance(self, nn.modules.batchnorm._NormBase):
            self.reset_running_stats()
        if isinstance(self.weight, Tensor):
            init.ones_(self.weight)
        if isinstance(self.bias, Tensor):
            init.zeros_(self.bias)
