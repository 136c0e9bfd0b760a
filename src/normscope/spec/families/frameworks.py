"""The defaults of other frameworks, whose layouts put the channels last.

Their ``momentum`` is a decay, 1 - momentum of PyTorch; the functions take it as the framework writes it.
"""

from __future__ import annotations

from normscope.spec.families.layers import batch_norm, group_norm, layer_norm, rms_norm
from normscope.spec.normspec import NormSpec
from normscope.spec.parts import Cast


def update_fraction(decay: float) -> float:
    """1 - decay, to the digits that the decay was written with.

    >>> update_fraction(0.99), 1 - 0.99
    (0.01, 0.010000000000000009)
    """
    return float(f"{1 - decay:.12g}")


def keras_batch_normalization(
    *,
    momentum: float = 0.99,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
    channels_last: bool = True,
) -> NormSpec:
    """keras.layers.BatchNormalization: eps 1e-3, decay 0.99 (update fraction 0.01), biased running variance.

    ``center`` and ``scale`` say whether there is a bias and a weight, as in Keras. TensorFlow's fused kernel,
    which tf.keras used for channels-last images, stores the unbiased variance instead: replace ``running``
    for it.

    >>> keras_batch_normalization(scale=False).running
    Running(momentum=0.01, correction=0, average='ema', over=None, renorm=None, averages='variance')
    """
    return batch_norm(
        eps=epsilon,
        momentum=update_fraction(momentum),
        weight=scale,
        bias=center,
        running_correction=0,
        layout="b ... c" if channels_last else "b c ...",
    )


def keras_layer_normalization(*, epsilon: float = 1e-3, center: bool = True, scale: bool = True) -> NormSpec:
    """keras.layers.LayerNormalization over the last axis: eps 1e-3.

    >>> keras_layer_normalization().eps
    0.001
    """
    return layer_norm(eps=epsilon, weight=scale, bias=center)


def keras_group_normalization(
    groups: int = 32, *, epsilon: float = 1e-3, center: bool = True, scale: bool = True
) -> NormSpec:
    """keras.layers.GroupNormalization, channels last: 32 groups, eps 1e-3.

    >>> keras_group_normalization().bind((8, 5, 5, 64)).weight_shape
    (64,)
    """
    return group_norm(groups, eps=epsilon, weight=scale, bias=center, layout="b ... (g c)")


def keras_rms_normalization(*, epsilon: float = 1e-6) -> NormSpec:
    """keras.layers.RMSNormalization over the last axis: eps 1e-6.

    >>> keras_rms_normalization().scale
    'rms'
    """
    return rms_norm(eps=epsilon)


def flax_batch_norm(*, momentum: float = 0.99, epsilon: float = 1e-5) -> NormSpec:
    """flax BatchNorm: eps 1e-5, decay 0.99 (update fraction 0.01), biased running variance, channels last.

    >>> flax_batch_norm().running.momentum
    0.01
    """
    return batch_norm(eps=epsilon, momentum=update_fraction(momentum), running_correction=0, layout="b ... c")


def flax_layer_norm(*, epsilon: float = 1e-6) -> NormSpec:
    """flax LayerNorm over the last axis: eps 1e-6.

    >>> flax_layer_norm().eps
    1e-06
    """
    return layer_norm(eps=epsilon)


def flax_group_norm(groups: int = 32, *, epsilon: float = 1e-6) -> NormSpec:
    """flax GroupNorm, channels last: 32 groups, eps 1e-6.

    >>> flax_group_norm().sizes
    {'g': 32}
    """
    return group_norm(groups, eps=epsilon, layout="b ... (g c)")


def flax_instance_norm(*, epsilon: float = 1e-6) -> NormSpec:
    """flax InstanceNorm, channels last: eps 1e-6, with weight and bias.

    >>> str(flax_instance_norm().pattern)
    'b ... c -> b c'
    """
    return NormSpec("b ... c -> b c", ndim=(3, None), weight="c", bias="c", eps=epsilon)


def flax_rms_norm(*, epsilon: float = 1e-6) -> NormSpec:
    """flax RMSNorm over the last axis: eps 1e-6.

    >>> flax_rms_norm().eps
    1e-06
    """
    return rms_norm(eps=epsilon)


def onnx_batch_normalization(*, momentum: float = 0.9, epsilon: float = 1e-5) -> NormSpec:
    """ONNX BatchNormalization: eps 1e-5, decay 0.9 (update fraction 0.1), biased running variance.

    >>> onnx_batch_normalization().running
    Running(momentum=0.1, correction=0, average='ema', over=None, renorm=None, averages='variance')
    """
    return batch_norm(eps=epsilon, momentum=update_fraction(momentum), running_correction=0)


def onnx_layer_normalization(
    axes: str = "d", *, epsilon: float = 1e-5, bias: bool = True, stash: str = "float32"
) -> NormSpec:
    """ONNX LayerNormalization over the last axes: statistics in ``stash``, scale and bias after casting back.

    >>> onnx_layer_normalization().cast
    Cast(compute='float32', weight='after')
    """
    return layer_norm(axes, eps=epsilon, bias=bias).replace(cast=Cast(compute=stash, weight="after"))


def onnx_lp_normalization(axes: str = "d") -> NormSpec:
    """ONNX LpNormalization with p = 2 over the last axes: x / |x|, without an eps.

    >>> onnx_lp_normalization().eps
    0.0
    """
    return NormSpec(f"... {axes} -> ...", center=False, scale="l2", eps=0.0)


def onnx_mean_variance_normalization(stats: str = "b c h w -> c") -> NormSpec:
    """ONNX MeanVarianceNormalization: (x - mean) / (sqrt(var) + 1e-9), by default over samples and positions.

    >>> onnx_mean_variance_normalization().eps_at
    'std'
    """
    return NormSpec(stats, eps=1e-9, eps_at="std")
