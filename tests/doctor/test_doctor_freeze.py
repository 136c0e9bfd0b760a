"""The freeze probe: flags after the model's own train() and eval(), and what is frozen around a norm."""

from __future__ import annotations

import torch
from torch import nn

from normscope.doctor.probes.freeze import Freeze, FreezeProbe
from normscope.doctor.session import Session
from normscope.doctor.site import Site
from normscope.doctor.subject import Subject


def measure(model: nn.Module) -> dict[str, Freeze]:
    sites = [
        Site(
            name=path, path=path, kind="module", type_name=type(module).__name__, module=module,
            tensors=dict(module.named_parameters()),
        )
        for path, module in model.named_modules()
        if isinstance(module, (nn.BatchNorm1d, nn.LayerNorm))
    ]  # fmt: skip
    with Session(model) as session:
        return FreezeProbe().finish(Subject(model=session.model, session=session, sites=sites))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.LayerNorm(4, elementwise_affine=False)])


class Frozen(nn.Module):
    """Keeps the norms of its first block in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.blocks[0].norms[0].eval()
        return self


def test_flags_are_those_of_the_models_own_methods():
    model = Frozen()
    model.blocks[1].norms[0].eval()  # not sticky
    found = measure(model)
    flags = {
        name: (f.training_now, f.training_after_train, f.training_after_eval)
        for name, f in found.items()
        if name.endswith("norms.0")
    }
    assert flags == {"blocks.0.norms.0": (True, False, False), "blocks.1.norms.0": (False, True, False)}


def test_the_block_is_the_innermost_module_with_parameters_of_others():
    model = Frozen()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    for parameter in model.blocks[1].norms.parameters():
        parameter.requires_grad_(False)
    found = measure(model)
    assert {f.block for name, f in found.items() if name.startswith("blocks.0")} == {
        "blocks.0",
        "blocks.0.norms",
    }
    first, second = found["blocks.0.norms.0"], found["blocks.1.norms.0"]
    assert (first.parameters_frozen, first.block_frozen, first.block) == (True, True, "blocks.0")
    assert (second.parameters_frozen, second.block_frozen, second.block) == (True, False, "blocks.1")


def test_without_parameters_nothing_is_frozen():
    found = measure(nn.Sequential(nn.LayerNorm(4, elementwise_affine=False)))
    assert not found["0"].parameters_frozen
    assert not found["0"].block_frozen


def test_a_lone_norm_is_its_own_block():
    model = nn.BatchNorm1d(4).requires_grad_(False)
    assert measure(model)[""] == Freeze(
        training_now=True,
        training_after_train=True,
        training_after_eval=False,
        parameters_frozen=True,
        block_frozen=True,
        block="",
        rest_frozen=False,
    )


def test_a_model_whose_train_raises_says_so():
    class Exported(nn.Module):
        def train(self, mode: bool = True):
            raise NotImplementedError("no train() here")

    model = Exported()
    with Session(model) as session:
        reason = FreezeProbe().start(Subject(model=model, session=session, sites=[]))
    assert reason == "the model's own train() or eval() raised NotImplementedError: no train() here"
    with Session(Frozen()) as session:
        assert FreezeProbe().start(Subject(model=session.model, session=session, sites=[])) is None


def test_the_model_is_left_alone():
    model = Frozen()
    model.blocks[1].norms[0].eval()
    before = [module.training for module in model.modules()]
    measure(model)
    assert [module.training for module in model.modules()] == before
    assert torch.equal(model.blocks[0].norms[0].running_mean, torch.zeros(4))
