"""A weight without a bias, for batch, instance and group norm: newer versions of torch offer it, older ones do not."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import init


class OptionalBias(nn.Module):
    """Mixin for torch's affine norms: the argument ``bias=False``, in every version of torch."""

    affine: bool

    def _set_bias(self, bias: bool) -> None:
        if self.affine and not bias:
            self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Weight 1 and bias 0, where they are; running statistics as new."""
        if isinstance(self, nn.modules.batchnorm._NormBase):
            self.reset_running_stats()
        if isinstance(self.weight, Tensor):
            init.ones_(self.weight)
        if isinstance(self.bias, Tensor):
            init.zeros_(self.bias)
