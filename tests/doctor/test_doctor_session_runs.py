"""What a session's runs compute: modes, seeds, outputs, gradients; and what it refuses."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from session_gallery import fingerprint
from torch import nn
from torch.utils.checkpoint import checkpoint

from normscope.doctor.session import Refused, Session

torch.set_num_threads(1)


def whole(message: str) -> str:
    return f"^{re.escape(message)}$"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.InstanceNorm1d(6))


@contextmanager
def flags_of(*modules: nn.Module, into: list[bool]):
    """Notes the flags as they are at the first forward."""
    handle = modules[0].register_forward_pre_hook(lambda *_: into.extend(m.training for m in modules))
    yield
    handle.remove()


# -- modes ---------------------------------------------------------------------------------------------------


class KeepsNormFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.live, self.frozen = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.5)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        return self.dropout(self.frozen(self.live(x)))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("now", [True, True, False]),
        ("eval", [False, False, False]),
        ("batch", [True, False, False]),
        ("train", [True, False, True]),
    ],
)
def test_modes_follow_the_models_own_train(mode, expected):
    model = KeepsNormFrozen()
    model.live.training, model.frozen.training, model.dropout.training = True, True, False
    seen: list[bool] = []
    with Session(model) as session:
        watch = flags_of(model.live, model.frozen, model.dropout, into=seen)
        session.forward((torch.randn(4, 6),), mode=mode, watch=[watch])
    assert seen == expected


def test_batch_mode_is_batch_norm_in_training_with_dropout_off():
    model = net()
    x = torch.randn(4, 6)
    with Session(model) as session:
        output = session.forward((x,), mode="batch")
    hidden = model[0](x)
    expected = model[3]((hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-5).sqrt())
    torch.testing.assert_close(
        output, expected.detach(), rtol=1e-5, atol=1e-5
    )  # a few float32 ulp of sums over 4


def test_batch_mode_turns_functional_dropout_off_where_the_module_owns_running_statistics():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.full((6,), 3.0))
            self.register_buffer("running_var", torch.ones(6))

        def forward(self, x):
            x = F.batch_norm(x, self.running_mean, self.running_var, training=self.training)
            return F.dropout(input=x, p=0.9, training=self.training)

    model, x = Functional(), torch.randn(64, 6)
    with Session(model) as session:
        batch, evaluated = (session.forward((x,), mode=mode) for mode in ("batch", "eval"))
    assert batch.mean(0).abs().max() < 1e-6
    assert (batch != 0).all()
    torch.testing.assert_close(evaluated, (x - 3) / (1 + 1e-5) ** 0.5)


def test_a_model_whose_train_raises_has_its_flags_set_one_by_one():
    class Exported(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def train(self, mode: bool = True):
            raise NotImplementedError("no train() in an exported program")

        def forward(self, x):
            return self.norm(x)

    model, seen = Exported(), []
    with Session(model) as session:
        session.forward((torch.randn(4, 6),), mode="eval", watch=[flags_of(model.norm, into=seen)])
        with pytest.raises(NotImplementedError):
            session.modes_after("train")
    assert seen == [False]
    assert session.notes == ["model.eval() raised NotImplementedError: flags were set one by one"]
    assert session.unverified == []


def test_modes_after_several_calls():
    model = KeepsNormFrozen()
    with Session(model) as session:
        assert session.modes_after("train") == {"": True, "live": True, "frozen": False, "dropout": True}
        assert session.modes_after("train", "eval") == dict.fromkeys(["", "live", "frozen", "dropout"], False)


# -- outputs -------------------------------------------------------------------------------------------------


def test_equal_runs_give_equal_results_and_the_seed_decides():
    model, x = net(), torch.randn(4, 6)
    with Session(model, seed=1) as first, Session(model, seed=2) as second:
        outputs = [session.forward((x,), mode="train") for session in (first, first, second)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    state: dict[str, torch.Tensor]


def test_an_output_that_is_the_input_a_buffer_or_a_list_of_the_model_outlives_the_restoration():
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(6))
            self.kept: list[torch.Tensor] = []

        def forward(self, x):
            self.seen.add_(1)
            self.kept.append(x.relu_())
            return Output(x[:2], {"seen": self.seen}), self.kept, (self.seen.view(2, 3), None)

    model, x = Returns(), -torch.ones(4, 6)
    with Session(model) as session:
        output, kept, (view, nothing) = session.forward((x,))
    assert (output.logits == 0).all()
    assert (output.state["seen"] == 1).all()
    assert [(k == 0).all() for k in kept] == [True]
    assert (view == 1).all()
    assert nothing is None
    assert (x == -1).all()
    assert model.kept == []
    assert (model.seen == 0).all()


def test_watches_are_entered_around_the_forward_in_order_and_left_when_it_raises():
    events: list[str] = []

    @contextmanager
    def watch(name: str):
        events.append(f"enter {name}")
        try:
            yield
        finally:
            events.append(f"leave {name}")

    model = nn.Linear(6, 6)
    with Session(model) as session, pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        session.forward((torch.randn(4, 5),), watch=[watch("a"), watch("b")])
    assert events == ["enter a", "enter b", "leave b", "leave a"]


# -- gradients -----------------------------------------------------------------------------------------------


def gradients(output: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(output.square().sum(), list(model.parameters())))


def test_gradients_are_those_of_plain_training_and_no_hook_fires():
    model, x = net(), torch.randn(4, 6)
    fired: list[str] = []
    model[0].weight.register_hook(lambda g: fired.append("hook"))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    with Session(model) as session:
        with session.gradient_run((x,), mode="batch") as output:
            found = gradients(output, model)
        kept = gradients(session.forward((x,), mode="batch", grad=True), model)
    assert fired == []
    assert all(p.grad is None for p in model.parameters())
    model[2].eval()
    expected = gradients(model(x), model)
    assert fired == ["hook"]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected, found, kept, strict=True))


def test_gradients_through_what_the_model_writes_in_place():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x):
            self.scale.add_(1)
            return x * self.weight * self.scale

    model, x = Writes(), torch.ones(4, 6)
    with Session(model) as session:
        with session.gradient_run((x,)) as output:
            (gradient,) = torch.autograd.grad(output.sum(), [model.weight])
        late = session.forward((x,), grad=True)
        session.forward((x,), grad=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(late.sum(), [model.weight])
    assert gradient.tolist() == [8.0] * 6  # 4 rows, times the scale of 2 that the forward made


def test_recomputation_in_backward_leaves_the_statistics_alone():
    model = net()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    outer, x = Checkpointed(), torch.randn(4, 6)
    before = fingerprint(outer)
    with Session(outer) as session, session.gradient_run((x,), mode="train") as output:
        gradients(output, outer)
        assert int(model[1].num_batches_tracked) == 2
    assert fingerprint(outer) == before


def test_inputs_made_in_inference_mode_can_be_differentiated_and_written():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))
    with torch.inference_mode():
        x = torch.randn(4, 6)
        with Session(model) as session, session.gradient_run((x,)) as output:
            gradients(output, model)
        assert x.min() < 0


# -- wrappers ------------------------------------------------------------------------------------------------


def test_compiled_modules_run_eagerly_under_the_users_paths():
    model, x = net(), torch.randn(4, 6)
    expected = model.eval()(x).detach()
    inner = nn.Sequential(torch.compile(model[0], fullgraph=True, backend="eager"), *model[1:])
    with Session(torch.compile(inner, fullgraph=True, backend="eager")) as session:
        assert session.model is inner
        assert list(session.modules) == ["", "0", "1", "2", "3"]
        assert torch.equal(session.forward((x,), mode="eval"), expected)


def test_data_parallel_is_taken_off():
    model = net()
    with Session(nn.DataParallel(model)) as session:
        assert session.model is model


DISTRIBUTED = """
import os, sys, torch
from torch import nn
from normscope.doctor.session import Session

