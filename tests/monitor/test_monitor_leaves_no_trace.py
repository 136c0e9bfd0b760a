"""A monitored training has the bits of an unmonitored one, and a stopped monitor leaves nothing behind."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normscope import Monitor
from normscope.doctor.refusals import Refused
from normscope.errors import BadInput, NormscopeError

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
        self.more = nn.Sequential(
            nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, track_running_stats=True)
        )
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.conv, x, use_reentrant=False)
        return self.head(self.more(x).mean((2, 3)))


def state(model: nn.Module) -> dict[str, object]:
    """All that a module holds, hooks among it, by path."""
    found: dict[str, object] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name != "_modules":
                found[f"{path}:{name}"] = copy.copy(value)
    return found


def train(model: nn.Module, steps: int, *, every: int | None, autocast: bool = False) -> list[torch.Tensor]:
    """The state after some steps, and the random numbers that come next."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = None if every is None else Monitor(model, optimizer, every).start()
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(torch.randn(6, 3, 9, 9)).square().mean()
        loss.backward()
        optimizer.step()
        if step == 2:
            model.eval()
            with torch.no_grad():
                model(torch.randn(6, 3, 9, 9))
            model.train()
    if monitor is not None:
        monitor.stop()
        assert not [note for note in monitor.report().notes if "could not" in note]
    gradients = [p.grad for p in model.parameters()]
    return [*model.state_dict().values(), *gradients, torch.rand(4)]  # type: ignore[list-item]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_the_same_bits_are_trained(every: int, autocast: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    plain = train(copy.deepcopy(model), 6, every=None, autocast=autocast)
    watched = train(model, 6, every=every, autocast=autocast)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@pytest.mark.parametrize("every", [1, 100])
def test_nothing_is_left(every: int) -> None:
    model = Net()
    before = state(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hooks = dict(optimizer._optimizer_step_post_hooks)
    monitor = Monitor(model, optimizer, every).start()
    assert model.conv[1]._forward_pre_hooks
    model(torch.randn(6, 3, 9, 9)).square().mean().backward()
    monitor.stop()
    monitor.stop()  # twice is once
    after = state(model)
    assert before.keys() == after.keys()
    for key, value in before.items():
        if not key.endswith((":_parameters", ":_buffers")):
            assert after[key] == value, key
        else:
            assert all(after[key][name] is tensor for name, tensor in value.items()), key  # type: ignore[index, attr-defined]
    assert dict(optimizer._optimizer_step_post_hooks) == hooks


def test_hooks_of_the_user_stay() -> None:
    model = Net()
    calls: list[str] = []
    handle = model.conv[1].register_forward_hook(lambda *_: calls.append("user"))
    with Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), 1):
        model(torch.randn(6, 3, 9, 9)).square().mean().backward()
    assert calls == ["user", "user"], "in the forward and in its recomputation"
    assert list(model.conv[1]._forward_hooks) == [handle.id]


def test_it_leaves_when_training_dies() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="expected input"), Monitor(model, optimizer, 1) as monitor:
        model(torch.randn(6, 4, 9, 9))
    assert not model.conv[1]._forward_pre_hooks
    assert monitor.findings == ()
    assert monitor.report().ok


