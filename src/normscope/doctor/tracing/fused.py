"""Which normalizations PyTorch runs inside its fused transformer layer in deployment."""

from __future__ import annotations

from torch import nn


def fused_norms(model: nn.Module) -> set[int]:
    """Ids of the norm modules that the fast path of ``nn.TransformerEncoderLayer`` takes over.

    In eval mode and without gradients that layer calls one operator for attention, feed-forward and both norms,
    if its settings allow it and no module in it has hooks. The settings are tested here, in the words of PyTorch's
    own forward; what depends on the call (autocast, a batch dimension) is taken to be as it is in deployment.
    """
    found: set[int] = set()
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and _allowed(layer):
            found.update((id(layer.norm1), id(layer.norm2)))
    return found


def _allowed(layer: nn.TransformerEncoderLayer) -> bool:
    attention = layer.self_attn
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
    return (
        type(layer).forward is nn.TransformerEncoderLayer.forward
        and attention.batch_first
        and attention.in_proj_bias is not None
        and attention._qkv_same_embed_dim
        and attention.num_heads % 2 == 0
        and bool(layer.activation_relu_or_gelu)
        and layer.norm1.eps == layer.norm2.eps
        and not hooked
    )
