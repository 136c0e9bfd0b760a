"""Forward hooks: those that act on the output are part of the function, those that record are left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from normscope.errors import BadInput
from normscope.identify.compare import compare
from normscope.identify.modules import identify_module

X = torch.zeros(4, 6)
ACT = "its forward hooks act on its output, and are part of what is told here"
IDLE = "its forward hooks leave its output as it is, and were left out"
HEARD: list[Any] = []


def hooked(hook: Callable[..., Any], *, before: bool = False, **how: Any) -> nn.Module:
    module = nn.LayerNorm(6)
    (module.register_forward_pre_hook if before else module.register_forward_hook)(hook, **how)
    return module


def doubled(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def doubled_in_place(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    output.mul_(2)


def doubled_by_keyword(module: nn.Module, inputs: Any, keywords: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


@pytest.mark.parametrize(
    "module",
    [
        hooked(doubled),
        hooked(doubled_in_place),
        hooked(doubled_by_keyword, with_kwargs=True),
        nn.Sequential(hooked(doubled)),
    ],
    ids=["returned", "in place", "with keywords", "inside"],
)
def test_a_hook_that_doubles_the_output_is_a_gain(module: nn.Module) -> None:
    found = identify_module(module, X)
    assert found.spec is not None
    assert found.weight is not None
    np.testing.assert_allclose(found.weight, 2.0, rtol=1e-12)  # a fit in float64
    assert (found.spec.weight, found.spec.bias) == ("d", "d")
    assert found.notes[0] == ACT
    assert found.notes[1].endswith(
        "bias is added 2 times, where a bias is added once; its gain and bias are as they act"
    )
    apart = compare(module, nn.LayerNorm(6), X)
    assert apart.same is False
    assert f"{type(module).__name__}: {ACT}" in apart.notes
    assert [(d.field, d.a, d.b) for d in apart.differences] == [("weight values", "2", "1")]
    again = compare(module, module, X)
    assert again.same is True
    assert set(again.modes.values()) == {True}


def test_a_comparison_says_which_hooks_were_left_out() -> None:
    recorded = hooked(lambda module, inputs, output: None)
    found = compare(recorded, nn.LayerNorm(6), X)
    assert found.same is True
    assert found.notes == (f"LayerNorm: {IDLE}",)


def test_a_comparison_names_what_torch_compile_was_given() -> None:
    compiled: Any = torch.compile(nn.RMSNorm(6), backend="eager")
    assert compare(compiled, nn.RMSNorm(6), X).name_a == "RMSNorm"
    without_example = compare(compiled, nn.BatchNorm2d(6))
    assert str(without_example).startswith("RMSNorm and BatchNorm2d: not the same function")
    lazy: Any = torch.compile(nn.LazyBatchNorm1d(), backend="eager")
    with pytest.raises(BadInput, match=r"weight of LazyBatchNorm1d is not initialized"):
        identify_module(lazy, X)


def test_a_hook_on_what_torch_compile_wrapped() -> None:
    compiled: Any = torch.compile(nn.LayerNorm(6), backend="eager")
    compiled.register_forward_hook(doubled_by_keyword, with_kwargs=True)
    found = identify_module(compiled, X)
    assert found.weight is not None
    np.testing.assert_allclose(found.weight, 2.0, rtol=1e-12)


def flipped(module: nn.Module, inputs: Any) -> tuple[torch.Tensor]:
    return (inputs[0].flip(-1),)


def clamped(module: nn.Module, inputs: Any) -> tuple[torch.Tensor]:
    return (inputs[0].clamp(-1e3, 1e3),)


def weighted(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * next(module.parameters())


@pytest.mark.parametrize("hook", [flipped, clamped])
def test_a_hook_that_changes_the_input(hook: Callable[..., Any]) -> None:
    module = hooked(hook, before=True)
    assert ACT in identify_module(module, X).notes
    assert compare(module, nn.LayerNorm(6), X).same is False


def test_a_hook_that_acts_with_other_weights_only() -> None:
    module = hooked(weighted)  # its weight is 1
    assert ACT in identify_module(module, X).notes
    assert compare(module, nn.LayerNorm(6), X).same is False


def test_a_hook_that_acts_in_training_only() -> None:
    module = hooked(lambda module, inputs, output: output * 2 if module.training else None)
    assert ACT in identify_module(module.eval(), X).notes
    assert compare(module, nn.LayerNorm(6), X).same is False


def record(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    HEARD.append(output)


class Extractor:
    """Holds the model, and what one of its layers gave."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.features: dict[int, torch.Tensor] = {}
        model[1].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.features[len(self.features)] = output


def test_hooks_that_record_are_left_alone() -> None:
    heard: list[Any] = []
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    extractor = Extractor(model)
    model(X)
    alone = hooked(lambda module, inputs, output: heard.append(output))
    for module in (alone, hooked(record), model[1]):
        found = identify_module(module, X)
        assert found.spec is not None
        assert found.notes == (IDLE,)
    assert compare(alone, nn.LayerNorm(6), X).same is True
    assert (len(heard), len(HEARD), len(extractor.features)) == (0, 0, 1)


def test_hooks_that_hold_what_cannot_be_copied(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:

        def write(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            file.write(str(output))

        def write_and_double(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            file.write(str(output))
            return output * 2

        found = identify_module(hooked(write), X)
        assert found.spec is not None
        assert found.notes == ("its forward hooks return nothing, do not run on a copy, and were left out",)
        with pytest.raises(BadInput) as caught:
            identify_module(hooked(write_and_double), X)
    assert str(caught.value) == (
        "a module is identified on a copy, and the forward hooks of LayerNorm do not run on one (TypeError: cannot "
        "pickle '_io.TextIOWrapper' object), so that what they do to the output is not known. Remove them first: "
        "handle.remove()"
    )
    assert (tmp_path / "log").read_text() == ""


class Growing:
    """A hook that counts its calls."""

    calls = 0

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output * (1 + 0.001 * max(0, self.calls - 4))


def test_a_hook_that_counts_its_calls_is_state() -> None:
    hook = Growing()
    found = identify_module(hooked(hook), X)
    assert found.reason == (
        "it has state that is no tensor of it: with its tensors put back, one input gives another output in call 5 (by "
        "0.001 of the largest)"
    )
    assert hook.calls == 0
