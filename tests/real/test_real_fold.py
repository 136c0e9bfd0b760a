"""Trained models, folded: every pair of a photograph classifier, and none of a pitch tracker that normalizes last."""

from __future__ import annotations

import pytest
import real_models
import torch
from torch import nn

from normscope.transforms import fold

pytestmark = pytest.mark.real


def test_efficientnet_folds_whole() -> None:
    model, x = real_models.efficientnet(), (real_models.photographs() - 127) / 128
    dead = [int((m.running_var == 0).sum()) for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    folded, report = fold(model, x[:2])
    assert len(report.done) == len(dead) == 49
    assert report.left == ()
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
    with torch.no_grad():
        before, after = model(x), folded(x)
    assert float((before - after).abs().max()) < 2e-5
    assert torch.equal(before.argmax(1), after.argmax(1))
    assert [one.zero_variance for one in report.folds] == dead
    assert sum(dead) == 130
    worst = max(report.folds, key=lambda one: one.growth)
    assert 110 < worst.growth < 125
    assert worst.zero_variance
    assert "130 channels of stored variance 0 take the largest scale that eps allows" in str(report)
    exact = next(one for one in report.agreements if one.dtype == "float64")
    assert exact.difference < 1e-13


def test_crepe_is_left() -> None:
    _, report = fold(real_models.crepe(), real_models.tones())
    assert report.done == ()
    assert [one.reason for one in report.left] == [
        f"not backwards: relu stands between conv{i} (conv2d) and it; not forwards: the model (max_pool2d) reads its "
        "output, which is no linear layer or convolution"
        for i in range(1, 7)
    ]


def test_a_sentence_encoder_keeps_its_norms_on_the_residual_stream() -> None:
    """Every output of a post-norm block is read by the next sum too."""
    model, batch = real_models.minilm()
    _, report = fold(model, batch)
    assert report.done == ()
    assert len(report.left) == 13
    assert all("reads its output" in one.reason or "returns" in one.reason for one in report.left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_llama(dtype: torch.dtype) -> None:
    """Gains go into query, key and value, into gate and up, and into the head: what rotations of the stream need."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    )
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    folded, report = fold(model, {"input_ids": torch.randint(0, 100, (2, 16))})
    assert len(report.done) == 5, report
    assert report.removed_keys == ()
    assert [one.into for one in report.folds][-1] == ("lm_head",)
    assert all(bool((p == 1).all()) for n, p in folded.named_parameters() if "norm" in n)
