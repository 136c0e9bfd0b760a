"""The layers: batch, layer, group, instance and RMS norm, and those that only scale.

Every function returns a `NormSpec`. ``weight`` and ``bias`` say whether there is one; ``layout`` is the left
side of the pattern, so that ``layout="b ... c"`` is channels last; ``ndim`` bounds the input's number of
axes.
"""

from __future__ import annotations

from normscope.spec.normspec import NormSpec
from normscope.spec.parts import Cast, Running

Rank = tuple[int, int | None]


def batch_norm(
    *,
    eps: float | None = 1e-5,
    momentum: float | None = 0.1,
    weight: bool = True,
    bias: bool = True,
    running: bool = True,
    running_correction: float = 1,
    layout: str = "b c ...",
    ndim: Rank | None = (2, None),
) -> NormSpec:
    """Batch norm: every channel by its mean and biased variance over samples and positions.

    y = weight * (x - mean) / sqrt(var + eps) + bias; running mean, and running variance with M / (M - 1).
    Shapes: x (B, C, ...), parameters and state (C,). ``momentum`` is the update fraction; None is a plain
    mean over batches. Source: Ioffe and Szegedy 2015; defaults of torch.nn.BatchNorm1d to 3d.

    >>> batch_norm().bind((8, 3, 5, 5)).set_size
    200
    """
    return NormSpec(
        f"{layout} -> c",
        ndim=ndim,
        weight="c" if weight else None,
        bias="c" if bias else None,
        eps=eps,
        running=Running(momentum=momentum, correction=running_correction) if running else None,
    )


def layer_norm(
    axes: str = "d",
    *,
    eps: float | None = 1e-5,
    weight: bool = True,
    bias: bool = True,
    ndim: Rank | None = None,
) -> NormSpec:
    """Layer norm: every position by its mean and biased variance over the last axes.

    y = weight * (x - mean) / sqrt(var + eps) + bias. Shapes: x (..., *axes), parameters as the axes: ``"d"``,
    ``"l d"``, ``"c h w"``. Source: Ba, Kiros and Hinton 2016; defaults of torch.nn.LayerNorm.

    >>> layer_norm("c h w").bind((8, 3, 5, 5)).weight_shape
    (3, 5, 5)
    """
    return NormSpec(
        f"... {axes} -> ...", ndim=ndim, weight=axes if weight else None, bias=axes if bias else None, eps=eps
    )


def channels_first_layer_norm(
    *, eps: float | None = 1e-6, weight: bool = True, bias: bool = True, layout: str = "b c ..."
) -> NormSpec:
    """Layer norm over the channels of every position of (B, C, ...): the parameters live on the erased axis.

    y[b, c, p] = weight[c] * (x - mean[b, p]) / sqrt(var[b, p] + eps) + bias[c].
    Source: Liu et al. 2022 (ConvNeXt), whose eps is 1e-6.

    >>> b = channels_first_layer_norm().bind((8, 3, 5, 5))
    >>> b.set_size, b.weight_shape
    (3, (3,))
    """
    return NormSpec(
        f"{layout} -> b ...",
        weight="c" if weight else None,
        bias="c" if bias else None,
        eps=eps,
        ndim=(2, None),
    )


def group_norm(
    groups: int,
    *,
    eps: float | None = 1e-5,
    weight: bool = True,
    bias: bool = True,
    layout: str = "b (g c) ...",
    ndim: Rank | None = (2, None),
) -> NormSpec:
    """Group norm: every group of a sample's channels by its mean and biased variance, over positions too.

    y = weight * (x - mean) / sqrt(var + eps) + bias. Shapes: x (B, G * C, ...), parameters (G * C,), one pair
    for every channel. Source: Wu and He 2018; defaults of torch.nn.GroupNorm.

    >>> group_norm(2).bind((8, 6, 5, 5)).set_size
    75
    """
    return NormSpec(
        f"{layout} -> b g",
        ndim=ndim,
        sizes={"g": groups},
        weight="(g c)" if weight else None,
        bias="(g c)" if bias else None,
        eps=eps,
    )


def group_whitening(
    groups: int,
    *,
    method: str = "zca",
    iterations: int = 5,
    eps: float = 1e-5,
    eps_at: str = "variance",
    weight: bool = True,
    bias: bool = True,
) -> NormSpec:
    """Group whitening: the groups of a sample's channels decorrelated over what is in a group, positions too.

    y = weight * W (x - mean) + bias, W S W^T = 1 for S = covariance + eps I, a matrix of groups by groups a sample.
    ``method`` as for `batch_whitening`. Group norm is its diagonal. Shapes: x (B, G * C, ...), parameters (G * C,).
    Source: Huang, Zhou, Liu and Shao 2021, Group Whitening, equations 7 and 8.

    >>> spec = group_whitening(4)
    >>> str(spec.pattern), spec.whiten, spec.bind((8, 12, 5)).set_size
    ('b (g c) ... -> b g', 'g', 15)
    """
    return NormSpec(
        "b (g c) ... -> b g",
        sizes={"g": groups},
        weight="(g c)" if weight else None,
        bias="(g c)" if bias else None,
        scale=method,
        whiten="g",
        iterations=iterations,
        eps=eps,
        eps_at=eps_at,
    )


