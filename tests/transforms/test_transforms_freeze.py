"""Frozen normalizations stay frozen, compute the same, and come back to the bit."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import normscope
import normscope.nn as own
from normscope.doctor.refusals import Refused
from normscope.errors import BadInput
from normscope.transforms import Deviation, accelerate, freeze, unfreeze

torch.set_num_threads(1)


class Activated(nn.BatchNorm2d):
    """A subclass with a forward and a train of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()

    def train(self, mode: bool = True) -> Activated:
        self.asked = mode
        return super().train(mode)


class Loose(nn.BatchNorm2d):
    """Moves its statistics in eval too."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean.add_(1)
        return super().forward(input)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(norm: nn.Module) -> Any:
    with torch.no_grad():
        for seed, tensor in enumerate([*norm.parameters(), *norm.buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(seeded(*tensor.shape, seed=10 + seed).abs() + 0.5)
    return norm


IMAGE = (4, 6, 5, 3)
KINDS: list[tuple[Any, tuple[int, ...]]] = [
    (lambda: nn.BatchNorm1d(6, momentum=None), (4, 6)),
    (lambda: nn.BatchNorm2d(6, momentum=0.3), IMAGE),
    (lambda: nn.BatchNorm3d(6, affine=False), (4, 6, 5, 3, 2)),
    (lambda: nn.SyncBatchNorm(6), IMAGE),
    (lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True), IMAGE),
    (lambda: own.BatchNorm2d(6), IMAGE),
    (lambda: own.InstanceNorm1d(6, track_running_stats=True), (4, 6, 5)),
    (lambda: Activated(6), IMAGE),
]
NAMES = ["bn1d", "bn2d", "bn3d", "sync", "instance", "own bn", "own instance", "subclass"]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that a module is: classes, attributes, tensors by value and flag."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[f"{path}: class"] = type(module)
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                found[f"{path}.{key}"] = copy.copy(value)
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            found[f"{path}.{key}"] = (
                None if tensor is None else (tensor.requires_grad, tensor.dtype, tensor.tolist())
            )
    return found


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), filled(nn.BatchNorm2d(6)), nn.ReLU(), nn.Dropout(0.5),
        nn.Conv2d(6, 6, 1), filled(nn.BatchNorm2d(6, momentum=0.01)), nn.Flatten(), nn.LayerNorm(54),
    )  # fmt: skip


X = seeded(4, 3, 5, 5)


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "shape"), KINDS, ids=NAMES)
@pytest.mark.parametrize("policy", ["statistics", "affine", "both"])
@pytest.mark.parametrize("mode", [True, False])
def test_unfreeze_of_freeze_is_the_identity(
    make: Any, shape: tuple[int, ...], policy: str, mode: bool
) -> None:
    norm = filled(make()).train(mode)
    before = snapshot(norm)
    frozen, _ = freeze(norm, policy)
    assert snapshot(norm) == before, "the model given is not touched"
    back, report = unfreeze(frozen)
    assert snapshot(back) == before
    nothing = policy == "affine" and not list(norm.parameters())
    assert len(report.done) == (not nothing)


@pytest.mark.parametrize(("make", "shape"), KINDS, ids=NAMES)
def test_frozen_statistics_do_not_move(make: Any, shape: tuple[int, ...]) -> None:
    norm = filled(make())
    frozen, report = freeze(nn.Sequential(norm), sample=3 + seeded(*shape))
    wanted = copy.deepcopy(norm).eval()(3 + seeded(*shape))
    state = copy.deepcopy(frozen.state_dict())
    for mode in (True, False, True):
        frozen.train(mode)
        assert torch.equal(frozen(3 + seeded(*shape)), wanted)
    assert all(torch.equal(value, state[key]) for key, value in frozen.state_dict().items())
    assert frozen.training
    assert not frozen[0].training
    assert all(p.requires_grad for p in frozen.parameters()), "gain and bias go on"
    assert [(one.mode, one.difference) for one in report.agreements] == [("eval", 0.0)]


def test_the_mode_asked_for_last_comes_back() -> None:
    frozen, _ = freeze(net().train())
    assert unfreeze(frozen)[0][1].training
    frozen.eval()
    assert not unfreeze(frozen)[0][1].training
    assert unfreeze(frozen.train())[0][1].training


def test_policies_add_up_and_come_off_one_by_one() -> None:
    model = net()
    before = snapshot(model)
    both, _ = freeze(freeze(model, "affine")[0], "statistics")
    assert not both[1].weight.requires_grad
    assert not both.train()[1].training
    affine, _ = unfreeze(both, "statistics")
    assert not affine[1].weight.requires_grad
    assert affine[1].training
    again, _ = unfreeze(affine, "affine")
    assert snapshot(again) == before
    twice, report = freeze(freeze(model)[0])
    assert not report.done
    assert report.left[0].reason == "its statistics are frozen already"
    assert snapshot(unfreeze(twice)[0]) == before


def test_affine_keeps_what_was_off_already() -> None:
    model = net()
    model[1].bias.requires_grad_(False)
    back, _ = unfreeze(freeze(model, "both")[0])
    assert [p.requires_grad for p in back[1].parameters()] == [True, False]


# -- surviving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("before", ["plain", "accelerated"])
def test_copies_and_pickles_stay_frozen(through: str, before: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), filled(Activated(6)), filled(nn.BatchNorm2d(6)))
    if before == "accelerated":
        model, _ = accelerate(model)
    frozen, _ = freeze(model, "both")
    if through == "deepcopy":
        other = copy.deepcopy(frozen)
    elif through == "pickle":
        other = pickle.loads(pickle.dumps(frozen))
    else:
        file = io.BytesIO()
        torch.save(frozen, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    other.train()
    assert [m.training for m in other] == [True, False, False]
    assert other[1].asked is True, "the train of a subclass is called"
    assert torch.equal(other(X), frozen(X))
    thawed, _ = unfreeze(other)
    assert snapshot(thawed)["1: class"] is type(model[1])
    assert all(p.requires_grad for p in thawed.parameters())
    assert not frozen[1].training, "the other one is not touched"
    assert not frozen[1].weight.requires_grad, "the other one is not touched"


def test_a_state_dict_fits_both_ways() -> None:
    model = net()
    frozen, _ = freeze(model, "both")
    assert list(frozen.state_dict()) == list(model.state_dict())
    other = net()
    filled(other)
    frozen.load_state_dict(other.state_dict())
    assert torch.equal(frozen.eval()(X), other.eval()(X))
    assert not frozen.train()[1].training
    model.load_state_dict(frozen.state_dict())


@pytest.mark.slow
def test_compiled() -> None:
    frozen, _ = freeze(net())
    compiled = torch.compile(frozen, backend="eager")
    compiled.train()
    state = copy.deepcopy(frozen.state_dict())
    frozen[3].p = 0.0
    assert torch.equal(compiled(X), frozen(X))
    assert all(torch.equal(value, state[key]) for key, value in frozen.state_dict().items())
    inside, report = freeze(torch.compile(net(), backend="eager"), inplace=True)
    assert len(report.done) == 2
    inside.train()
    assert not inside._orig_mod[1].training


def test_compiled_wrapper_small() -> None:
    """The same without compiling: nothing is called."""
    compiled, report = freeze(torch.compile(net(), backend="eager"), inplace=True)
    assert [site.name for site in report.done] == ["1", "5"]
    assert not compiled.train()._orig_mod[1].training


def test_an_optimizer_goes_on_in_place() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    frozen, _ = freeze(model, "both", inplace=True)
    assert frozen is model
    before = [p.clone() for p in model[1].parameters()]
    model.train()(X).square().sum().backward()
    kernel = model[0].weight.clone()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model[1].parameters(), strict=True))
    assert not torch.equal(kernel, model[0].weight)


def test_hooks_stay() -> None:
    model, seen = net(), []
    model[1].register_forward_hook(lambda module, args, output: seen.append(module.training))
    freeze(model, inplace=True)
    model.train()(X)
    assert seen == [False]


def test_fx_sees_a_leaf_as_before() -> None:
    frozen, _ = freeze(net())
    graph = torch.fx.symbolic_trace(frozen)
    assert "1" in [node.target for node in graph.graph.nodes]


# -- the doctor agrees -------------------------------------------------------------------------------------------------


def test_the_doctor_sees_it_frozen() -> None:
    model = net().train()
    model[1].eval()
    model[5].eval()
    codes = {f.code for f in normscope.check(model).findings}
    assert "NS306" in codes, "eval() on the norms alone does not last"
    frozen, _ = freeze(net().train(), "both")
    found = normscope.check(frozen, frozen_policy="both").findings
    assert not {"NS305", "NS306", "NS307"} & {f.code for f in found}
    assert normscope.spec_of(frozen[1]) == normscope.spec_of(net()[1])


def test_the_flag_is_no_freeze() -> None:
    norm = filled(nn.BatchNorm2d(3))
    norm.track_running_stats = False
    before = norm.running_mean.clone()
    assert not torch.allclose(norm.train()(X), norm.eval()(X), atol=0.1), (
        "train still normalizes by the batch"
    )
    assert torch.equal(norm.running_mean, before)
    frozen, _ = freeze(norm)
    assert torch.equal(frozen.train()(X), norm.eval()(X))


# -- what is left, and why ---------------------------------------------------------------------------------------------


class FrozenBatchNorm2d(nn.Module):
    """As torchvision's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.eps = 1e-5
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


