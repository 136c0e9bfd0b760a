"""The conventions of RMS norm against transformers' own modules, in every mix of dtypes."""

from __future__ import annotations

import pytest
import torch

import normscope.nn as own
from normscope.spec import families

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def theirs(convention):
    if convention == "llama":
        module = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm
    elif convention == "t5":
        module = pytest.importorskip("transformers.models.t5.modeling_t5").T5LayerNorm
    else:
        module = pytest.importorskip("transformers.models.gemma.modeling_gemma").GemmaRMSNorm
    return module


@pytest.mark.parametrize("convention", ["llama", "t5", "gemma"])
@pytest.mark.parametrize("weight", DTYPES, ids=str)
@pytest.mark.parametrize("input", DTYPES, ids=str)
def test_as_transformers(convention, weight, input):
    torch.manual_seed(0)
    theirs_ = theirs(convention)(64)
    ours = own.RMSNorm(64, convention=convention)
    assert torch.equal(ours.weight, theirs_.weight)  # both start from the identity
    with torch.no_grad():
        theirs_.weight.add_(torch.randn(64))
    ours.load_state_dict(theirs_.state_dict())
    x = (3 * torch.randn(32, 64)).to(input)
    ours, theirs_ = ours.to(weight), theirs_.to(weight)
    y, wanted = ours(x), theirs_(x)
    assert y.dtype == wanted.dtype
    # float32 sums in another order move a value across a rounding boundary now and then: one step of the output, or,
    # where x / rms was rounded before the weight, one step of that
    step = (
        torch.finfo(y.dtype).eps
        if input == weight == torch.float32
        else max(torch.finfo(dtype).eps for dtype in (input, weight))
    )
    assert ((y.float() - wanted.float()).abs() <= 2 * step * wanted.float().abs() + 1e-6).all()
    assert (y == wanted).float().mean() > 0.9 or y.dtype == torch.float32


@pytest.mark.parametrize(
    ("convention", "spec"),
    [
        ("torch", families.rms_norm()),
        ("llama", families.llama_rms_norm()),
        ("t5", families.t5_layer_norm()),
        ("gemma", families.gemma_rms_norm()),
    ],
)
def test_specifications_are_the_named_families(convention, spec):
    assert own.RMSNorm(8, convention=convention).spec == spec


def test_llama_rounds_before_the_weight_and_gemma_after():
    """x / rms = 1 + 2^-8 rounds to 1 in bfloat16; times 3 it would not have been 3."""
    x = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16).repeat(8)
    weight = torch.full((16,), 3.0, dtype=torch.bfloat16)
    llama = own.RMSNorm(16, convention="llama", dtype=torch.bfloat16)
    gemma = own.RMSNorm(16, convention="gemma", dtype=torch.bfloat16)
    with torch.no_grad():
        llama.weight.copy_(weight)
        gemma.weight.copy_(weight - 1)
    unit = x.double() / x.double().square().mean().sqrt()
    assert torch.equal(llama(x), (weight * unit.bfloat16()))
    assert torch.equal(gemma(x), (3 * unit).bfloat16())
    assert not torch.equal(llama(x), gemma(x))


@pytest.mark.parametrize("convention", ["torch", "llama", "t5", "gemma"])
def test_mixed_dtypes_have_gradients(convention):
    norm = own.RMSNorm(8, convention=convention)
    x = torch.randn(4, 8).bfloat16().requires_grad_()
    norm(x).float().sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert norm.weight.grad.dtype == torch.float32
