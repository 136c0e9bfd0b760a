"""An optimizer holds what its model holds after a transform, with the state of all that stayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import normscope.nn as own
from normscope.errors import BadInput
from normscope.transforms import convert, fold

torch.set_num_threads(1)
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Optimizer = torch.optim.Optimizer


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
    )
    return nn.Sequential(*layers).eval()


def stepped(model: nn.Module, *, names: bool = False) -> Optimizer:
    """Two groups, gains and biases of norms in the second, after a step."""
    first = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    second = [(name, p) for name, p in model.named_parameters() if p.ndim == 1]
    groups = [first, second] if names else [[p for _, p in group] for group in (first, second)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "lr": 0.1}, {"params": groups[1], "weight_decay": 0.0}]
    )
    model(X).square().sum().backward()
    optimizer.step()
    return optimizer


def held(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize("names", [False, True])
def test_fold(names: bool) -> None:
    model = net()
    optimizer = stepped(model, names=names)
    steps = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    lists = [group["params"] for group in optimizer.param_groups]
    _, report = fold(model, X, inplace=True, optimizer=optimizer)
    assert held(optimizer, model) == [["0.weight", "3.weight", "0.bias"], ["3.bias"]]
    if names:
        assert [group["param_names"] for group in optimizer.param_groups] == held(optimizer, model)
    assert all(group["params"] is one for group, one in zip(optimizer.param_groups, lists, strict=True))
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.1, 0.01),
        (0.001, 0.0),
    ]
    for name in ("0.weight", "3.weight", "3.bias"):
        assert torch.equal(optimizer.state[model.get_parameter(name)]["exp_avg"], steps[name])
    assert len(optimizer.state) == 3
    assert report.notes[-2:] == (
        "optimizer: 4 parameters gone from it (1.weight, 1.bias, 4.weight and 1 more); 1 new parameter in it (0.bias)",
        "the optimizer still remembers the folded weights at their old scale (momentum, second moments)",
    )
    model(X).square().sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 4


def test_a_copy_that_was_shared_is_trained_like_its_original() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 3, 1)
    model = nn.Sequential(conv, nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    model[3].weight = conv.weight
    optimizer = stepped(model)
    fold(model, X, inplace=True, optimizer=optimizer, clone_shared=True)
    assert model[3].weight is not conv.weight
    assert held(optimizer, model) == [["0.weight", "3.weight"], ["0.bias", "3.bias"]]


def test_convert_to_frozen_and_back() -> None:
    model = net()
    optimizer = stepped(model)
    _, plan = convert(model, "frozen", inplace=True, dry_run=True, optimizer=optimizer)
    assert held(optimizer, model)[1] == ["1.weight", "1.bias", "3.bias", "4.weight", "4.bias"]
    _, report = convert(model, "frozen", inplace=True, optimizer=optimizer)
    assert (
        plan.notes
        == report.notes
        == ("optimizer: 4 parameters gone from it (1.weight, 1.bias, 4.weight and 1 more)",)
    )
    assert held(optimizer, model) == [["0.weight", "3.weight"], ["3.bias"]]
    assert len(optimizer.state) == 3
    _, report = convert(model, "batch", select="1", inplace=True, sample=X, optimizer=optimizer)
    assert held(optimizer, model) == [["0.weight", "3.weight"], ["3.bias"]]
    assert report.notes[-1] == (
        "optimizer: not in it, so not trained by it: 1.weight, 1.bias, see add_param_group"
    )


def test_convert_that_keeps_all() -> None:
    model = net()
    optimizer = stepped(model)
    before = held(optimizer, model)
    _, report = convert(model, "group", inplace=True, optimizer=optimizer)
    assert held(optimizer, model) == before
    assert report.notes == ("optimizer: all parameters stay in it",)


def test_an_empty_group_stays() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), own.BatchNorm2d(4)).eval()
    optimizer = torch.optim.SGD(
        [{"params": [*model[0].parameters()]}, {"params": [*model[1].parameters()]}], lr=1.0
    )
    fold(model, X, inplace=True, optimizer=optimizer)
    assert held(optimizer, model) == [["0.weight", "0.bias"], []]
    optimizer.step()


MODEL = net()


@pytest.mark.parametrize(
    ("optimizer", "inplace", "text"),
    [
        (
            torch.optim.SGD(MODEL.parameters(), lr=1.0), False,
            "an optimizer holds the parameters of this model, and without inplace=True a copy is changed: pass both, "
            "or make a new optimizer for the result",
        ),
        (
            torch.optim.LBFGS(MODEL.parameters()), True,
            "LBFGS remembers all parameters as one vector, out of which none can be taken: make a new one for the "
            "result",
        ),
        (
            torch.optim.SGD(net().parameters(), lr=1.0), True,
            "the optimizer holds no parameter of this model: is it that of another copy?",
        ),
    ],
)  # fmt: skip
def test_errors(optimizer: Any, inplace: bool, text: str) -> None:
    for change in (
        lambda: fold(MODEL, X, inplace=inplace, optimizer=optimizer),
        lambda: convert(MODEL, "group", inplace=inplace, optimizer=optimizer),
    ):
        with pytest.raises(BadInput) as caught:
            change()
        assert str(caught.value) == text
