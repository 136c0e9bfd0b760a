"""Running statistics in float32, whatever the module is cast to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)


class Float32Statistics(nn.Module):
    """Mixin: running statistics stay float32 where the module is made in or cast to a half type.

    An average in bfloat16 (8 bits) stands still once a step is below half its spacing: with momentum 0.1, when the
    batch is within 2 % of it; and float16 overflows at a variance of 65,520. Everything else is cast as asked, and
    casts to float64 take the statistics along. With ``float32_statistics = False`` they are cast like the rest.
    """

    float32_statistics: bool = True
    statistics: tuple[str, str] = ("running_mean", "running_var")
    """names of the buffers: what is subtracted, and what divides"""
    running_mean: Tensor | None
    running_var: Tensor | None

    def _keep_statistics(self) -> None:
        """Bring half statistics (of a constructor's dtype, or assigned from a state dict) to float32."""
        for name in self.statistics:
            held = getattr(self, name)
            if self.float32_statistics and held is not None and held.dtype in HALF:
                setattr(self, name, held.float())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Behind ``.to``, ``.half``, ``.cuda`` and the like: statistics move, but are never rounded to a half type."""
        statistics = {id(getattr(self, name)) for name in self.statistics if self.float32_statistics}

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if id(tensor) in statistics and result.dtype in HALF:
                return tensor.to(device=result.device, dtype=torch.float32)
            return result

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._keep_statistics()

    def extra_repr(self) -> str:
        """As torch's, with what differs from the default named after it."""
        return super().extra_repr() + ("" if self.float32_statistics else ", float32_statistics=False")
