"""Norms of a weight (O, I, ...) rather than of activations: one set for each output ``o``; no samples."""

from __future__ import annotations

from normscope.spec.normspec import NormSpec

STATS = "o i ... -> o"


def weight_standardization(*, eps: float = 1e-5) -> NormSpec:
    """Weight standardization, the common form: unbiased deviation, eps outside the root.

    w' = (w - mean) / (sqrt(sum((w - mean)^2) / (n - 1)) + eps) over the n inputs of each output.
    Source: Qiao et al. 2019, in the form of its PyTorch listing.

    >>> print(weight_standardization())
    o i ... -> o; centered; std, unbiased; eps 1e-05 outside the root; no weight; no bias
    """
    return NormSpec(STATS, correction=1, eps=eps, eps_at="std")


def biased_weight_standardization(*, eps: float = 1e-10) -> NormSpec:
    """Weight standardization with the biased variance and eps inside the root, w' = (w - mean) / sqrt(var + eps).

    Source: Kolesnikov et al. 2020 (BiT), whose eps is 1e-10.

    >>> biased_weight_standardization().eps_at
    'variance'
    """
    return NormSpec(STATS, eps=eps)


def scaled_weight_standardization(*, gamma: float = 1.0, eps: float = 1e-4, weight: bool = True) -> NormSpec:
    """Scaled weight standardization: unit variance of the output for unit variance of the input.

    w' = weight * gamma * (w - mean) / sqrt(max(sum((w - mean)^2), eps)); weight (O,). The sum is n times the biased
    variance, n the fan-in, as the papers write it. ``gamma`` is the constant of the activation (1.7139588594436646
    for ReLU). Source: Brock, De and Smith 2021; eps and the floor as in Brock et al. 2021 (NFNet).

    >>> spec = scaled_weight_standardization()
    >>> spec.scale, spec.eps_at
    ('l2', 'max_variance')
    """
    return NormSpec(
        STATS, weight="o" if weight else None, scale="l2", eps=eps, eps_at="max_variance", gain=gamma
    )


def weight_norm(*, eps: float = 0.0) -> NormSpec:
    """Weight norm: w' = weight * w / |w| for each output; weight (O,). There is no eps unless given.

    Source: Salimans and Kingma 2016; torch.nn.utils.parametrizations.weight_norm with dim 0.

    >>> weight_norm().properties().scale_invariance
    'exact'
    """
    return NormSpec(STATS, weight="o", center=False, scale="l2", eps=eps)
