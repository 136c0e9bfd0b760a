"""What a check is given that it cannot use: one clear error; what is odd but usable: used."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import normscope
from normscope.doctor.report import Report
from normscope.errors import BadInput, ModelError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))
    for _ in range(100):
        model(torch.randn(64, 6))
    return model.eval()


X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(16) % 3


def clean(report: Report) -> Report:
    assert not [n for n in report.not_run if "internal error" in n.reason]
    return report


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": 3}, "model must be a torch.nn.Module, got int; pass the module itself"),
    ({"inputs": np.array([{}, {}])}, "an array of object cannot be an input: pass numbers"),
    ({"inputs": np.array(["a", "b"])}, "an array of <U1 cannot be an input: pass numbers"),
    ({"inputs": X.to_sparse()}, "a sparse_coo tensor cannot be an input of a check: pass a dense one"),
    ({"inputs": X.to("meta")}, "a meta tensor cannot be an input of a check: pass a dense one"),
    (
        {"inputs": "x"},
        "no tensor among the inputs, which are str; pass a tensor, a tuple of them, or a dict of keyword arguments",
    ),
    ({"inputs": X[:0]}, "an empty batch: inputs has shape (0, 6); pass at least one sample"),
    (
        {"inputs": X * float("nan")},
        "inputs holds 96 NaN of 96 values; statistics of NaN say nothing: clean the data",
    ),
    ({"seed": -1}, "seed must be a whole number from 0 to 9223372036854775807, got -1"),
    ({"seed": 1.5}, "seed must be a whole number from 0 to 9223372036854775807, got 1.5"),
    ({"seed": True}, "seed must be a whole number from 0 to 9223372036854775807, got True"),
    ({"seed": None}, "seed must be a whole number from 0 to 9223372036854775807, got None"),
    ({"dataset_size": -5}, "dataset_size must be a whole number from 1 to 9223372036854775807, got -5"),
    ({"optimizer": "adam"}, "optimizer must be a torch.optim.Optimizer, got 'adam'; pass the object itself"),
    ({"loss_fn": 3}, "loss_fn must be callable, got int"),
    ({"progress": 3}, "progress must be callable, got int"),
    ({"frozen_policy": "all"}, "frozen_policy is one of '', 'statistics', 'affine', 'both'; got 'all'"),
    ({"select": "NS3"}, "select takes a list of codes, got the string 'NS3'; write ['NS3']"),
    ({"select": [3]}, "select takes a list of codes such as ['NS304'], got [3]"),
    ({"ignore": 3}, "ignore takes a list of codes such as ['NS304'], got 3"),
    ({"ignore": ["NS9"]}, "ignore names 'NS9', which begins no rule's code; known: NS101"),
    ({"mask": "abc"}, "mask must be a tensor of shape (B, L), got str"),
    ({"mask": torch.ones(16, 3)}, "mask has length 3, but no input has an axis of that size: inputs (16, 6)"),
    (
        {"mask": torch.ones(4, 6)},
        "mask must have shape (B, L) with B = 16, True at valid positions; got (4, 6)",
    ),
    ({"mask": torch.zeros(16, 6)}, "mask is False everywhere: no position would be valid; is it inverted?"),
    (
        {"inputs": None, "mask": torch.ones(16, 6)},
        "a mask says what is padding in the inputs; pass inputs too",
    ),
    ({"loss_fn": lambda y: y}, "loss_fn(output) must return a tensor of one number, got shape (16, 3)"),
    ({"loss_fn": lambda y: None}, "loss_fn(output) must return a tensor of one number, got NoneType"),
    (
        {"loss_fn": lambda y: y.detach().sum()},
        "loss_fn(output) returned a number that no gradient flows from",
    ),
    ({"loss_fn": lambda y: 1 / 0}, "loss_fn(output) raised ZeroDivisionError: division by zero"),
    ({"loss_fn": lambda y: sys.exit(0)}, "loss_fn(output) raised SystemExit: 0"),
    (
        {"targets": "abc", "loss_fn": nn.functional.cross_entropy},
        "loss_fn(output, targets) raised TypeError",
    ),
]


@pytest.mark.parametrize(
    ("given", "words"), BAD, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_what_cannot_be_used_is_one_error(given: dict[str, Any], words: str) -> None:
    given = {"model": net(), "inputs": X, **given}
    with pytest.raises(BadInput) as caught:
        normscope.check(given.pop("model"), given.pop("inputs"), **given)
    assert str(caught.value).startswith(words)


def test_an_uninitialized_module_and_a_meta_default_are_told() -> None:
    class Forgot(nn.Module):
        def __init__(self) -> None:
            pass

    with pytest.raises(BadInput, match=r"Forgot was not initialized: its __init__ must call super\(\)"):
        normscope.check(Forgot(), X)
    model = net()
    with torch.device("meta"), pytest.raises(BadInput, match="the default device is meta"):
        normscope.check(model, X)


@pytest.mark.parametrize("error", [SystemExit(0), RecursionError("deep"), MemoryError("big")])
def test_whatever_a_model_raises_is_a_model_error(error: BaseException) -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error

    with pytest.raises(
        ModelError,
        match=r"the model raised on these inputs \(inputs: \(16, 6\) float32\) in eval mode "
        + type(error).__name__,
    ):
        normscope.check(Raises(), X)


ODD: dict[str, Callable[[], Any]] = {
    "reversed array": lambda: X.numpy()[::-1],
    "big-endian array": lambda: X.numpy().astype(">f4"),
    "expanded": lambda: X[:1].expand(16, 6),
    "requires grad": lambda: X.clone().requires_grad_(),
    "infinite": lambda: torch.where(X > 2, torch.inf, X),
    "huge": lambda: X * 1e30,
    "one sample": lambda: X[:1],
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_but_usable_is_used(name: str) -> None:
    assert clean(normscope.check(net(), ODD[name]())).sites


def test_codes_are_read_in_any_case_and_from_any_iterable() -> None:
    report = normscope.check(net(), X, select=iter(["ns104", "NS3"]))
    ran = {*report.passed, *(f.code for f in report.findings), *(n.code for n in report.not_run)}
    assert "NS104" in ran
    assert all(code == "NS104" or code.startswith("NS3") for code in ran)


class Sparse(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).to_sparse()


class Complex(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.fft.fft(super().forward(x))


class Selects(nn.Module):
    """A norm that gets an empty selection."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.a(x[:0]) if not self.training else x[:0], self.b(x)])


