"""RMS norms of language models, told apart by their offset and by the order of their casts in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from normscope.identify.modules import identify_module
from normscope.spec import Cast, NormSpec, families

AFTER, BEFORE = Cast("float32", "after"), Cast("float32", "before")


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (LlamaRMSNorm(48, eps=1e-5), families.llama_rms_norm(eps=1e-5)),
        (MistralRMSNorm(48), families.llama_rms_norm()),
        (Qwen2RMSNorm(48), families.llama_rms_norm()),
        (Qwen3RMSNorm(48), families.llama_rms_norm()),
        (T5LayerNorm(48), families.t5_layer_norm()),
        (GemmaRMSNorm(48), families.gemma_rms_norm()),
        (Gemma2RMSNorm(48), families.gemma_rms_norm()),
        (Gemma3RMSNorm(48), families.gemma_rms_norm()),
        (nn.RMSNorm(48, eps=1e-6), families.rms_norm(eps=1e-6)),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, nn.Module) else "",
)
def test_named_to_the_cast(norm: nn.Module, expected: NormSpec) -> None:
    found = identify_module(norm, torch.zeros(3, 7, 48))
    assert found.spec == expected, str(found)
    assert found.max_error is not None
    assert found.max_error < 1e-9


def test_llama_and_gemma_differ_in_the_bits_and_the_offset() -> None:
    llama, gemma = (identify_module(norm(48), torch.zeros(3, 7, 48)) for norm in (LlamaRMSNorm, GemmaRMSNorm))
    assert llama.spec is not None
    assert gemma.spec is not None
    assert (llama.spec.cast, llama.spec.weight_offset) == (AFTER, 0)
    assert (gemma.spec.cast, gemma.spec.weight_offset) == (BEFORE, 1)
    shares = {
        name: evidence.numbers
        for name, found in (("llama", llama), ("gemma", gemma))
        for evidence in found.evidence
        if evidence.probe.endswith("parameters in bfloat16")
    }
    # the order that is not the module's rounds once more or less: a third of all last bits differ
    assert (
        float(shares["llama"]["same bits, weight before"])
        < 0.9
        < float(shares["llama"]["same bits, weight after"])
    )
    assert (
        float(shares["gemma"]["same bits, weight after"])
        < 0.9
        < float(shares["gemma"]["same bits, weight before"])
    )


class InHalf(nn.Module):
    """Statistics in the dtype of the input, whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


def test_statistics_in_half_precision_are_seen() -> None:
    found = identify_module(InHalf(), torch.zeros(3, 7, 48))
    assert found.spec is not None
    assert found.spec.cast == Cast("input")


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(6), nn.InstanceNorm2d(6)], ids=["batch", "instance"])
def test_torch_rounds_statistics_to_the_dtype_of_the_parameters(norm: nn.Module) -> None:
    """On the CPU, in training: mean and denominator pass through bfloat16, all else is float32."""
    found = identify_module(norm, torch.zeros(4, 6, 3, 5))
    assert found.spec is not None
    assert found.spec.cast == Cast()
    told = [e.conclusion for e in found.evidence if " parameters: " in e.conclusion]
    assert told == [
        "bfloat16 parameters: its mean and denominator are rounded, the rest is float32 and rounded once"
    ]
