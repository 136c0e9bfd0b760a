"""Bytes kept for backward, on functions whose savings are known."""

import pytest
import torch
from torch.nn import functional as F

from normscope.bench.memory import saved_bytes

N = 128
BYTES = 4 * N


def leaf(n=N):
    return torch.linspace(0.1, 1, n).requires_grad_()


def test_product_keeps_both_factors():
    a, b = leaf(), leaf()
    assert saved_bytes(lambda: a * b) == 2 * BYTES


def test_a_storage_counts_once_and_whole():
    a = leaf()
    assert saved_bytes(lambda: a * a) == BYTES
    whole = leaf(2 * N)
    assert saved_bytes(lambda: whole[:N] * whole[N:]) == 2 * BYTES


def test_a_sum_keeps_nothing():
    a, b = leaf(), leaf()
    assert saved_bytes(lambda: a + b) == 0


def test_what_is_alive_anyway_is_not_counted():
    a, b = leaf(), leaf()
    assert saved_bytes(lambda: a * b, alive=[b]) == BYTES


def test_grad_mode_of_the_caller_does_not_matter():
    a = leaf()
    with torch.no_grad():
        assert saved_bytes(a.exp) == BYTES


def test_layer_norm_keeps_input_and_two_numbers_a_set():
    x, weight, bias = torch.randn(8, N, requires_grad=True), leaf(), leaf()
    assert (
        saved_bytes(lambda: F.layer_norm(x, (N,), weight, bias), alive=[weight, bias])
        == 8 * BYTES + 8 * 2 * 4
    )


@pytest.mark.parametrize("steps", [1, 3])
def test_every_step_of_a_chain_counts(steps):
    x = leaf()

    def chain():
        y = x
        for _ in range(steps):
            y = y.exp()  # keeps its own result
        return y

    assert saved_bytes(chain) == steps * BYTES
