"""Trained models, accelerated: the same outputs, keys and gradients, or better ones than before against float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import real_models
import torch
from torch import Tensor, nn

import normscope.nn as own
from normscope.transforms import TransformReport, accelerate

pytestmark = pytest.mark.real


def accelerated(model: nn.Module, sample: Any, count: int) -> tuple[nn.Module, TransformReport]:
    faster, report = accelerate(model, sample)
    assert len(report.done) == count
    assert report.left == ()
    assert [one.mode for one in report.agreements] == ["eval", "train"]
    for one in report.agreements:
        assert one.error_before is not None
        assert one.error_after is not None
        assert one.error_after <= max(1e-5, one.error_before)
    one, other = model.state_dict(), faster.state_dict()
    assert list(one) == list(other)
    assert all(torch.equal(one[key], other[key]) for key in one)
    return faster, report


def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], pick: Any) -> list[Tensor]:
    """Gradients of one training step, norms by the batch, dropout off; the step is taken."""
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    out = pick(model(*args, **kwargs))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype)
    (out * weights).mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    before = [p.detach().clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    after = [p for p in model.parameters() if p.grad is not None]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(bool(p.isfinite().all()) for p in after)
    return gradients


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """Of all gradients taken as one vector, relative."""
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(one, other, strict=True))
    size = sum(float(b.double().square().sum()) for b in other)
    return float((off / size) ** 0.5)


def same_step(
    model: nn.Module, faster: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], pick: Any
) -> None:
    exact = copy.deepcopy(model).double()
    wide = [a.double() if a.is_floating_point() else a for a in args]
    truth = step(exact, tuple(wide), kwargs, pick)
    before = distance(step(model, args, kwargs, pick), truth)
    after = distance(step(faster, args, kwargs, pick), truth)
    assert after <= max(1e-5, 1.5 * before), (before, after)


def test_minilm() -> None:
    model, batch = real_models.minilm()
    faster, _ = accelerated(model, batch, 13)
    assert sum(isinstance(m, own.LayerNorm) for m in faster.modules()) == 13
    same_step(model, faster, (), batch, lambda out: out.last_hidden_state)


def test_efficientnet() -> None:
    model, x = real_models.efficientnet(), (real_models.photographs() - 127) / 128
    faster, _ = accelerated(model, x, 49)
    assert sum(isinstance(m, own.BatchNorm2d) for m in faster.modules()) == 49
    same_step(model, faster, (x[:4],), {}, lambda out: out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_llama(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, vocab_size=1000
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    batch = {"input_ids": torch.randint(0, 1000, (2, 64))}
    if dtype == torch.float32:
        faster, _ = accelerated(model, batch, 9)
        same_step(model, faster, (), batch, lambda out: out.logits)
        return
    faster, report = accelerate(model, batch)
    for one in report.agreements:
        assert one.error_before is not None
        assert one.error_after is not None
        assert one.error_after <= 1.5 * one.error_before
    same_step(model, faster, (), batch, lambda out: out.logits)