store = torch.distributed.FileStore(sys.argv[1], 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), torch.randn(4, 6)
wrapped = nn.parallel.DistributedDataParallel(model)
before = {name: value.clone() for name, value in model.state_dict().items()}
with Session(wrapped) as session, session.gradient_run((x,), mode="train") as output:
    assert session.model is model
    torch.autograd.grad(output.square().sum(), list(model.parameters()))
assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
assert all(p.grad is None for p in model.parameters())
wrapped(x).square().sum().backward()  # the reducer still works
assert model[0].weight.grad is not None
print("as before", flush=True)
os._exit(0)  # PyTorch may wait for ever when it takes a gloo process group down with work in flight
"""


def test_distributed_data_parallel_is_taken_off(tmp_path):
    command = [sys.executable, "-c", DISTRIBUTED, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "as before\n", done.stderr


@pytest.mark.parametrize("how", ["script", "trace", "freeze"])
def test_scripted_modules_run(how):
    model, x = net().eval(), torch.randn(4, 6)
    made = torch.jit.trace(model, x) if how == "trace" else torch.jit.script(model)
    made = torch.jit.freeze(made) if how == "freeze" else made
    with Session(made) as session:
        torch.testing.assert_close(session.forward((x,), mode="eval"), model(x))


class FullyShardedDataParallel(nn.Module):
    """Stands for torch's FSDP, which is known by its name and needs a process group to be made."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module

    @property
    def module(self) -> nn.Module:
        return self._fsdp_wrapped_module


