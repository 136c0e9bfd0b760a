"""Where results lie: as PyTorch's functions lay them where code relies on it, and never over what is still read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import normscope as ns
from normscope.errors import BadInput

SHARED = (
    "out overlaps in memory with what is read, so that values would be overwritten before their use. Pass the input "
    "itself, or a tensor of its own: torch.empty_like(input)"
)


def layouts() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "contiguous": torch.randn(2, 5, 8),
        "transposed": torch.randn(2, 8, 5).transpose(1, 2),
        "turned": torch.randn(8, 5, 2).permute(2, 1, 0),
        "sliced": torch.randn(2, 5, 16)[..., :8],
        "every other": torch.randn(2, 5, 16)[..., ::2],
        "expanded": torch.randn(1, 5, 8).expand(2, 5, 8),
    }


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms_over_the_last_axes_lay_their_result_as_torch_does(name: str, grad: bool, layout: str) -> None:
    x = layouts()[layout].requires_grad_(grad)
    for _ in range(2):  # the second call takes the short way
        y = getattr(ns.functional, name)(x, (8,), torch.ones(8))
        assert y.stride() == getattr(F, name)(x, (8,), torch.ones(8)).stride()
        assert y.view(-1, 8).shape == (10, 8)
    torch.testing.assert_close(y, getattr(F, name)(x, (8,), torch.ones(8)))


@pytest.mark.parametrize("name", ["batch_norm", "group_norm"])
def test_norms_of_images_keep_channels_last_as_torch_does(name: str) -> None:
    x = torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    args = (None, None, None, None, True) if name == "batch_norm" else (2,)
    assert (
        getattr(ns.functional, name)(x, *args).stride() == getattr(F, name)(x, *args).stride() == x.stride()
    )


def test_out_may_be_the_input_or_apart() -> None:
    x = torch.randn(10, 64)
    want = F.rms_norm(x, (64,), eps=1e-6)
    apart = torch.empty(20, 64)[::2]
    assert torch.allclose(ns.functional.rms_norm(x, (64,), eps=1e-6, out=apart), want, atol=1e-6)
    assert torch.allclose(ns.functional.rms_norm(x, (64,), eps=1e-6, out=x), want, atol=1e-6)


def test_out_over_a_part_of_the_input_is_refused() -> None:
    big = torch.randn(11, 64)
    before = big.clone()
    with pytest.raises(BadInput) as error:
        ns.functional.rms_norm(big[:10], (64,), eps=1e-6, out=big[1:])
    assert str(error.value) == SHARED
    x = torch.randn(4, 4)
    with pytest.raises(BadInput, match="out overlaps in memory"):
        ns.functional.layer_norm(x, (4,), out=x.t())
    weight = torch.ones(64)
    with pytest.raises(BadInput, match="out overlaps in memory"):
        ns.functional.rms_norm(torch.randn(1, 64), (64,), weight, out=weight[None])
    assert torch.equal(big, before)


def test_out_that_repeats_itself_is_refused() -> None:
    with pytest.raises(BadInput) as error:
        ns.functional.rms_norm(torch.randn(2, 64), (64,), out=torch.empty(1, 64).expand(2, 64))
    assert str(error.value) == (
        "each element of out has a place of its own in memory; got strides (0, 1) for the shape (2, 64). Allocate it "
        "with torch.empty_like(input)"
    )
    with pytest.raises(BadInput, match="a place of its own"):
        ns.functional.rms_norm(
            torch.randn(64, 32), (32,), out=torch.zeros(3000).as_strided((64, 32), (16, 1))
        )


def test_a_pattern_is_no_specification() -> None:
    with pytest.raises(BadInput) as error:
        ns.normalize(torch.randn(2, 3), "b c -> b")  # type: ignore[arg-type]
    assert str(error.value) == (
        "normalize takes a NormSpec, which says which axes and every convention; got 'b c -> b'. For a pattern alone "
        'write NormSpec("b c ... -> c")'
    )


@pytest.mark.parametrize("grad", [False, True])
def test_batch_norm_by_stored_statistics_looks_closer_where_a_call_is_irregular(grad: bool) -> None:
    x, mean, var = torch.randn(6, 3).requires_grad_(grad), torch.randn(3), torch.rand(3) + 0.5
    for _ in range(2):
        torch.testing.assert_close(ns.functional.batch_norm(x, mean, var), F.batch_norm(x, mean, var))
    for wrong in (torch.ones(4), torch.ones(2)):
        for args in ((wrong, wrong), (mean, var, wrong)):
            with pytest.raises(Exception) as theirs:
                F.batch_norm(x, *args)
            with pytest.raises(Exception) as ours:
                ns.functional.batch_norm(x, *args)
            assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_a_float32_bias_alone_is_not_rounded_through_a_half_type(dtype: torch.dtype) -> None:
    bias = torch.zeros(8, requires_grad=True)
    y = ns.functional.group_norm(torch.randn(64, 8, 64, 64).to(dtype), 2, None, bias)
    (grad,) = torch.autograd.grad(y, bias, torch.ones_like(y))
    assert grad.dtype == torch.float32
    assert torch.equal(grad, torch.full((8,), 64.0 * 64 * 64))


def test_groups_of_one_element_are_the_bias() -> None:
    x = torch.full((48, 3), 1e6) + torch.randn(48, 3)
    assert not ns.functional.group_norm(x, 3).any()
    assert not ns.functional.group_norm(x[..., None, None], 3).any()


def test_statistics_may_move_between_evaluation_and_its_backward() -> None:
    norm, q = ns.nn.BatchNorm2d(3).eval(), torch.randn(2, 3, 4, 4, requires_grad=True)
    y = norm(q)
    norm.train()(q)
    y.sum().backward()
    torch.testing.assert_close(q.grad, torch.full_like(q, (1 + 1e-5) ** -0.5))
