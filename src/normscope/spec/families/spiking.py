"""Norms of spiking networks: an axis of time steps ``t``, and a gain set to the firing threshold.

tdBN stands in its paper; threshold-dependent layer, group and RMS norm are our extensions by analogy, and say so.
"""

from __future__ import annotations

from typing import Any

from normscope.spec.families.layers import Rank
from normscope.spec.normspec import NormSpec
from normscope.spec.parts import Running


def td_batch_norm(
    v_threshold: float = 1.0,
    alpha: float = 1.0,
    *,
    eps: float | None = 1e-5,
    momentum: float | None = 0.1,
    weight: bool = True,
    bias: bool = True,
    running: bool = True,
    layout: str = "t b c ...",
    steps: int | None = None,
    ndim: Rank | None = None,
) -> NormSpec:
    """Threshold-dependent batch norm (tdBN): batch norm over all time steps, scaled to the firing threshold.

    y = weight * alpha * v_threshold * (x - mean) / sqrt(var + eps) + bias, statistics over steps, samples and
    positions, so not causal in training. ``alpha`` is 1, or 1 / sqrt(2) on each branch of a residual sum.
    Some texts write the threshold as lambda, which in the paper is the learned gain.
    Shapes: x (T, B, C, ...), parameters and state (C,). ``layout`` may be ``"b t c ..."``, or
    ``"(t b) c ..."`` with ``steps``. Source: Zheng et al. 2021, section 3.

    >>> spec = td_batch_norm(0.5, 1 / 2**0.5, layout="(t b) c ...", steps=4)
    >>> spec.bind((8, 3, 5, 5)).set_size, round(spec.gain, 4)
    (200, 0.3536)
    """
    state = Running(momentum=momentum) if running else None
    spec = _spec(layout, steps, "c", "c", weight, bias, eps, gain=alpha * v_threshold, running=state)
    return spec if ndim is None else spec.replace(ndim=ndim)


def td_layer_norm(
    v_threshold: float = 1.0,
    alpha: float = 1.0,
    *,
    per_step: bool = True,
    eps: float | None = 1e-5,
    weight: bool = True,
    bias: bool = True,
    layout: str = "t b c ...",
    steps: int | None = None,
) -> NormSpec:
    """Threshold-dependent layer norm (tdLN), our extension by analogy with tdBN: no paper defines it.

    y = weight * alpha * v_threshold * (x - mean) / sqrt(var + eps) + bias, statistics of each sample over
    channels and positions: of every step alone (``per_step``, causal), or over all steps (not causal).
    Shapes: x (T, B, C, ...), parameters (C,).

    >>> [td_layer_norm(per_step=p).properties().causal for p in (True, False)]
    [True, False]
    """
    kept = "t b" if per_step else "b"
    return _spec(layout, steps, kept, "c", weight, bias, eps, gain=alpha * v_threshold)


def td_group_norm(
    groups: int,
    v_threshold: float = 1.0,
    alpha: float = 1.0,
    *,
    per_step: bool = True,
    eps: float | None = 1e-5,
    weight: bool = True,
    bias: bool = True,
    layout: str = "t b c ...",
    steps: int | None = None,
) -> NormSpec:
    """Threshold-dependent group norm, our extension by analogy with tdBN: no paper defines it.

    As `td_layer_norm`, of each group of channels alone. Shapes: x (T, B, C, ...), parameters (C,).

    >>> td_group_norm(2, 0.5).bind((4, 8, 6, 5)).set_size
    15
    """
    spec = td_layer_norm(
        v_threshold, alpha, per_step=per_step, eps=eps, weight=weight, bias=bias, layout=layout, steps=steps
    )
    return spec.replace(
        stats=f"{spec.stats.replace(' c ', ' (g c) ')} g",
        sizes={**spec.sizes, "g": groups},
        weight="(g c)" if weight else None,
        bias="(g c)" if bias else None,
    )


def td_rms_norm(
    v_threshold: float = 1.0,
    alpha: float = 1.0,
    *,
    per_step: bool = True,
    eps: float | None = 1e-5,
    weight: bool = True,
    layout: str = "t b c ...",
    steps: int | None = None,
) -> NormSpec:
    """Threshold-dependent RMS norm, our extension by analogy with tdBN: no paper defines it.

    y = weight * alpha * v_threshold * x / sqrt(mean(x^2) + eps), sets as in `td_layer_norm`. Shapes: x (T, B, C, ...),
    weight (C,).

    >>> td_rms_norm(0.5).center, td_rms_norm(0.5).gain
    (False, 0.5)
    """
    spec = td_layer_norm(
        v_threshold, alpha, per_step=per_step, eps=eps, weight=weight, bias=False, layout=layout, steps=steps
    )
    return spec.replace(center=False, scale="rms")


def batch_norm_through_time(
    *,
    eps: float | None = 1e-4,
    momentum: float | None = 0.1,
    weight: bool = True,
    bias: bool = False,
    running: bool = True,
    layout: str = "t b c ...",
    steps: int | None = None,
) -> NormSpec:
    """Batch norm through time (BNTT): statistics, state and gain of every step of its own, no bias.

    y[t] = weight[t] * (x[t] - mean[t]) / sqrt(var[t] + eps). Shapes: x (T, B, C, ...), weight and state
    (T, C). Source: Kim and Panda 2021.

    >>> batch_norm_through_time().bind((4, 8, 3, 5, 5)).running_shape
    (4, 3)
    """
    state = Running(momentum=momentum) if running else None
    return _spec(layout, steps, "t c", "t c", weight, bias, eps, running=state)


def temporal_effective_batch_norm(
    *,
    eps: float | None = 1e-5,
    momentum: float | None = 0.1,
    weight: bool = True,
    bias: bool = True,
    running: bool = True,
    layout: str = "t b c ...",
    steps: int | None = None,
) -> NormSpec:
    """Temporal effective batch norm (TEBN): batch norm over all time steps, with a gain and bias for every step.

    y[t] = weight[t] * (x[t] - mean) / sqrt(var + eps) + bias[t], statistics over steps, samples and positions. In the
    paper both are those of a channel times a factor of the step. Shapes: x (T, B, C, ...), weight and bias (T, C),
    state (C,). Source: Duan et al. 2022.

    >>> bound = temporal_effective_batch_norm().bind((4, 8, 3, 5, 5))
    >>> bound.weight_shape, bound.running_shape
    ((4, 3), (3,))
    """
    state = Running(momentum=momentum) if running else None
    return _spec(layout, steps, "c", "t c", weight, bias, eps, running=state)


def _spec(
    layout: str,
    steps: int | None,
    kept: str,
    affine_on: str,
    weight: bool,
    bias: bool,
    eps: float | None,
    **more: Any,
) -> NormSpec:
    """What all of them have: time steps in an axis of their own, or in that of the samples."""
    return NormSpec(
        f"{layout} -> {kept}",
        ndim=(2, None) if "(" in layout else (3, None),
        sizes={} if steps is None else {"t": steps},
        weight=affine_on if weight else None,
        bias=affine_on if bias else None,
        eps=eps,
        **more,
    )