def test_fsdp_on_one_rank_is_taken_off_and_refused_on_several(monkeypatch):
    model = net()
    with Session(FullyShardedDataParallel(model)) as session:
        assert session.model is model
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    message = (
        "the model is sharded by FSDP over several ranks: its own modules hold pieces of their parameters. Check the "
        "model before wrapping it, or load its full state dict into a plain copy"
    )
    with pytest.raises(Refused, match=whole(message)):
        Session(FullyShardedDataParallel(model))


# -- refusals ------------------------------------------------------------------------------------------------


def test_lazy_modules_are_refused():
    message = (
        "1.weight is lazy: it gets its shape in the first forward pass, which also changes the module's class. "
        "Run the model once on a batch, then check it"
    )
    with pytest.raises(Refused, match=whole(message)) as caught:
        Session(nn.Sequential(nn.ReLU(), nn.LazyBatchNorm1d()))
    assert caught.value.reason == message


def test_meta_modules_are_refused():
    message = (
        "0.weight is on the meta device: it has a shape but no values. Load the weights "
        "(model.to_empty(device=...), then load_state_dict), then check the model"
    )
    with pytest.raises(Refused, match=whole(message)):
        Session(nn.Sequential(nn.BatchNorm1d(3, device="meta")))


def test_training_runs_of_inference_tensors_are_refused_and_eval_runs():
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    before, x = fingerprint(model), torch.randn(4, 6)
    tail = "Build or load the model outside torch.inference_mode(), or check it in eval mode"
    with Session(model) as session:
        assert session.forward((x,), mode="eval").shape == (4, 6)
        update = (
            f"1.running_mean is an inference tensor, which torch does not let a training run update. {tail}"
        )
        with pytest.raises(Refused, match=whole(update)):
            session.forward((x,), mode="batch")
        differ = (
            f"0.weight is an inference tensor, which torch does not let a training run differentiate. {tail}"
        )
        with pytest.raises(Refused, match=whole(differ)):
            session.forward((x,), mode="eval", grad=True)
    assert fingerprint(model) == before


def test_an_unknown_mode_and_a_closed_session_are_errors():
    session = Session(net())
    with (
        session,
        pytest.raises(ValueError, match=whole("mode is one of now, eval, batch, train, got 'training'")),
    ):
        session.forward((torch.randn(4, 6),), mode="training")
    closed = "a session runs inside `with Session(model) as session:`, and this one is not open"
    with pytest.raises(RuntimeError, match=whole(closed)):
        session.forward((torch.randn(4, 6),))


def test_precision_set_by_backend_is_no_obstacle():
    """torch then refuses to say the matrix multiplication precision in its older words."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "bf16"
        with Session(net()) as session:
            session.forward((torch.randn(4, 6),), mode="eval")
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before