def flagged() -> nn.Module:
    norm = nn.InstanceNorm2d(6, track_running_stats=True)
    norm.track_running_stats = False
    return norm


@pytest.mark.parametrize(
    ("norm", "policy", "reason"),
    [
        (
            nn.LayerNorm(6),
            "statistics",
            "stores no statistics: it normalizes by its input in training as in evaluation",
        ),
        (
            nn.BatchNorm2d(6, track_running_stats=False),
            "statistics",
            "stores no statistics: it normalizes by its input in training as in evaluation",
        ),
        (FrozenBatchNorm2d(6), "statistics", "its statistics are frozen by its class: nothing moves them"),
        (own.FrozenBatchNorm(6), "affine", "has no gain or bias that is a parameter"),
        (
            flagged(),
            "statistics",
            "track_running_stats is False while it has buffers: it normalizes by its input in evaluation too. Set the "
            "flag to True, or running_mean and running_var to None",
        ),
        (
            torch.jit.script(nn.BatchNorm2d(6)),
            "statistics",
            "is scripted or traced: freeze the model it was made from",
        ),
        (
            parametrizations.weight_norm(nn.BatchNorm1d(6), dim=None),
            "statistics",
            "is parametrized, and torch takes its class apart again: freeze first, parametrize then",
        ),
    ],
    ids=["layer", "untracked", "torchvision", "ours", "flag", "script", "parametrized"],
)  # fmt: skip
def test_left(norm: nn.Module, policy: str, reason: str) -> None:
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    _, report = freeze(nn.Sequential(norm), policy)
    assert not report.done
    assert [site.reason for site in report.left] == [reason]
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())


