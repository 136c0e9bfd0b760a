"""Laws of the session: whatever a model does in a run, everything is as before; equal runs give equal results."""

from __future__ import annotations

import contextlib
import signal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from session_gallery import GALLERY, Interrupting, Net, fingerprint, world
from torch import nn

from normscope.doctor.session import MODES, Refused, Session

torch.set_num_threads(1)


def batch(model: nn.Module, *, seed: int = 0) -> torch.Tensor:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(session: Session, x: torch.Tensor, action: str, mode: str) -> None:
    if action == "forward":
        session.forward((x,), mode=mode)
    elif action == "keep graph":
        session.forward((x,), mode=mode, grad=True)
    elif action == "gradient":
        with session.gradient_run((x,), mode=mode) as output:
            leaves = [p for p in session.model.parameters() if p.requires_grad]
            if leaves and output.requires_grad:
                torch.autograd.grad(output.float().square().sum(), leaves, allow_unused=True)
    else:
        session.modes_after(action)


ACTIONS = ("forward", "keep graph", "gradient", "train", "eval")


@pytest.mark.parametrize("name", GALLERY)
@given(
    error=st.sampled_from([None, ValueError, KeyboardInterrupt]),
    steps=st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(MODES)), min_size=1, max_size=3),
    flags=st.lists(st.booleans(), min_size=3, max_size=3),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_everything_is_as_before(name, error, steps, flags):
    torch.manual_seed(0)
    model = GALLERY[name]()
    if error is not None:
        model = Interrupting(model, error)
    for module, flag in zip(model.modules(), flags, strict=False):
        module.training = flag
    x = batch(model)
    before, around = fingerprint(model, x), world()
    with Session(model) as session:
        for action, mode in steps:
            with contextlib.suppress(ValueError, KeyboardInterrupt):
                run(session, x, action, mode)
            assert world() == around
    assert fingerprint(model, x) == before
    assert session.unverified == []
