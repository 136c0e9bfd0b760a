"""Variants of batch norm: virtual batches, renormalization, whitening."""

from __future__ import annotations

from normscope.spec.families.layers import Rank
from normscope.spec.normspec import NormSpec
from normscope.spec.parts import Running, require


def ghost_batch_norm(
    *,
    size: int | None = None,
    number: int | None = None,
    remainder: str = "error",
    eps: float | None = 1e-5,
    momentum: float | None = 0.1,
    weight: bool = True,
    bias: bool = True,
    running: bool = True,
    updates: str = "each",
    ndim: Rank | None = None,
) -> NormSpec:
    """Ghost batch norm: batch norm within virtual batches of consecutive samples.

    Give either their ``size`` or their ``number``: they differ at another batch size. ``remainder`` is
    ``"error"``, ``"short"`` (33 = 32 + 1) or ``"balanced"`` (33 = 17 + 16). Shapes: x (B, C, ...), parameters
    and state (C,). With ``updates="each"`` the state moves once per virtual batch, in order, as in the source; with
    ``"once"`` it moves once per batch, by the mean of what the virtual batches have.
    Source: Hoffer, Hubara and Soudry 2017, algorithm 1.

    >>> ghost_batch_norm(size=32, remainder="balanced").bind((33, 3, 8)).segments
    (17, 16)
    """
    require(updates in ("each", "once"), "updates is 'each' or 'once'", updates, "The paper's is 'each'.")
    virtual = (
        "v" if updates == "each" else "k"
    )  # state moves along v in turn, and is averaged along other axes
    sizes = {name: value for name, value in (("b", size), (virtual, number)) if value is not None}
    return NormSpec(
        f"({virtual} b) c ... -> {virtual} c",
        ndim=ndim,
        sizes=sizes,
        remainder=remainder,
        weight="c" if weight else None,
        bias="c" if bias else None,
        eps=eps,
        running=Running(momentum=momentum, over="c" if updates == "once" else None) if running else None,
    )


def batch_renorm(
    r_max: float = 3.0,
    d_max: float = 5.0,
    *,
    eps: float | None = 1e-5,
    momentum: float | None = 0.1,
    weight: bool = True,
    bias: bool = True,
    ndim: Rank | None = (2, None),
    averages: str = "variance",
) -> NormSpec:
    """Batch renormalization: batch norm corrected towards the stored statistics, so that training reads state.

    y = weight * (r (x - mean) / s + d) + bias with s = sqrt(var + eps), S the same of the stored variance,
    r = s / S clipped to [1 / r_max, r_max] and d = (mean - stored mean) / S clipped to [-d_max, d_max], both
    without gradient. Shapes as `batch_norm`. ``averages`` is ``"variance"`` (stored with M / (M - 1), as PyTorch does
    for batch norm) or ``"denominator"`` (s, without that factor: the paper's).
    Source: Ioffe 2017, algorithm 1; 3 and 5 are the limits its schedule ends at, 1 and 0 are batch norm.

    >>> batch_renorm().properties().training_reads_state
    True
    """
    return NormSpec(
        "b c ... -> c",
        ndim=ndim,
        weight="c" if weight else None,
        bias="c" if bias else None,
        eps=eps,
        running=Running(
            momentum=momentum,
            correction=1 if averages == "variance" else 0,
            renorm=(r_max, d_max),
            averages=averages,
        ),
    )


def batch_whitening(
    group_size: int,
    *,
    method: str = "zca",
    iterations: int = 5,
    eps: float = 1e-5,
    eps_at: str = "variance",
    momentum: float | None = 0.1,
    state: str = "covariance",
    weight: bool = True,
    bias: bool = True,
    running: bool = True,
) -> NormSpec:
    """Batch whitening in groups of ``group_size`` channels: decorrelates them over samples and positions.

    y = weight * W (x - mean) + bias, W S W^T = 1 for S = covariance + eps I, one matrix a group. ``method``
    is ``"zca"`` (W = S^(-1/2); Huang et al. 2018, decorrelated batch norm), ``"cholesky"`` (W = L^-1, S = L
    L^T; Siarohin, Sangineto and Sebe 2019) or ``"iternorm"`` (Newton's iteration; Huang et al. 2019).
    ``state`` is what is stored: ``"covariance"`` or ``"whitening"`` (the matrix W). Shapes: x (B, G *
    group_size, ...), parameters and stored mean (G * group_size,), stored matrices (G, group_size, group_size).

    >>> spec = batch_whitening(4, method="iternorm")
    >>> str(spec.pattern), spec.whiten, spec.bind((8, 12, 5)).weight_shape
    ('b (g c) ... -> g c', 'c', (12,))
    """
    return NormSpec(
        "b (g c) ... -> g c",
        sizes={"c": group_size},
        weight="(g c)" if weight else None,
        bias="(g c)" if bias else None,
        scale=method,
        whiten="c",
        iterations=iterations,
        whiten_state=state,
        eps=eps,
        eps_at=eps_at,
        running=Running(momentum=momentum, correction=0, over="(g c)") if running else None,
    )