def test_a_callback_may_end_the_training() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_var.fill_(-1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def stop(finding: object) -> None:
        raise KeyboardInterrupt(str(finding))

    with Monitor(model, optimizer, on_finding=stop):
        model(torch.randn(4, 3)).square().mean().backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert not model[1]._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_copies_of_a_monitored_model_are_not_monitored() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer) as monitor:
        twin = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        torch.save(model, io.BytesIO())
        for other in (twin, pickled):
            for _ in range(3):
                with torch.no_grad():
                    other(torch.randn(4, 3))
        for _ in range(2):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    assert monitor.report().ok
    assert [f.code for f in monitor.report().findings if f.code == "NS315"] == []
    assert int(twin[1].num_batches_tracked) == 3


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("every", [1, 2])
def test_compiled_models_are_trained_alike(when: str, every: int) -> None:
    """Under torch.compile hooks are skipped: nothing breaks, and updates are known from the counters."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))
    twin = copy.deepcopy(model)
    x = torch.randn(8, 3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if when == "after":
        compiled(x).sum().backward()
        twin(x).sum().backward()
    for each in (model, twin):
        each.zero_grad()
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    with Monitor(compiled, optimizer, every) as monitor:
        for _ in range(6):
            for run, opt in ((compiled, optimizer), (twin, plain)):
                opt.zero_grad()
                run(x).square().mean().backward()
                opt.step()
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # compiled: other order of float32 sums
    assert not [note for note in monitor.report().notes if "could not" in note]
    assert monitor.steps == 6
    assert not [f for f in monitor.findings if f.code in ("NS310", "NS315")]
    torch._dynamo.reset()


def test_updates_of_compiled_code_are_counted() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(compiled, optimizer, 1) as monitor:
        for _ in range(3):
            for _ in range(2):
                compiled(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
    (finding,) = (f for f in monitor.findings if f.code == "NS310")
    assert (finding.severity, finding.evidence["diagnosis"]) == ("info", "counted")
    assert finding.evidence["updates_per_step"] == 2
    torch._dynamo.reset()


class TestSettings:
    def test_it_runs_once_at_a_time(self) -> None:
        monitor = Monitor(nn.BatchNorm1d(3)).start()
        with pytest.raises(NormscopeError) as error:
            monitor.start()
        assert str(error.value) == "this monitor is running already: stop() it first, or make another"
        monitor.stop()
        monitor.start().stop()

    def test_a_report_needs_a_start(self) -> None:
        with pytest.raises(BadInput) as error:
            Monitor(nn.BatchNorm1d(3)).report()
        assert str(error.value) == (
            "nothing was watched yet: start() the monitor, or use it in a with statement"
        )

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"every": 0}, "every must be a whole number from 1 to 2147483648, got 0"),
            ({"optimizer": 3}, "optimizer must be a torch.optim.Optimizer, got 3; pass the object itself"),
            ({"on_finding": 3}, "on_finding must be callable, got int"),
            (
                {"frozen_policy": "all"},
                "frozen_policy is one of '', 'statistics', 'affine', 'both'; got 'all'",
            ),
            ({"select": "NS3"}, "select takes a list of codes, got the string 'NS3'; write ['NS3']"),
        ],
    )
    def test_what_cannot_be_used(self, options: dict[str, object], text: str) -> None:
        with pytest.raises(BadInput) as error:
            Monitor(nn.BatchNorm1d(3), **options)  # type: ignore[arg-type]
        assert str(error.value) == text

    def test_an_optimizer_without_hooks(self) -> None:
        class Other:
            param_groups = [{"params": []}]  # noqa: RUF012

        with pytest.raises(BadInput) as error:
            Monitor(nn.BatchNorm1d(3), Other())  # type: ignore[arg-type]
        assert str(error.value) == (
            "Other has no register_step_post_hook: leave it out and call step() after each of its steps"
        )

    def test_shards_are_refused(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[1].weight.full_tensor = None  # what tells a DTensor
        with pytest.raises(Refused) as error:
            Monitor(model).start()
        assert str(error.value) == (
            "1.weight is sharded (FSDP or tensor parallelism): this rank holds a piece of it. Monitor a run that is "
            "not sharded, or check the model before it is"
        )
        assert not model[1]._forward_pre_hooks

    def test_select_and_ignore(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[1].running_var.fill_(-1.0)
        for options, codes in (({"select": ["NS301"]}, {"NS301"}), ({"ignore": ["NS30"]}, set())):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with Monitor(model, optimizer, **options) as monitor:  # type: ignore[arg-type]
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
            assert {f.code for f in monitor.findings} == codes