def test_lazy_norms_are_left_until_they_have_run() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d())
    for policy in ("statistics", "affine"):
        _, report = freeze(model, policy, inplace=True)
        (site,) = report.left
        assert "has not seen an input yet, so its parameters do not exist" in site.reason
    model(seeded(4, 3))
    frozen, _ = freeze(model)
    assert not copy.deepcopy(frozen).train()[0].training


def test_meta_models_can_be_frozen() -> None:
    frozen, report = freeze(nn.Sequential(nn.BatchNorm1d(3, device="meta")))
    assert len(report.done) == 1
    assert not frozen.train()[0].training


def test_a_shared_gain_is_left() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4))
    model[1].weight = model[0].weight
    _, report = freeze(model, "affine", select="0")
    (site,) = report.left
    assert site.reason == "shares a parameter with 1, which would stop training too"


def test_a_norm_that_moves_in_eval_is_refused_with_the_sample() -> None:
    model = nn.Sequential(Loose(3))
    before = snapshot(model)
    with pytest.raises(Deviation) as caught:
        freeze(model, sample=X, inplace=True)
    assert str(caught.value) == (
        "0: its statistics move in a training pass after the freeze, so its eval mode is not what it seems. Nothing "
        "was changed. Leave it out with select, and freeze it by its own means"
    )
    assert caught.value.site == "0"
    assert snapshot(model) == before