def instance_norm(
    *,
    eps: float | None = 1e-5,
    momentum: float | None = 0.1,
    weight: bool = False,
    bias: bool = False,
    running: bool = False,
    running_correction: float = 1,
    batched: bool = True,
    layout: str | None = None,
    ndim: Rank | None = None,
) -> NormSpec:
    """Instance norm: every channel of every sample by its mean and biased variance over positions.

    y = weight * (x - mean) / sqrt(var + eps) + bias. Shapes: x (B, C, ...), or (C, ...) with
    ``batched=False``; parameters and state (C,), the state the mean over samples. Source: Ulyanov, Vedaldi
    and Lempitsky 2016; defaults of torch.nn.InstanceNorm1d to 3d, which have neither parameters nor state.

    >>> str(instance_norm().pattern), str(instance_norm(batched=False).pattern)
    ('b c ... -> b c', 'c ... -> c')
    """
    if layout is None:
        layout = "b c ..." if batched else "c ..."
    return NormSpec(
        f"{layout} -> {'b c' if batched else 'c'}",
        ndim=ndim or ((3, None) if batched else (2, None)),
        weight="c" if weight else None,
        bias="c" if bias else None,
        eps=eps,
        running=Running(momentum=momentum, correction=running_correction) if running else None,
    )


def rms_norm(
    axes: str = "d",
    *,
    eps: float | None = None,
    weight: bool = True,
    weight_offset: float = 0.0,
    cast: Cast | None = None,
    ndim: Rank | None = None,
) -> NormSpec:
    """RMS norm: every position by the root of its mean square over the last axes, without centering.

    y = weight * x / sqrt(mean(x^2) + eps). Shapes: x (..., *axes), weight as the axes. Source: Zhang and
    Sennrich 2019; defaults of torch.nn.RMSNorm, whose eps None is the machine epsilon of the computing dtype.

    >>> str(rms_norm(eps=1e-6))
    '... d -> ...; not centered; rms; eps 1e-06 inside the root; weight d; no bias'
    """
    return NormSpec(
        f"... {axes} -> ...",
        ndim=ndim,
        weight=axes if weight else None,
        center=False,
        scale="rms",
        eps=eps,
        weight_offset=weight_offset,
        cast=cast or Cast(),
    )


def l2_normalize(axes: str = "d", *, eps: float = 1e-12) -> NormSpec:
    """L2 normalization as torch.nn.functional.normalize: y = x / max(sqrt(sum(x^2)), eps) over the last axes.

    TensorFlow's x / sqrt(max(sum(x^2), e)) is the same function with eps = sqrt(e): see `tf_l2_normalize`.

    >>> str(l2_normalize())
    '... d -> ...; not centered; l2; eps 1e-12 as the least root; no weight; no bias'
    """
    return NormSpec(f"... {axes} -> ...", center=False, scale="l2", eps=eps, eps_at="max")


def tf_l2_normalize(axes: str = "d", *, epsilon: float = 1e-12) -> NormSpec:
    """L2 normalization of TensorFlow: y = x / sqrt(max(sum(x^2), epsilon)), ``epsilon`` under the root.

    >>> bool(tf_l2_normalize(epsilon=1e-12).same_function(l2_normalize(eps=1e-6)))
    True
    """
    return NormSpec(f"... {axes} -> ...", center=False, scale="l2", eps=epsilon, eps_at="max_variance")


def pixel_norm(*, eps: float | None = 1e-8, layout: str = "b c ...") -> NormSpec:
    """Pixel norm: every position of (B, C, ...) by the root of its mean square over channels; no parameters.

    y = x / sqrt(mean(x^2) + eps). Source: Karras et al. 2018 (progressive growing), section 4.2; its eps is
    1e-8.

    >>> pixel_norm().bind((8, 3, 5, 5)).set_size
    3
    """
    return NormSpec(f"{layout} -> b ...", ndim=(2, None), center=False, scale="rms", eps=eps)


def scale_norm(axes: str = "d", *, eps: float = 1e-5, eps_at: str = "max") -> NormSpec:
    """Scale norm: one scalar times the unit vector, y = weight * x / max(|x|, eps) over the last axes.

    Shapes: x (..., *axes), weight (). Source: Nguyen and Salazar 2019; eps_at ``"std"`` is |x| + eps,
    ``"variance"`` the root of |x|^2 + eps.

    >>> scale_norm().bind((8, 16)).weight_shape
    ()
    """
    return NormSpec(f"... {axes} -> ...", weight="", center=False, scale="l2", eps=eps, eps_at=eps_at)


def filter_response_norm(
    *, eps: float = 1e-6, layout: str = "b c ...", ndim: Rank | None = (3, None)
) -> NormSpec:
    """Filter response norm: every channel of every sample by the root of its mean square over positions.

    y = weight * x / sqrt(mean(x^2) + eps) + bias, with a fixed eps (a learned one is outside the family); the
    thresholded activation that follows in the paper is not part of it. Shapes: x (B, C, ...), parameters
    (C,).
    Source: Singh and Krishnan 2020.

    >>> filter_response_norm().bind((8, 3, 5, 5)).set_size
    25
    """
    return NormSpec(f"{layout} -> b c", ndim=ndim, weight="c", bias="c", center=False, scale="rms", eps=eps)
