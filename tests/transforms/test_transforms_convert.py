"""Converted norms compute what their new kind computes, keep what both kinds have, and nothing claims sameness."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import normscope
import normscope.nn as own
from normscope.errors import BadInput
from normscope.transforms import convert, freeze, recalibrate
from normscope.transforms.conversions import groups_of

torch.set_num_threads(1)


def filled(norm: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*norm.parameters(), *norm.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return norm.double()


X = 3 + torch.randn(5, 12, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def net(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(norm, nn.ReLU())


# -- what it computes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["group", "layer", "instance", "sync", "frozen"])
@pytest.mark.parametrize("make", [nn.BatchNorm2d, own.BatchNorm2d], ids=["torch", "own"])
@pytest.mark.parametrize("affine", [True, False])
def test_each_kind_computes_its_specification(to: str, make: Any, affine: bool) -> None:
    norm = filled(make(12, eps=1e-3, affine=affine)).eval()
    new, report = convert(norm, to)
    assert len(report.done) == 1
    assert not new.training
    spec = normscope.spec_of(new)
    assert spec.eps == 1e-3
    state = None
    if to in ("sync", "frozen"):
        state = normscope.RunningState(norm.running_mean.numpy(), norm.running_var.numpy(), 0)
    weights = {"weight": norm.weight.detach().numpy(), "bias": norm.bias.detach().numpy()} if affine else {}
    spec = spec if affine else spec.replace(weight=None, bias=None)
    wanted = normscope.reference.forward(X.numpy(), spec, **weights, running=state, training=False)
    # float64, sums of at most 144 numbers; outputs are below 10
    torch.testing.assert_close(new(X).detach(), torch.from_numpy(wanted), rtol=0, atol=1e-12)


def test_parameters_are_the_same_objects_and_flags_stay() -> None:
    model = net(filled(nn.BatchNorm2d(12)))
    model[0].bias.requires_grad_(False)
    weight = model[0].weight
    same, _ = convert(model, "group", inplace=True)
    assert same is model
    assert model[0].weight is weight
    assert not model[0].bias.requires_grad
    assert isinstance(model[0], nn.GroupNorm)


def test_there_and_back() -> None:
    model = net(filled(nn.BatchNorm2d(12, momentum=0.3)))
    for way in ("sync", "frozen"):
        back, report = convert(convert(model, way)[0], "batch", sample=X)
        assert type(back[0]) is nn.BatchNorm2d
        assert not report.notes
        for key, value in model.state_dict().items():
            if key != "0.num_batches_tracked" or way == "sync":
                assert torch.equal(value, back.state_dict()[key]), key
        assert torch.equal(back.eval()(X), copy.deepcopy(model).eval()(X))
    back, report = convert(convert(model, "group")[0], "batch", sample=X)
    assert report.notes == ("0: starts from mean 0 and variance 1; recalibrate before evaluation",)
    assert torch.equal(back[0].weight, model[0].weight)
    recalibrate(back, X, inplace=True)
    assert back[0].running_mean.min() > 2


@pytest.mark.parametrize(
    ("ndim", "kind"), [(2, nn.BatchNorm1d), (3, nn.BatchNorm1d), (4, nn.BatchNorm2d), (5, nn.BatchNorm3d)]
)
def test_the_sample_tells_the_rank(ndim: int, kind: type) -> None:
    model = net(nn.SyncBatchNorm(4))
    new, _ = convert(
        model, "batch", sample=torch.randn(3, 4, 2, 2, 2)[(slice(None), slice(None), *[0] * (5 - ndim))]
    )
    assert type(new[0]) is kind
    _, report = convert(model, "batch")
    assert report.left[0].reason == "does not tell how many axes its input has: give a sample"


def test_shared_modules_stay_shared() -> None:
    norm = nn.BatchNorm2d(12)
    model = nn.ModuleDict({"a": norm, "b": norm})
    new, report = convert(model, "group")
    assert new["a"] is new["b"]
    assert report.done[0].aliases == ("b",)


@pytest.mark.parametrize(("to", "given"), [("renorm", {}), ("ghost", {"size": 4, "remainder": "short"})])
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(12, 1e-3, 0.3), nn.BatchNorm1d(12, affine=False)], ids=["2d", "1d"]
)
def test_renorm_and_ghost_carry_all_and_come_back(to: str, given: dict[str, Any], norm: nn.Module) -> None:
    model = net(filled(copy.deepcopy(norm)))
    model[0].num_batches_tracked.fill_(15_000)
    new, report = convert(model, to, **given)
    assert len(report.done) == 1
    assert str(report).startswith("convert: THE FUNCTION CHANGES")
    assert (new[0].eps, new[0].momentum) == (norm.eps, norm.momentum)
    x = X if norm.eps == 1e-3 else X[:, :, 0, 0]
    assert torch.equal(new.eval()(x), own_batch(model)(x))
    if to == "renorm":
        assert new[0].spec.running.renorm == (1 + 2 * (10 / 35), 2.5), "the counter is the step"
    back, _ = convert(new, "batch")
    assert type(back[0]) is type(norm)
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in model.state_dict().items())


def test_ghosts_of_another_size_and_without_statistics() -> None:
    ghost = own.GhostBatchNorm2d(12, size=4, updates="once")
    new, _ = convert(net(ghost), "ghost", size=2)
    assert (new[0].size, new[0].updates) == (2, "once")
    assert convert(net(ghost), "ghost", size=4)[1].left[0].reason == "is a GhostBatchNorm2d already"
    new, report = convert(net(nn.BatchNorm2d(12, track_running_stats=False)), "ghost", size=2)
    assert new[0].running_mean is None
    assert not report.notes


def own_batch(model: nn.Module) -> nn.Module:
    """The same batch norm in the arithmetic of normscope.nn, in eval."""
    return convert(model, "ours")[0].eval()


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(12, 1e-3, None), nn.BatchNorm2d(12, track_running_stats=False), nn.GroupNorm(3, 12),
     nn.InstanceNorm2d(12, affine=True, track_running_stats=True)],
    ids=["batch", "untracked", "group", "instance"],
)  # fmt: skip
def test_ours_and_back_computes_the_same(norm: nn.Module) -> None:
    model = net(filled(norm))
    ours, report = convert(model, "ours")
    assert type(ours[0]).__module__.startswith("normscope.nn")
    assert str(report).startswith("convert: the specification stays, and the outputs were not compared")
    assert report.properties == ()
    assert json.loads(report.to_json())["function_changes"] is False
    back, _ = convert(ours, "torch")
    assert repr(back) == repr(model)
    assert back.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(ours(X), back(X), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.state_dict(), back.state_dict(), rtol=1e-12, atol=1e-12)
    assert convert(model, "torch")[1].left[0].reason == "is a layer of torch.nn already"


class Stepped(nn.BatchNorm2d):
    """Takes (T, N, C, H, W) in its multi-step mode."""

    step_mode = "m"

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(0, 1)).unflatten(0, input.shape[:2])


@pytest.mark.parametrize("to", ["group", "renorm", "sync"])
def test_step_modes_are_kept(to: str) -> None:
    model, x = net(Stepped(12)).eval(), X.float().unsqueeze(0)
    wanted = model(x)
    new, report = convert(model, to, sample=x)
    assert type(new[0]) is Stepped
    assert "overrides forward" in report.left[0].reason
    assert torch.equal(new(x), wanted)


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", range(1, 200))
def test_the_rule_of_groups(channels: int) -> None:
    groups = groups_of(channels)
    assert channels % groups == 0
    assert groups <= 32
    assert groups == 1 or channels // groups >= 2
    better = [g for g in range(groups + 1, 33) if channels % g == 0 and channels // g >= 2]
    assert not better


def test_groups_of_ones_own() -> None:
    model = net(nn.BatchNorm2d(12))
    assert convert(model, "group", groups=4)[0][0].num_groups == 4
    assert convert(model, "group", groups=12)[0][0].num_groups == 12, "positions are there"
    assert (
        convert(model, "group", groups=5)[1].left[0].reason == "has 12 channels, which 5 groups do not divide"
    )
    converted, _ = convert(model, "group", groups=4)
    assert convert(converted, "group", groups=4)[1].left[0].reason == "is a group norm of 4 groups already"


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_report_says_first_that_the_function_changes() -> None:
    model = net(nn.BatchNorm2d(12))
    _, report = convert(model, "group", dry_run=True)
    text = str(report)
    assert text.splitlines()[0] == (
        "convert: THE FUNCTION CHANGES: validate the model again, and train it further where it got worse"
    )
    assert report.properties == (
        ("statistics", "b c ... -> c", "b (g c) ... -> b g, g=6"),
        ("gains on", "c", "(g c)"),
        ("stored", "running momentum 0.1, unbiased", "nothing"),
        ("removes a shift", "along c", "along b, g"),
        ("removes a scale", "along c", "along b, g"),
        ("couples samples", "yes", "no"),
        ("state", "running_mean, running_var, num_batches_tracked", "none"),
        ("training differs from evaluation", "yes", "no"),
        ("in training by", "batch", "input"),
        ("in evaluation by", "running", "input"),
    )
    assert "  couples samples: was yes; now no" in text
    assert "verified" not in text
    assert not report.agreements
    assert json.loads(report.to_json())["function_changes"] is True
    assert type(model[0]) is nn.BatchNorm2d


def test_frozen_and_sync_say_what_changes() -> None:
    assert convert(net(nn.BatchNorm2d(12)), "frozen")[1].properties == (
        ("stored", "running momentum 0.1, unbiased", "running momentum 0.0, unbiased"),
        ("in training by", "batch", "frozen"),
        ("in evaluation by", "running", "frozen"),
    )
    assert convert(net(nn.BatchNorm2d(12)), "sync")[1].properties == (
        ("in training by", "batch", "batch over all ranks"),
    )


def test_the_given_model_is_not_touched() -> None:
    model = net(filled(nn.BatchNorm2d(12)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convert(model, "layer", sample=X)
    assert type(model[0]) is nn.BatchNorm2d
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# -- what is left ------------------------------------------------------------------------------------------------------


class Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Checked(nn.BatchNorm2d):
    def _check_input_dim(self, input: Tensor) -> None:
        """Any rank."""


def hooked() -> nn.Module:
    norm = nn.BatchNorm2d(12)
    norm.register_forward_hook(lambda module, args, output: None)
    return norm


@pytest.mark.parametrize(
    ("norm", "to", "reason"),
    [
        (Checked(12), "group", "is a Checked, whose own code would be dropped"),
        (hooked(), "group", "has hooks, which belong to the module that it is: remove them first"),
        (freeze(nn.BatchNorm2d(12))[0], "group", "is frozen: unfreeze it first"),
        (
            parametrizations.weight_norm(nn.BatchNorm2d(12), dim=None),
            "group",
            "is a ParametrizedBatchNorm2d, whose own code would be dropped",
        ),
        (
            nn.BatchNorm1d(12),
            "instance",
            "may get inputs (N, C), which an instance norm takes for one sample; give a sample that shows (N, C, L)",
        ),
        (
            nn.BatchNorm1d(1),
            "group",
            "would have one channel a group, and no positions are certain: sets of one element",
        ),
        (nn.BatchNorm2d(1), "layer", "has one channel, so every position would be a set of one element"),
        (
            nn.BatchNorm2d(12, track_running_stats=False),
            "frozen",
            "stores no statistics of batches that could be frozen",
        ),
        (nn.GroupNorm(3, 12), "sync", "is no batch norm"),
        (nn.BatchNorm2d(12), "batch", "is a BatchNorm2d already"),
        (nn.BatchNorm1d(12), "batch", "is a BatchNorm1d already"),
        (own.BatchRenorm2d(12), "ours", "is a layer of normscope.nn already"),
        (own.BatchRenorm2d(12), "torch", "has no counterpart in torch.nn"),
        (
            own.BatchNorm2d(12, running_correction=0),
            "torch",
            "stores a biased variance, which no layer of torch.nn does",
        ),
        (nn.SyncBatchNorm(12), "renorm", "does not tell how many axes its input has: give a sample"),
        (nn.LayerNorm(3), "batch", "is a LayerNorm, whose own code would be dropped"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else str(v)[:12],
)  # fmt: skip
def test_left(norm: nn.Module, to: str, reason: str) -> None:
    model = net(norm)
    new, report = convert(model, to)
    assert [site.reason for site in report.left] == [reason]
    assert type(new[0]).__name__ == type(norm).__name__
    assert "THE FUNCTION CHANGES" not in str(report)


def test_a_forward_of_its_own_is_never_dropped() -> None:
    new, report = convert(net(Activated(12)), "group")
    assert type(new[0]) is Activated
    assert "overrides forward" in report.left[0].reason


def test_one_position_is_refused_with_a_sample() -> None:
    model = net(nn.BatchNorm2d(12))
    _, report = convert(model, "instance", sample=torch.randn(2, 12, 1, 1))
    assert report.left[0].reason == "has one position on the sample, so every set would have one element"
    _, report = convert(model, "group", groups=12, sample=torch.randn(2, 12, 1, 1))
    assert (
        report.left[0].reason
        == "would have one channel a group, and no positions are certain: sets of one element"
    )
    new, _ = convert(net(nn.BatchNorm1d(12)), "instance", sample=torch.randn(2, 12, 5))
    assert type(new[0]) is nn.InstanceNorm1d


def test_errors() -> None:
    with pytest.raises(BadInput) as caught:
        convert(net(nn.BatchNorm2d(12)), "switch")
    assert str(caught.value) == (
        "to is one of 'group', 'layer', 'instance', 'batch', 'sync', 'frozen', 'renorm', 'ghost', 'ours', 'torch'; got "
        "'switch'"
    )
    with pytest.raises(BadInput) as caught:
        convert(net(nn.BatchNorm2d(12)), "ghost")
    assert str(caught.value) == "to='ghost' needs the size of a virtual batch; got none. Write size=32"
    with pytest.raises(BadInput) as caught:
        convert(net(nn.BatchNorm2d(12)), "layer", groups=3)
    assert str(caught.value) == "groups is of to='group'; got to='layer'"
    with pytest.raises(BadInput) as caught:
        convert(nn.BatchNorm2d(12), "group", inplace=True)
    assert str(caught.value) == (
        "the model itself is the norm, which cannot become another in place: leave inplace out"
    )
