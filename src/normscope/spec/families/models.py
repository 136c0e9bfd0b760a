"""The norms of well-known models, with their eps, their order of casts, and where their weight starts from."""

from __future__ import annotations

from normscope.spec.families.layers import channels_first_layer_norm, layer_norm, rms_norm
from normscope.spec.normspec import NormSpec
from normscope.spec.parts import Cast


def llama_rms_norm(*, eps: float = 1e-6) -> NormSpec:
    """Llama's RMS norm: float32 inside, cast back, then the weight.

    y = weight * cast(x / sqrt(mean(x^2) + eps)). eps is 1e-6 by default and 1e-5 in many checkpoints.
    Source: Touvron et al. 2023; transformers' LlamaRMSNorm.

    >>> llama_rms_norm().cast
    Cast(compute='float32', weight='after')
    """
    return rms_norm(eps=eps, cast=Cast(compute="float32", weight="after"))


def t5_layer_norm(*, eps: float = 1e-6) -> NormSpec:
    """T5's layer norm, an RMS norm in fact: mean square in float32, cast to the weight's dtype, then the weight.

    Source: Raffel et al. 2020; transformers' T5LayerNorm.

    >>> t5_layer_norm() == llama_rms_norm()
    True
    """
    return rms_norm(eps=eps, cast=Cast(compute="float32", weight="after"))


def gemma_rms_norm(*, eps: float = 1e-6) -> NormSpec:
    """Gemma's RMS norm: the stored weight is the distance from one, applied in float32 before casting back.

    y = cast((1 + weight) * x / sqrt(mean(x^2) + eps)). Source: Gemma Team 2024; transformers' GemmaRMSNorm.

    >>> print(gemma_rms_norm().same_function(llama_rms_norm()))
    the same function, with second's weight = (1 + first's weight)
    """
    return rms_norm(eps=eps, weight_offset=1.0, cast=Cast(compute="float32", weight="before"))


def bert_layer_norm(*, eps: float = 1e-12) -> NormSpec:
    """BERT's layer norm: eps 1e-12, far below what float32 can add to a variance near one.

    Source: Devlin et al. 2019; transformers' BertConfig.layer_norm_eps.

    >>> bert_layer_norm().eps
    1e-12
    """
    return layer_norm(eps=eps)


def vit_layer_norm(*, eps: float = 1e-6) -> NormSpec:
    """The vision transformer's layer norm: eps 1e-6 (transformers' ViTConfig has 1e-12).

    Source: Dosovitskiy et al. 2021, whose code is in Flax with its default eps.

    >>> vit_layer_norm().eps
    1e-06
    """
    return layer_norm(eps=eps)


def convnext_layer_norm(*, channels_first: bool = True, eps: float = 1e-6) -> NormSpec:
    """ConvNeXt's layer norm: over the channels of every position, channels first or last, eps 1e-6.

    Both are one function of the same data. Source: Liu et al. 2022.

    >>> first, last = convnext_layer_norm(), convnext_layer_norm(channels_first=False)
    >>> bool(first.same_function(last, layout={"c": "d"}))
    True
    """
    return channels_first_layer_norm(eps=eps) if channels_first else layer_norm(eps=eps)
