"""Fixes do what they say, keep outputs or refuse, and touch nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import normscope
from normscope import demo
from normscope.errors import BadInput
from normscope.transforms import Deviation
from normscope.transforms.fixes import FIXES

torch.set_num_threads(1)


def images(samples: int = 8) -> torch.Tensor:
    return torch.randn(samples, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def trained(**options: Any) -> nn.Sequential:
    """Convolution and batch norm whose statistics and parameters are not those of the start."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, **options), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2)
    )
    for _ in range(30):
        model(2 * torch.randn(16, 3, 8, 8) + 1)
    with torch.no_grad():
        model[0].bias.add_(1.0)
        model[1].weight.uniform_(0.5, 2.0)
    return model.eval()


def report(model: nn.Module, code: str, inputs: object = None, **options: Any) -> normscope.Report:
    found = normscope.check(model, inputs, select=[code], **options)
    assert found.findings, "the example must be faulty"
    return found


def same(a: nn.Module, b: nn.Module) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        out: torch.Tensor = self.gamma * centered / (centered.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return out + self.beta


class Stacked(nn.Module):
    """A norm written by hand, and a call of the function with parameters of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.between = Written(), nn.Linear(6, 6)
        self.scale, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(self.between(self.one(x)), (6,), self.scale, self.shift)


class TestRedundantBias:
    def test_outputs_stay_in_eval_and_in_train(self) -> None:
        model, x = trained(), images()
        before = copy.deepcopy(model)
        fixed, done = report(model, "NS501", x).apply("NS501", model, x)
        assert fixed[0].bias is None
        assert [(one.mode, one.deviation <= one.allowed) for one in done.agreements] == [
            ("eval", True),
            ("train", True),
        ]
        # float32: the bias, of size 1, is subtracted once more; ten roundings of numbers of size 10
        torch.testing.assert_close(fixed(x), model(x), rtol=1e-5, atol=1e-5)
        assert same(model, before)
        assert model[0].bias is not None
        assert "to load it, build 0 with bias=False" in done.notes
        assert not normscope.check(fixed, x, select=["NS501"]).findings

    def test_the_running_mean_takes_it_up(self) -> None:
        model, x = trained(), images()
        fixed, _ = report(model, "NS501", x).apply("NS501", model, x)
        assert torch.equal(fixed[1].running_mean, model[1].running_mean - model[0].bias.detach())

    def test_in_place_keeps_the_objects(self) -> None:
        model, x = trained(), images()
        weight, before = model[0].weight, model(x)
        fixed, done = report(model, "NS501", x).apply("NS501", model, x, inplace=True)
        assert fixed is model
        assert model[0].weight is weight
        assert model[0].bias is None
        assert len(done.agreements) == 2
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)

    def test_without_running_statistics_it_just_goes(self) -> None:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8)), images()
        fixed, _ = report(model, "NS501", x).apply("NS501", model, x)
        torch.testing.assert_close(fixed(x), model(x), rtol=1e-5, atol=1e-5)

    def test_left_where_others_own_the_bias(self) -> None:
        model, x = trained(), images()
        model.register_parameter("shared", model[0].bias)
        fixed, done = report(model, "NS501", x).apply("NS501", model, x)
        assert [site.reason for site in done.left] == ["the bias has several owners: shared, 0.bias"]
        assert fixed[0].bias is not None

    def test_left_where_two_layers_feed_one_norm(self) -> None:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b, self.norm = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.norm(self.a(x)) + self.norm(self.b(x))

        model, x = Two(), images()
        _, done = report(model, "NS501", x).apply("NS501", model, x)
        assert {site.reason for site in done.left} == {
            "one running mean cannot take up the biases that reach this norm"
        }

    def test_a_report_of_another_model_changes_nothing(self) -> None:
        class Reads(nn.Module):
            def __init__(self, *, bias_too: bool) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.conv, self.norm, self.bias_too = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), bias_too

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.norm(self.conv(x))
                return out + self.conv.bias.sum() if self.bias_too and self.conv.bias is not None else out

        x = images()
        found = report(Reads(bias_too=False), "NS501", x)
        model = Reads(bias_too=True)
        before = copy.deepcopy(model)
        for inplace in (False, True):
            with pytest.raises(Deviation):
                found.apply("NS501", model, x, inplace=inplace)
            assert same(model, before)


class TestDecay:
    def test_every_parameter_stays_in_one_group(self) -> None:
        model, x = trained(), images()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        model(x).sum().backward()
        optimizer.step()
        moments = {id(p): state["exp_avg"] for p, state in optimizer.state.items()}
        found = report(model, "NS502", x, optimizer=optimizer)
        same_model, done = found.apply("NS502", model, optimizer=optimizer)
        assert same_model is model
        groups = [({id(p) for p in g["params"]}, g["weight_decay"]) for g in optimizer.param_groups]
        norm = {id(model[1].weight), id(model[1].bias)}
        rest = {id(p) for p in model.parameters()} - norm
        assert groups == [(rest, 0.1), (norm, 0.0)]
        assert all(optimizer.state[p]["exp_avg"] is moments[id(p)] for p in model.parameters())
        optimizer.step()
        assert (len(done.done), done.notes) == (1, ())
        assert not normscope.check(model, x, select=["NS502"], optimizer=optimizer).findings

    def test_joins_a_group_that_is_there(self) -> None:
        model, inputs, targets, optimizer = demo.load("faulty")
        found = normscope.check(model, inputs, targets, optimizer=optimizer, select=["NS502"])
        found.apply("NS502", model, optimizer=optimizer)
        assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [
            (7, 0.05),
            (8, 0.0),
        ]

    def test_parameters_with_names_of_their_own(self) -> None:
        """Found by what they are: gamma and beta, a_2 and b_2, or held by the block around an inlined norm."""
        model, x = Stacked(), torch.randn(4, 6)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        found = report(model, "NS502", x, optimizer=optimizer)
        _, done = found.apply("NS502", model, optimizer=optimizer)
        assert (len(done.done), done.left) == (2, ()), str(done)
        norm = {id(p) for p in (model.one.gamma, model.one.beta, model.scale, model.shift)}
        assert {id(p) for p in optimizer.param_groups[1]["params"]} == norm
        assert not normscope.check(model, x, select=["NS502"], optimizer=optimizer).findings

    def test_a_model_without_the_parameters_is_told(self) -> None:
        model, x = Stacked(), torch.randn(4, 6)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        found = report(model, "NS502", x, optimizer=optimizer)
        _, done = found.apply("NS502", trained(), optimizer=optimizer)
        assert {site.reason for site in done.left} == {
            f"this model has no parameter {names}: check the model that is to be fixed"
            for names in ("one.gamma, one.beta", "scale, shift")
        }

    def test_needs_the_optimizer(self) -> None:
        model, x = trained(), images()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        found = report(model, "NS502", x, optimizer=optimizer)
        _, done = found.apply("NS502", model)
        assert [site.reason for site in done.left] == ["weight decay is the optimizer's: pass optimizer="]
        other = torch.optim.SGD(trained().parameters(), lr=0.1, weight_decay=0.1)
        _, done = found.apply("NS502", model, optimizer=other)
        assert not done.done
        assert [(len(g["params"]), g["weight_decay"]) for g in other.param_groups] == [(6, 0.1)]


class TestNumbers:
    def test_momentum_of_the_other_convention(self) -> None:
        model, x = trained(momentum=0.99), images()
        fixed, done = report(model, "NS308", x).apply("NS308", model, x)
        assert (fixed[1].momentum, model[1].momentum) == (0.01, 0.99)
        assert torch.equal(fixed(x), model(x))
        assert "momentum 0.99 -> momentum 0.01" in str(done)
        assert done.notes[-1] == (
            "the statistics stored in 1 still come from momentum 0.99: recompute them on training data, "
            "normscope.transforms.recalibrate(model, batches)"
        )

    def test_momentum_that_says_nothing_is_left(self) -> None:
        model, x = trained(momentum=0.0), images()
        _, done = report(model, "NS308", x).apply("NS308", model, x)
        assert [site.reason for site in done.left] == ["which number is meant cannot be told; 0.1 is usual"]

    def test_eps_none_is_written_out_exactly(self) -> None:
        model, x = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)), torch.randn(8, 4)
        fixed, _ = report(model, "NS104", x).apply("NS104", model, x)
        assert fixed[1].eps == torch.finfo(torch.float32).eps
        assert torch.equal(fixed(x), model(x))

    def test_what_changes_outputs_is_only_done_when_asked(self) -> None:
        model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=0.0)), torch.randn(8, 4)
        found = report(model, "NS104", x)
        fixed, done = found.apply("NS104", model, x)
        assert fixed[1].eps == 0.0
        assert [site.reason for site in done.left] == [
            "outputs would change (eps 0 -> eps 1e-05), which is only done when asked: unsafe=True"
        ]
        fixed, done = found.apply("NS104", model, x, unsafe=True)
        assert (fixed[1].eps, model[1].eps) == (1e-5, 0.0)
        assert done.notes[0].startswith("outputs changed, as asked: by ")

    def test_the_odd_eps_out(self) -> None:
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=eps)) for eps in (1e-6, 1e-6, 1e-3)]
        model, x = nn.Sequential(*blocks), torch.randn(8, 8)
        fixed, _ = report(model, "NS105", x).apply("NS105", model, x, unsafe=True)
        assert [block[1].eps for block in fixed] == [1e-6] * 3


def test_several_at_once() -> None:
    model, inputs, targets, optimizer = demo.load("faulty")
    found = normscope.check(model, inputs, targets, optimizer=optimizer)
    fixed, done = found.apply(["NS501", "NS308"], model, inputs)
    assert {site.name for site in done.done} == {"conv1", "norm1", "norm3"}
    assert done.transform == "fix NS501 NS308"
    left = {f.code for f in normscope.check(fixed, inputs, targets).findings}
    assert not left & {"NS501", "NS308"}


def test_a_report_without_such_a_finding_says_so() -> None:
    model, x = trained(), images()
    _, done = normscope.check(model, x, select=["NS308", "NS502"]).apply(["NS308"], model, x)
    assert str(done).splitlines()[0] == "fix NS308: the report has no finding of NS308"
    _, done = normscope.check(model, x, select=["NS502"]).apply(["NS502", "NS104"], model, x)
    assert str(done).splitlines()[0] == (
        "fix NS502 NS104: the report has no finding of NS502 (no optimizer was given: pass optimizer=); the report has "
        "no finding of NS104 (it was not among the rules of this check)"
    )
    _, done = report(model, "NS501", x).apply(["NS501", "NS104"], model, x)
    assert done.notes[-1] == "the report has no finding of NS104 (it was not among the rules of this check)"


def test_what_cannot_be_fixed_is_said() -> None:
    model = trained()
    found = normscope.check(model, images())
    with pytest.raises(BadInput) as caught:
        found.apply("NS304", model)
    assert str(caught.value) == (f"NS304 cannot be fixed mechanically; those that can: {', '.join(FIXES)}")
    found = report(model, "NS501", images())
    with pytest.raises(BadInput) as caught:
        found.apply("NS501", nn.Sequential(nn.LayerNorm(4)))
    assert str(caught.value) == (
        "the report names '1' (NS501), which this model has not; check the model that is to be fixed"
    )


def test_every_fix_is_a_rule_that_tells_it() -> None:
    from normscope.doctor.rules import all_rules

    assert set(FIXES) <= set(all_rules())
