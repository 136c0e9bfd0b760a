"""normalize(mask=): every way a mask can take is the composite path's function, with its derivatives of any order."""

from __future__ import annotations

import pytest
import torch

import normscope as ns
from normscope.functional import masked, stretches
from normscope.kernels import composite, library

needs_native = pytest.mark.skipif(library.LIBRARY is None, reason="no native library")
torch.manual_seed(0)
LENGTHS = torch.tensor([20, 9, 13])
SEQUENCES = (torch.arange(20) < LENGTHS[:, None])[:, None]
MASKS = {
    "stretches": SEQUENCES,
    "two stretches a row": SEQUENCES & ~(torch.arange(20) == 8),
    "elements": torch.rand(3, 1, 20) < 0.5,
    "samples": torch.tensor([True, False, True]).view(3, 1, 1),
    "positions": (torch.arange(20) % 3 > 0).view(1, 1, 20),
    "channels too": torch.rand(3, 4, 20) < 0.5,
}
NATIVE = {"stretches", "two stretches a row", "elements", "samples", "positions"}


@pytest.mark.parametrize("name", MASKS)
def test_batch_norm_is_the_composite_paths(name):
    x = (torch.randn(3, 4, 20, dtype=torch.float64) + 3).masked_fill(~MASKS[name], torch.nan)
    weight, bias = (torch.randn(4, dtype=torch.float64) for _ in range(2))
    results = []
    for normalize in (ns.normalize, composite.normalize):
        given = [t.clone().requires_grad_() for t in (x, weight, bias)]
        state = ns.RunningState(torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
        y = normalize(given[0], ns.families.batch_norm(), *given[1:], running=state, mask=MASKS[name])
        y.sin().sum().backward()
        results.append([y.detach(), *(t.grad for t in given), state.mean, state.var])
        assert y.is_contiguous()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@needs_native
@pytest.mark.parametrize("name", sorted(NATIVE))
def test_masks_of_positions_need_no_composite_path(name, monkeypatch):
    monkeypatch.setattr(composite, "normalize", None)
    x = torch.randn(3, 4, 20, requires_grad=True)
    ns.normalize(x, ns.families.batch_norm(), mask=MASKS[name]).sum().backward()


def test_derivatives_of_first_and_second_order():
    x, mask = (
        torch.randn(2, 3, 12, dtype=torch.float64),
        (torch.arange(12) < torch.tensor([12, 9])[:, None])[:, None],
    )
    assert stretches.stretches(mask.flatten(1)) == ((0, 0, 12), (1, 0, 9))

    def norm(x, weight):
        return ns.normalize(x, ns.families.batch_norm(), weight, mask=mask)

    given = x.requires_grad_(), torch.rand(3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(norm, given)
    assert torch.autograd.gradgradcheck(norm, given)
    y, moved = torch.func.jvp(norm, given, tuple(torch.ones_like(t) for t in given))
    assert (y[1, :, 9:] == 0).all()
    assert (moved[1, :, 9:] == 0).all()
    torch.testing.assert_close(torch.func.vmap(norm, (0, None))(x.detach()[None], given[1])[0], norm(*given))


def test_memory_format_stays():
    x = torch.randn(3, 4, 5, 20).to(memory_format=torch.channels_last)
    y = ns.normalize(x, ns.families.batch_norm(), mask=SEQUENCES[:, :, None])
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        y, composite.normalize(x, ns.families.batch_norm(), mask=SEQUENCES[:, :, None])
    )


def test_without_eps_zeros_are_not_divided_by_zeros():
    """Whole sets that do not count must not go in as zeros there: 0 / 0 would reach the weight's gradient."""
    x, weight = torch.randn(3, 4), torch.ones(4, requires_grad=True)
    mask = torch.tensor([[True], [False], [True]])
    ns.normalize(x, ns.families.layer_norm(eps=0.0), weight, mask=mask).sin().sum().backward()
    assert weight.grad.isfinite().all()
    assert masked.masked(x, ns.families.layer_norm(eps=0.0), weight, None, None, True, mask) is None
