"""What a fold leaves, with the whole reason; and what it folds where copies are allowed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import normscope.nn as own
from normscope.doctor.refusals import Refused
from normscope.errors import BadInput, ModelError
from normscope.transforms import fold, freeze

torch.set_num_threads(1)


def norm(channels: int = 4) -> Any:
    made = nn.BatchNorm2d(channels)
    with torch.no_grad():
        for seed, tensor in enumerate((made.weight, made.bias, made.running_mean, made.running_var)):
            generator = torch.Generator().manual_seed(seed)
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return made


class Net(nn.Module):
    """Parts by name, and a forward given as a function."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def conv(bias: bool = True) -> nn.Conv2d:
    torch.manual_seed(3)
    return nn.Conv2d(4, 4, 3, bias=bias)


X = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0))


class Branch(nn.Conv2d):
    """A forward that takes no bias."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.conv2d(input, self.weight)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def replaced(module: nn.Module) -> Any:
    module.forward = module.forward  # type: ignore[method-assign]
    return module


BACK = "; not forwards: the model returns its output"
CASES: dict[str, tuple[Net, str]] = {
    "relu between": (
        Net(lambda m, x: m.bn(torch.relu(m.a(x))), a=conv(), bn=norm()),
        f"not backwards: relu stands between a (conv2d) and it{BACK}",
    ),
    "two readers": (
        Net(lambda m, x: m.bn(y := m.a(x)) + y, a=conv(), bn=norm()),
        "not backwards: the output of a (conv2d) has 2 readers, and the others want it as it is; not forwards: a sum "
        "in the model reads its output, which is no linear layer or convolution",
    ),
    "a sum before": (
        Net(lambda m, x: m.bn(m.a(x) + m.b(x)), a=conv(), b=conv(), bn=norm()),
        f"not backwards: its input comes from a sum in the model{BACK}",
    ),
    "one conv twice": (
        Net(lambda m, x: m.bn(m.a(x)) + m.a(x + 1), a=conv(), bn=norm()),
        "not backwards: the weight of a (conv2d) is used 2 times in a forward; not forwards: a sum in the model reads "
        "its output, which is no linear layer or convolution",
    ),
    "one norm twice": (
        Net(lambda m, x: m.bn(m.b(m.bn(m.a(x)))), a=conv(), b=conv(), bn=norm()),
        "runs 2 times in a forward",
    ),
    "weight norm": (
        Net(lambda m, x: m.bn(m.a(x)), a=parametrizations.weight_norm(conv()), bn=norm()),
        "not backwards: the weight of a (conv2d) is computed in the forward (parametrized, standardized or packed)"
        + BACK,
    ),
    "a hook on the layer": (
        Net(lambda m, x: m.bn(m.a(x)), a=hooked(conv()), bn=norm()),
        f"not backwards: a has forward hooks, which would see other tensors{BACK}",
    ),
    "a hook on the norm": (
        Net(lambda m, x: m.bn(m.a(x)), a=conv(), bn=hooked(norm())),
        "bn has forward hooks, which would see other tensors",
    ),
    "a forward of its own": (
        Net(lambda m, x: m.bn(m.a(x)), a=replaced(conv()), bn=norm()),
        f"not backwards: the forward of a was replaced{BACK}",
    ),
    "a subclass without bias": (
        Net(lambda m, x: m.bn(m.a(x)), a=Branch(4, 4, 3, bias=False), bn=norm()),
        f"not backwards: the forward of Branch at a takes no bias{BACK}",
    ),
    "a call of a function": (
        Net(lambda m, x: m.bn(torch.conv2d(x, m.a.weight)), a=conv(False), bn=norm()),
        f"not backwards: the model (conv2d) is a call of a function, whose bias is out of reach{BACK}",
    ),
    "another axis": (
        Net(lambda m, x: m.bn(m.a(x).transpose(1, 2)), a=nn.Conv2d(4, 7, (6, 3)), bn=norm()),
        f"not backwards: its statistics do not lie on the features that a (conv2d) makes{BACK}",
    ),
    "a pool after, the input before": (
        Net(lambda m, x: nn.functional.max_pool2d(m.bn(x), 2), bn=norm()),
        "not backwards: its input comes from the model's input; not forwards: the model (max_pool2d) reads its output, "
        "which is no linear layer or convolution",
    ),
    "a transposed convolution after": (
        Net(lambda m, x: m.a(m.bn(x)), a=nn.ConvTranspose2d(4, 4, 3), bn=norm()),
        "not backwards: its input comes from the model's input; not forwards: a (conv_transpose2d) fills in zeros "
        "between the elements and at the border, where the norm's shift of up to ",
    ),
    "one reader of two is no layer": (
        Net(lambda m, x: m.a(y := m.bn(x)) + m.b(torch.relu(y)), a=conv(), b=conv(), bn=norm()),
        "not backwards: its input comes from the model's input; not forwards: relu stands between it and b (conv2d)",
    ),
    "by the batch": (
        Net(lambda m, x: m.bn(m.a(x)), a=conv(), bn=norm().train()),
        "normalizes by the batch, since it is in training mode: its function is not linear",
    ),
    "a variance below zero": (
        Net(lambda m, x: m.bn(m.a(x)), a=conv(), bn=norm()),
        "its scale or shift is not finite in 1 of 4 channels, the first of them 2 (running_mean 1.14, running_var -1, "
        "weight 0.588, bias 0.903)",
    ),
    "not called": (Net(lambda m, x: m.a(x), a=conv(), bn=norm()), "is not called on this sample"),
    "a function": (
        Net(
            lambda m, x: torch.batch_norm(
                m.a(x), m.bn.weight, m.bn.bias, m.bn.running_mean, m.bn.running_var, False, 0.1, 1e-5, False
            ),
            a=conv(),
            bn=norm(),
        ),
        "is never called: a function is, with what it holds (bn.weight)",
    ),
    "a function with a weight of its own": (
        Net(lambda m, x: nn.functional.group_norm(m.a(x), 2), a=conv()),
        "is a call of a function, not a module: there is nothing that could be taken out",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_left_with_the_reason(name: str) -> None:
    model, reason = CASES[name]
    model = copy.deepcopy(model)
    model.training = False
    if name != "by the batch":
        model.eval()
    if name == "a variance below zero":
        model.bn.running_var[2] = -1
    before = copy.deepcopy(model.state_dict())
    same, report = fold(model, X)
    assert report.done == ()
    assert any(one.reason.startswith(reason) for one in report.left), [one.reason for one in report.left]
    assert same is model
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def twice() -> nn.Sequential:
    one = conv()
    return nn.Sequential(one, norm(), nn.ReLU(), one, norm(), nn.ReLU()).eval()


def test_a_shared_layer_is_left_or_gets_a_copy() -> None:
    model = twice()
    _, report = fold(model, X)
    assert [one.reason for one in report.left] == [
        "not backwards: 0 (conv2d) is registered under 2 names; not forwards: relu stands between it and 0 (conv2d)",
        "not backwards: 0 (conv2d) is registered under 2 names; not forwards: the model returns its output",
    ]
    folded, report = fold(model, X, clone_shared=True)
    assert len(report.done) == 2
    assert folded[0] is not folded[3]
    assert model[0] is model[3]
    assert "no longer shared, copied so that it could fold: 3" in report.notes
    with torch.no_grad():
        assert torch.allclose(folded(X), model(X), atol=1e-5)


def test_a_norm_under_two_names() -> None:
    one = norm()
    model = nn.Sequential(conv(), one, nn.ReLU(), conv(), one).eval()
    _, report = fold(model, X)
    assert [one.reason for one in report.left] == ["is registered under 2 names"]
    folded, report = fold(model, X, clone_shared=True, inplace=True)
    assert folded is model
    assert [type(part) for part in model] == [nn.Conv2d, nn.Identity, nn.ReLU, nn.Conv2d, nn.Identity]
    assert len(report.done) == 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.last.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.last(self.words(ids)))


def test_a_tied_weight_is_left_or_untied() -> None:
    model, ids = Tied().eval(), torch.arange(11)[None]
    _, report = fold(model, ids)
    assert [one.reason for one in report.left] == [
        "the weight of head (linear) is tied: it is words.weight and head.weight"
    ]
    folded, report = fold(model, ids, clone_shared=True)
    assert len(report.done) == 1
    assert folded.head.weight is not folded.words.weight
    assert torch.equal(folded.words.weight, model.words.weight)
    assert model.head.weight is model.words.weight


def test_memory_shared_behind_the_names_back() -> None:
    model = Net(lambda m, x: m.bn(m.a(x)), a=conv(), b=conv(), bn=norm()).eval()
    model.b.weight = nn.Parameter(model.a.weight.detach().view(4, 4, 3, 3))
    _, report = fold(model, X)
    (left,) = report.left
    assert left.reason.startswith(
        "not backwards: the weight of a (conv2d) shares its memory with another tensor of the model;"
    )


def test_what_no_graph_shows_is_undone_by_the_check() -> None:
    """The forward reads the weight's values where nothing follows them."""

    def run(m: Any, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            values = m.a.weight.detach().numpy()
        return m.bn(m.a(x)) * float(values.sum())

    net = Net(run, a=conv(), bn=norm()).eval()
    good = nn.Sequential(net, conv(), norm()).eval()
    folded, report = fold(good, X)
    assert [one.name for one in report.done] == ["2"]
    (left,) = report.left
    assert left.name == "0.bn"
    assert left.reason.startswith("undone, the function would change: in eval the outputs would be ")
    with torch.no_grad():
        assert torch.allclose(folded(X), good(X), rtol=1e-4, atol=1e-3)


def test_dropout_between_does_nothing_in_evaluation() -> None:
    model = nn.Sequential(conv(), nn.Dropout(0.5), norm()).eval()
    folded, report = fold(model, X)
    assert len(report.done) == 1
    with torch.no_grad():
        assert torch.allclose(folded(X), model(X), atol=1e-5)


@pytest.mark.parametrize(
    ("run", "op"),
    [
        (lambda m, x: m.bn(nn.functional.dropout(m.a(x), 0.5, training=True)), "mul"),
        (lambda m, x: m.bn(y := nn.functional.dropout(m.a(x), 0.5, training=m.training)) + y, "add"),
    ],
    ids=["that never stops", "with another reader"],
)
def test_dropout_between_that_does_something_or_has_another_reader(run: Any, op: str) -> None:
    model = Net(run, a=conv(), bn=norm()).eval()
    same, report = fold(model, X)
    assert same is model
    (left,) = report.left
    assert left.reason.startswith(f"not backwards: {op} reads the output of a (conv2d); not forwards: ")


def test_training_mode_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        fold(nn.Sequential(conv(), norm()), X)
    assert str(caught.value) == (
        "the model is in training mode, where batch norms normalize by the batch and cannot be folded: call "
        "model.eval() first"
    )


def test_what_cannot_be_checked_is_refused() -> None:
    model = Net(lambda m, x: m.bn(m.a(x)).argmax(1), a=conv(), bn=norm()).eval()
    with pytest.raises(Refused) as caught:
        fold(model, X)
    assert str(caught.value) == (
        "the model returns no floating point tensor, so a fold cannot be checked: fold the part of it that "
        "returns scores"
    )


def test_wrong_arguments() -> None:
    model = nn.Sequential(conv(), norm()).eval()
    with pytest.raises(BadInput) as caught:
        fold(model, None)
    assert str(caught.value) == (
        "fold needs a sample: what feeds what is seen in a forward, and the result is checked on it"
    )
    with pytest.raises(BadInput) as caught:
        fold(model, X, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    assert str(caught.value) == (
        "an optimizer holds the parameters of this model, and without inplace=True a copy is changed: pass both, or "
        "make a new optimizer for the result"
    )
    with pytest.raises(ModelError, match="the model fails on the sample: RuntimeError: "):
        fold(model, torch.randn(2, 3, 5, 5))


class Conditioned(nn.Module):
    """A norm between two convolutions, with what comes beside its input; or over time steps."""

    def __init__(self, norm: nn.Module, beside: Tensor | None) -> None:
        super().__init__()
        self.conv, self.norm, self.out, self.beside = nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 2, 1), beside
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.beside is not None:
            return self.out(self.norm(y, self.beside))
        return self.out(self.norm(y.unflatten(0, (2, 2))).flatten(0, 1))


COMPUTED = (
    "its gain and bias are computed in each call from what comes beside the input: no weight that is fixed could take "
    "them over"
)
WEIGHT = "and the layer beside it has one weight a feature"
OWN = {
    "conditional": (lambda: own.ConditionalBatchNorm2d(8, classes=5), torch.arange(4), COMPUTED),
    "adaptive": (lambda: own.AdaptiveGroupNorm(2, 8, condition_features=5), torch.ones(4, 5), COMPUTED),
    "spatial": (
        lambda: own.SpatiallyAdaptiveBatchNorm2d(8, label_channels=3),
        torch.ones(4, 3, 6, 6),
        COMPUTED,
    ),
    "through time": (
        lambda: own.BatchNormThroughTime2d(2, 8),
        None,
        f"its stored statistics differ along t and c, {WEIGHT}",
    ),
    "effective": (
        lambda: own.TemporalEffectiveBatchNorm2d(2, 8),
        None,
        f"its gain differs along t and c, {WEIGHT}",
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_each_layer_of_ours_has_its_own_reason(name: str) -> None:
    make, beside, reason = OWN[name]
    _, report = fold(Conditioned(make(), beside), torch.randn(4, 3, 8, 8))
    assert [left.reason for left in report.left] == [reason]


@pytest.mark.parametrize("norm", [own.BatchRenorm2d(8), own.GhostBatchNorm2d(8, size=2)])
def test_renormalization_and_ghosts_are_batch_norms_in_evaluation(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU()).eval()
    folded, report = fold(model, torch.randn(4, 3, 8, 8))
    assert (report.left, type(folded[1])) == ((), nn.Identity)


def test_same_padding_of_points_fills_in_nothing() -> None:
    _, report = fold(nn.Sequential(norm(), nn.Conv2d(4, 4, 1, padding="same")).eval(), X)
    assert report.folds[0].into == ("1",)
    _, report = fold(nn.Sequential(norm(), nn.Conv2d(4, 4, (1, 3), padding="same")).eval(), X)
    assert "1 (conv2d) fills in zeros at the border" in report.left[0].reason


def test_a_branch_by_cond_is_followed_as_one_operator() -> None:
    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t * 0.5, lambda t: t * 1.0, (x,))

    behind = Net(lambda m, x: branch(m.bn(m.a(x))), a=conv(), bn=norm()).eval()
    _, report = fold(behind, X)
    assert report.folds[0].into == ("a",)
    between = Net(lambda m, x: m.bn(branch(m.a(x))), a=conv(), bn=norm()).eval()
    _, report = fold(between, X)
    assert not report.done
    beside = Net(lambda m, x: m.bn(y := m.a(x)) + branch(y), a=conv(), bn=norm()).eval()
    _, report = fold(beside, X)
    assert "the output of a (conv2d)" in report.left[0].reason
    _, frozen = freeze(behind, "both", sample=X)
    assert len(frozen.done) == 1
