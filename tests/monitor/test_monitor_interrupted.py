"""Interrupted, out of disk, in adversarial training: the training goes on, and nothing is left behind."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from normscope import Monitor
from normscope.errors import BadInput
from normscope.monitor.look import Look

torch.set_num_threads(1)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.LayerNorm(8))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(32, 8)).square().mean().backward()
    optimizer.step()


def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    found = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    return found + len(optimizer._optimizer_step_post_hooks)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_start_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = sgd(model)
    monkeypatch.setattr(Monitor, "_begin_look", interrupt)
    with pytest.raises(KeyboardInterrupt), Monitor(model, optimizer):
        pass
    assert hooks(model, optimizer) == 0


def test_an_interrupted_stop_can_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = sgd(model)
    monitor = Monitor(model, optimizer).start()
    with monkeypatch.context() as patched:
        patched.setattr(Look, "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            monitor.stop()
    monitor.stop()
    assert hooks(model, optimizer) == 0


def test_a_disk_that_is_full_does_not_end_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = net()
    optimizer = sgd(model)
    file = tmp_path / "seen.jsonl"
    with Monitor(model, optimizer, every=1, jsonl=file) as monitor:
        step(model, optimizer)
        written = file.stat().st_size
        file.unlink()
        file.mkdir()  # stands for a disk that takes no more
        for _ in range(3):
            step(model, optimizer)
    assert written > 0
    assert monitor.steps == 4
    (note,) = [note for note in monitor.report().notes if "no longer written" in note]
    assert note.startswith(f"jsonl {file} is no longer written: IsADirectoryError")


@pytest.mark.parametrize("where", ["missing/seen.jsonl", ".", "nul\0.jsonl"])
def test_a_path_that_cannot_be_written_is_told_at_once(where: str, tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    with pytest.raises(BadInput, match=r"^jsonl names a place that can be written; "):
        Monitor(model, optimizer, jsonl=str(tmp_path / where)).start()
    assert hooks(model, optimizer) == 0


def test_a_pickle_of_a_monitored_model_needs_no_normscope(tmp_path: Path) -> None:
    model = net()
    with Monitor(model, sgd(model)):
        (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    code = (
        "import sys; sys.modules['normscope'] = None\n"
        "import pickle, torch\n"
        f"model = pickle.load(open({str(tmp_path / 'model.pickle')!r}, 'rb'))\n"
        "print(tuple(model(torch.randn(4, 8)).shape))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "(4, 8)\n", done.stderr


def test_an_optimizer_of_another_model_is_told() -> None:
    model = net()
    with Monitor(model, sgd(net())) as monitor:
        model(torch.randn(32, 8)).square().mean().backward()
    assert any(note.startswith("SGD holds none of the model's parameters") for note in monitor.report().notes)


def adversarial(fakes: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Monitor:
    torch.manual_seed(0)
    generator, judge = net(), net()
    makes, judges = sgd(generator), sgd(judge)
    with Monitor({"G": generator, "D": judge}, [makes, judges], every=4) as monitor:
        for _ in range(8):
            judges.zero_grad()
            made = fakes(generator, torch.randn(32, 8))
            (judge(3 + torch.randn(32, 8)).mean() - judge(made).mean()).backward()
            judges.step()
            makes.zero_grad()
            judge(generator(torch.randn(32, 8))).mean().backward()
            makes.step()
    return monitor


def test_the_usual_adversarial_recipe_has_no_warning() -> None:
    def without_gradients(generator: nn.Module, noise: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return generator(noise)

    for fakes in (without_gradients, lambda generator, noise: generator(noise).detach()):
        found = adversarial(fakes).report()
        assert found.ok, str(found)
    told = [f for f in adversarial(without_gradients).findings if f.code == "NS315"]
    assert {(f.severity, f.evidence["diagnosis"]) for f in told} == {("info", "every step")}


def test_validation_in_train_mode_is_still_a_warning() -> None:
    torch.manual_seed(0)
    model = net()
    optimizer = sgd(model)
    with Monitor(model, optimizer) as monitor:
        for _ in range(3):
            for _ in range(8):
                step(model, optimizer)
            with torch.no_grad():
                for _ in range(4):
                    model(torch.randn(32, 8))
    told = [(f.code, f.severity, f.evidence["diagnosis"]) for f in monitor.findings if f.code == "NS315"]
    assert ("NS315", "warning", "between steps") in told
