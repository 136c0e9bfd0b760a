"""Laws of the session: whatever a model does in a run, everything is as before."""

from __future__ import annotations

import contextlib
import signal

import numpy as np
import pytest
import session_gallery
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from session_gallery import GALLERY, Interrupting, Net, fingerprint, world
from torch import nn

from normscope.doctor.session import MODES, Session

torch.set_num_threads(1)

ACTIONS = ("forward", "keep graph", "gradient", "train", "eval")
SURROUNDINGS = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def batch(model: nn.Module) -> torch.Tensor:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(dtype)


def shared_state() -> list[object]:
    return [
        session_gallery.CALLS,
        session_gallery.FEATURES,
        session_gallery.SharesState.leave_a_trace.__defaults__,
    ]


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


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("name", GALLERY)
@given(
    error=st.sampled_from([None, ValueError, KeyboardInterrupt]),
    steps=st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(MODES)), min_size=1, max_size=3),
    flags=st.lists(st.booleans(), min_size=3, max_size=3),
    surroundings=st.sampled_from(list(SURROUNDINGS)),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_everything_is_as_before(name, error, steps, flags, surroundings):
    torch.manual_seed(0)
    model = GALLERY[name]()
    if error is not None:
        model = Interrupting(model, error)
    for module, flag in zip(model.modules(), flags, strict=False):
        module.training = flag
    x = batch(model)
    with SURROUNDINGS[surroundings]():
        before, around = fingerprint(model, x, *shared_state()), world()
        with Session(model) as session:
            for action, mode in steps:
                with contextlib.suppress(ValueError, KeyboardInterrupt):
                    run(session, x, action, mode)
                assert world() == around
        assert fingerprint(model, x, *shared_state()) == before
    assert session.unverified == []


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("name", [name for name in GALLERY if name != "OverridesTrain"])
def test_without_a_session_the_same_run_leaves_a_trace(name):
    """The law above is not empty: the fingerprint sees what each model does."""
    torch.manual_seed(0)
    with torch.random.fork_rng():
        model = GALLERY[name]().train()
        x = batch(model)
        before = fingerprint(model, x, *shared_state())
        try:
            model(x)
        finally:
            torch.set_grad_enabled(True)
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            torch.set_float32_matmul_precision("highest")
            torch.set_autocast_dtype("cpu", torch.bfloat16)
        assert fingerprint(model, x, *shared_state()) != before


def test_an_overridden_train_leaves_a_trace_without_a_session():
    model = GALLERY["OverridesTrain"]()
    before = fingerprint(model)
    model.train()
    assert fingerprint(model) != before


@pytest.fixture
def ctrl_c():
    """A shell ignores it in what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_a_run_is_put_back_waits_until_all_is_back(monkeypatch):
    model = GALLERY["WritesParametersInPlace"]()
    x, before = batch(model), fingerprint(model)
    with Session(model) as session:
        restore = session._vault.restore

        def interrupted() -> None:
            signal.raise_signal(signal.SIGINT)
            restore()

        with monkeypatch.context() as patch:
            patch.setattr(session._vault, "restore", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.forward((x,), mode="now")
        assert torch.equal(session.forward((x,)), session.forward((x,)))
    assert fingerprint(model) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_on_entry_brings_the_hooks_back(monkeypatch):
    from normscope.doctor import session as module

    model = GALLERY["hooks_that_add_hooks"]()
    before = fingerprint(model)
    silence = module.HookStash.silence

    def interrupted(stash):
        silence(stash)
        if stash._items:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.HookStash, "silence", interrupted)
    with pytest.raises(KeyboardInterrupt), Session(model):
        pass
    assert fingerprint(model) == before


def test_the_error_state_of_numpy_is_put_back_after_what_runs_beside_the_model():
    before = np.geterr()
    with Session(nn.Linear(2, 2)):
        np.seterr(
            all="raise" if before["over"] != "raise" else "ignore"
        )  # as an interrupted np.errstate leaves it
    assert np.geterr() == before


def test_a_graph_of_the_users_survives_a_session_that_wrote_what_it_saved():
    """The version counter is wound back with the bytes: backward after the check works, with the right values."""
    model = GALLERY["WritesParametersInPlace"]().eval()
    x = batch(model).requires_grad_()
    hidden = model.linear(x)
    with Session(model) as session:
        session.forward((x,), mode="train")
    (gradient,) = torch.autograd.grad(hidden.sum(), x)
    torch.testing.assert_close(gradient, model.linear.weight.detach().sum(0).expand(4, 6))


def test_a_resized_buffer_gets_its_size_and_bytes_back():
    class Grows(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.arange(6.0))

        def leave_a_trace(self, x: torch.Tensor) -> None:
            self.b.resize_(4000).fill_(3)

    model = Grows()
    with Session(model) as session:
        session.forward((batch(model),))
        assert model.b.tolist() == [0, 1, 2, 3, 4, 5]
        session.forward((batch(model),))
    assert model.b.tolist() == [0, 1, 2, 3, 4, 5]
    assert model.b.untyped_storage().nbytes() == 24


def test_what_cannot_be_put_back_is_named_and_the_rest_is_put_back():
    class Stubborn(Net):
        """Updates a view in place from a parameter: autograd cannot take a view out of the graph again."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(2, 6))
            self.row = self.table[0]

        def leave_a_trace(self, x: torch.Tensor) -> None:
            self.row.mul_(self.norm.weight)

    model = Stubborn()
    flags = [module.training for module in model.modules()]
    with Session(model) as session:
        session.forward((batch(model),), mode="train", grad=True)
    (note,) = session.unverified
    assert note.startswith("something could not be put back: RuntimeError: Can't detach views in-place")
    assert int(model.norm.num_batches_tracked) == 0
    assert [module.training for module in model.modules()] == flags
