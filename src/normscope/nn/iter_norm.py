"""IterNorm: batch whitening by Newton's iteration in place of an eigendecomposition.

    y = weight * W (x - mean) + bias,    W = P_T / sqrt(trace S),    S = covariance + eps I
    P_0 = I,    P_i = (3 P_(i-1) - P_(i-1)^3 S / trace S) / 2

P_T / sqrt(trace S) goes to S^(-1/2), fastest along the directions of large variance: few steps whiten those, and leave
the small ones, which are mostly noise, below variance 1. Huang, Zhou, Zhu, Liu and Shao 2019, Iterative Normalization:
Beyond Standardization towards Efficient Whitening, https://arxiv.org/abs/1904.03441, algorithm 1. Mean, state and
evaluation are those of `BatchWhitening`; as in the paper, what is stored is the matrix W.
"""

from __future__ import annotations

from typing import Any

from normscope.nn.arguments import sizes
from normscope.nn.batch_whitening import BatchWhiteningState


class IterNorm(BatchWhiteningState):
    """Batch whitening of inputs (N, C, ...) by ``iterations`` of Newton's method.

    Arguments: num_features; group_size, the channels that are whitened together (the paper's: 64); eps=1e-5, 0 or more;
    momentum=0.1 (None: the plain average of all batches); affine=True; track_running_stats=True; device, dtype; and by
    name
        iterations=5, the paper's.
        eps_at, bias, float32_statistics, group: as `BatchWhitening`.
        state: ``"whitening"``, as the paper, or ``"covariance"``.
    Shapes, masks and errors as `BatchWhitening`; BadInput also where iterations is below 1.

    >>> import torch
    >>> x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)).cumsum(1)
    >>> for steps in (1, 5, 9):
    ...     y = IterNorm(2, 2, affine=False, iterations=steps)(x)
    ...     print((y.T @ y / 50).det().round(decimals=3))
    tensor(0.1870)
    tensor(0.9910)
    tensor(1.)
    """

    method = "iternorm"

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
        iterations: int = 5,
        eps_at: str = "variance",
        state: str = "whitening",
        bias: bool = True,
        float32_statistics: bool = True,
        group: Any = None,
    ) -> None:
        (self.iterations,) = sizes("IterNorm", "iterations", iterations, "Leave it at 5.")
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
        return self._said(iterations=self.iterations)