@pytest.mark.parametrize("model", [Sparse(*net()), Complex(*net()), Selects().eval()])
@pytest.mark.filterwarnings("error:.*complex.*")
def test_odd_outputs_and_calls_cost_no_rule(model: nn.Module) -> None:
    clean(normscope.check(model, X))


def test_state_of_odd_kinds_costs_no_rule() -> None:
    model = net()
    del model[1]._buffers["num_batches_tracked"]
    model[1].num_batches_tracked = 100  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["weight_decay"] = None
    clean(normscope.check(model, X, optimizer=optimizer))
    frozen = torch.jit.freeze(torch.jit.script(net()))
    clean(normscope.check(frozen, X))


def test_a_norm_deep_inside_is_reached() -> None:
    model: nn.Module = nn.LayerNorm(6)
    for _ in range(200):
        model = nn.Sequential(model)
    limit = sys.getrecursionlimit()
    assert len(clean(normscope.check(model, X)).sites) == 1
    assert sys.getrecursionlimit() == limit


def test_a_run_that_fails_is_told_even_if_others_did_not() -> None:
    class OnlyWithoutGrad(nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError("inference only")
            return super().forward(x)

    report = clean(normscope.check(OnlyWithoutGrad(*net()), X))
    assert "the model raised in the gradient run: RuntimeError: inference only" in report.notes


def test_a_loss_with_state_and_targets_it_writes_to_are_left_as_they_were() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(3), 0

        def forward(self, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            t.zero_()
            return self.norm(y).square().mean() + y.mean()

    loss, targets = Loss(), Y.clone()
    normscope.check(net(), X, targets, loss_fn=loss)
    assert torch.equal(targets, Y)
    assert loss.calls == 0
    assert int(loss.norm.num_batches_tracked) == 0
    assert torch.equal(loss.norm.running_mean, torch.zeros(3))


def test_targets_without_a_loss_are_told() -> None:
    assert (
        "targets were given without a loss_fn, so only NS504 looked at them"
        in normscope.check(net(), X, Y).notes
    )


def test_a_rule_that_could_not_look_has_not_passed() -> None:
    layer_only = normscope.check(nn.Sequential(nn.LayerNorm(6)), X)
    reasons = {n.code: n.reason for n in layer_only.not_run}
    assert reasons["NS302"] == "no site keeps running statistics"
    nothing = normscope.check(nn.Sequential(nn.Linear(6, 6)), X)
    assert nothing.passed == ()
    assert {n.reason for n in nothing.not_run} == {"no normalization was found"}

    class Written(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()).tanh()

    unknown = normscope.check(Written(), X)  # no module of its own, so it is not identified
    assert "NS404" not in unknown.passed
    assert any("only a norm that is a module of its own is identified" in note for note in unknown.notes)


def test_threads_sharing_a_model_get_the_same_report() -> None:
    model = net()
    alone = normscope.check(model, X)
    states = random.getstate(), torch.get_rng_state()
    reports: list[Report] = []
    threads = [threading.Thread(target=lambda: reports.append(normscope.check(model, X))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.to_json() for r in reports] == [alone.to_json()] * 4
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_a_model_that_changes_threads_and_depth_leaves_them() -> None:
    class Tunes(nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            torch.set_num_threads(3)
            sys.setrecursionlimit(4321)
            return super().forward(x)

    before = torch.get_num_threads(), sys.getrecursionlimit()
    normscope.check(Tunes(*net()), X)
    assert (torch.get_num_threads(), sys.getrecursionlimit()) == before


@pytest.mark.parametrize("padding", ["ids", "inverted mask", "bounded length"])
def test_padding_is_really_changed_and_masks_are_kept(padding: str) -> None:
    """A mean over padded positions must be seen, whatever the ids of padding and the mask's convention."""

    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(30, 8), nn.LayerNorm(8)
            self.place = nn.Embedding(7, 8)

        def forward(self, ids: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
            x = self.embed(ids) + (
                self.place(torch.arange(ids.shape[1])) if padding == "bounded length" else 0
            )
            if hidden is not None:
                x = x.masked_fill(hidden[..., None], 0)
            return self.norm(x.sum(1, keepdim=True) + x)

    torch.manual_seed(0)
    ids = torch.randint(1, 30, (8, 7))
    mask = torch.arange(7)[None] < torch.tensor([3, 4, 5, 3, 4, 5, 3, 4])[:, None]
    ids = ids * mask
    inputs = {"ids": ids, "hidden": ~mask} if padding == "inverted mask" else {"ids": ids}
    report = clean(normscope.check(Pools(), inputs, mask=mask, select=["NS701"]))
    found = [f for f in report.findings if f.code == "NS701"]
    assert bool(found) == (padding != "inverted mask"), report
    assert not [n for n in report.notes if "raised" in n]


def test_numbers_of_numpy_and_tensors_are_numbers() -> None:
    model = nn.Sequential(
        nn.LayerNorm(16, eps=np.float32(1e-5)),  # type: ignore[arg-type]
        nn.LayerNorm(16, eps=torch.tensor(1e-5)),  # type: ignore[arg-type]
        nn.GroupNorm(np.int64(2), 16),  # type: ignore[arg-type]
    )
    report = clean(normscope.check(model, torch.randn(8, 16)))
    assert [row.spec.eps for row in report.sites if row.spec] == pytest.approx([1e-5] * 3)
    assert report.ok


def test_what_runs_inside_vmap_is_listed_and_not_measured() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.vmap(self.norm)(x)
            return out

    report = clean(normscope.check(Mapped().eval(), X))
    assert "norm was not measured: it runs inside vmap or another function transform" in report.notes


def test_a_traced_model_is_taken() -> None:
    traced = torch.jit.trace(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)).eval(), X)
    assert len(clean(normscope.check(traced, X)).sites) == 1


def test_a_model_handed_over_in_training_mode_is_told() -> None:
    note = "the model was handed over in training mode; eval is what it is after model.eval()"
    assert note in normscope.check(net().train(), X).notes
    assert note not in normscope.check(net(), X).notes


def test_similarities_of_pairs_of_samples_are_no_coupling() -> None:
    class Contrasts(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = super().forward(x)
            return z @ z.T

    report = normscope.check(Contrasts(*net()), X)
    assert {f.severity for f in report.findings if f.code == "NS202"} == {"info"}


def test_a_large_constant_channel_makes_no_copies() -> None:
    from normscope.doctor.independence import dependence

    g = torch.Generator().manual_seed(0)
    x = torch.rand(16, 3, 16, 16, generator=g)
    assert dependence((torch.cat([x, torch.full((16, 1, 16, 16), 255.0)], 1),), 16) == ""
    tokens = torch.randn(16, 9, 8, generator=g)
    tokens[:, 0, 3] = 2000
    assert dependence((tokens,), 16) == ""
    near = x[:1] + 0.01 * torch.randn(16, 3, 16, 16, generator=g)
    assert "near copies" in dependence((near,), 16)