def test_select() -> None:
    model = nn.Sequential(net(), net())
    _, report = freeze(model, select="0")
    assert [site.name for site in report.done] == ["0.1", "0.5"]
    _, report = freeze(model, select=["*.1"])
    assert [site.name for site in report.done] == ["0.1", "1.1"]
    _, report = freeze(model, select=lambda path, module: getattr(module, "momentum", 0) == 0.01)
    assert [site.name for site in report.done] == ["0.5", "1.5"]


def test_notes_and_the_rehearsal() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), Activated(4))
    filled(model[1])
    model[0].weight.grad = torch.ones(4)
    before = snapshot(model)
    same, report = freeze(model, "both", dry_run=True)
    assert same is model
    assert snapshot(model) == before
    assert report.notes[:3] == (
        "0: frozen at mean 0 and variance 1, as at initialization: load or recalibrate statistics before training "
        "against them",
        "1: computed by a forward of its own, which stays: what it does in eval is what is frozen",
        "0: holding a gradient of an earlier backward pass: call zero_grad() before the next step",
    )
    assert str(report).startswith(
        "freeze: 2 of 2 normalizations would be done (rehearsed, the model is as it was)"
    )


def test_functions_are_listed_with_a_sample() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.instance_norm(self.norm(x))

    _, report = freeze(Functional(), sample=X)
    assert [site.name for site in report.done] == ["norm"]
    assert [(site.before, site.reason) for site in report.left] == [
        ("F.instance_norm", "a call or arithmetic, not a module: only the code around it can freeze it")
    ]


def test_hand_written_norms_are_left_and_said_to_be_hand_written() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(3))
            self.register_buffer("running_var", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            mean, var = (s.view(3, 1, 1) for s in (self.running_mean, self.running_var))
            return (x - mean) / (var + 1e-5).sqrt()

    class OwnLayerNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()

    _, report = freeze(nn.Sequential(Own(), OwnLayerNorm()), sample=X)
    reason = (
        "is written by hand, and only layers that can be read are changed: write a layer of torch.nn in its place; for "
        "fold, freeze and recalibrate a method __normscope__ that says what it computes is enough"
    )
    assert [(site.name, site.reason) for site in report.left] == [("0", reason), ("1", reason)]


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors() -> None:
    with pytest.raises(BadInput) as caught:
        freeze(net(), "stats")
    assert str(caught.value) == "policy is one of 'statistics', 'affine', 'both'; got 'stats'"
    with pytest.raises(BadInput) as caught:
        freeze(net(), select="bn1")
    assert str(caught.value) == "select='bn1' names none of the 3 normalizations; their paths: 1, 5, 7"
    with pytest.raises(BadInput) as caught:
        freeze(net(), select=[3])
    assert str(caught.value) == (
        "select is a module path, a pattern such as 'backbone.*.bn?', several of these, or a function (path, module) "
        "-> bool; got [3]"
    )
    frozen, _ = freeze(net())
    with pytest.raises(Refused) as refused:
        frozen[1].reset_running_stats()
    assert str(refused.value) == (
        "the running statistics of this BatchNorm2d are frozen, and resetting them would leave mean 0 and variance 1 "
        "that nothing updates. Call normscope.transforms.unfreeze first"
    )
    assert repr(frozen[1]).endswith("track_running_stats=True, frozen=statistics)")
