"""What the tests of the composite path share: a problem in NumPy and in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from normscope import reference
from normscope.kernels import composite
from normscope.spec import NormSpec, RunningState

Array = np.ndarray[Any, Any]


def tensor(a: Any) -> Tensor | None:
    return None if a is None else torch.tensor(np.asarray(a))


def state_of(spec: NormSpec, shape: tuple[int, ...], rng: np.random.Generator) -> RunningState | None:
    """A stored state of NumPy arrays that fits, or None where the spec has none."""
    stored = spec.bind(shape).running_shape
    if stored is None:
        return None
    mean = rng.normal(0.3, 1, stored)
    if not spec.whiten:
        return RunningState(mean, rng.uniform(0.5, 2, stored))
    # the mean lives on (g c) as one axis, or on both
    *groups, k = stored if len(stored) > 1 else (stored[0] // spec.sizes["c"], spec.sizes["c"])
    factor = rng.normal(size=(*groups, k, k))
    return RunningState(mean, factor @ np.swapaxes(factor, -1, -2) / k + np.eye(k))


def copied(state: RunningState | None) -> RunningState | None:
    """The state as torch tensors of its own."""
    return None if state is None else RunningState(tensor(state.mean), tensor(state.var), state.batches)


def agree(
    spec: NormSpec,
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    running: RunningState | None = None,
    training: bool = True,
    mask: Array | None = None,
    *,
    tolerance: float,
    seed: int = 0,
) -> None:
    """Forward, all gradients and the state after it equal the reference's, to ``tolerance`` of the largest number."""
    rng = np.random.default_rng(seed)
    grad = rng.normal(size=x.shape)
    keywords = {"running": running, "training": training, "mask": mask}
    tx, tw, tb = (None if a is None else torch.tensor(a, requires_grad=True) for a in (x, weight, bias))
    assert tx is not None
    state = copied(running)
    y = composite.normalize(tx, spec, tw, tb, running=state, training=training, mask=tensor(mask))
    close(y.detach(), reference.forward(x, spec, weight, bias, **keywords), tolerance)
    wanted = [t for t in (tx, tw, tb) if t is not None]
    found = torch.autograd.grad(y, wanted, torch.tensor(grad), allow_unused=True)
    expected = [g for g in reference.vjp(grad, x, spec, weight, bias, **keywords) if g is not None]
    for have, want in zip(found, expected, strict=True):
        close(torch.zeros(want.shape) if have is None else have, want, tolerance)
    if running is not None and state is not None:
        after = reference.update_running(running, x, spec, mask) if training else running
        close(state.mean, after.mean, tolerance)
        close(state.var, after.var, tolerance)
        assert state.batches == after.batches


def close(found: Tensor, expected: Any, tolerance: float) -> None:
    expected = np.asarray(expected)
    assert tuple(found.shape) == expected.shape
    finite = expected[np.isfinite(expected)]
    scale = float(np.abs(finite).max(initial=1.0))
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0, atol=tolerance * scale)
