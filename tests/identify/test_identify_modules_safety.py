"""The module that is identified is never called and never written; what cannot be copied is refused with the reason."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from normscope.errors import BadInput, ModelError
from normscope.identify.compare import compare
from normscope.identify.modules import identify_module


class Counting(nn.BatchNorm1d):
    """Writes whatever it can while it runs."""

    def __init__(self) -> None:
        super().__init__(6)
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(self.calls))
        self.weight.data.add_(0.0)
        x = super().forward(x)
        return x


def test_the_module_is_left_as_it_was() -> None:
    module = Counting().train()
    module.weight.grad = torch.ones(6)
    heard: list[Any] = []
    module.register_forward_hook(lambda *args: heard.append(args))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    storages = {name: value.data_ptr() for name, value in module.state_dict().items()}
    versions = {name: value._version for name, value in module.state_dict().items()}
    generator = torch.random.get_rng_state()
    found = identify_module(module, torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    assert found.spec is not None
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert module.training
    assert module.calls == []
    assert heard == []
    assert torch.equal(module.weight.grad, torch.ones(6))
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
        assert (value.data_ptr(), value._version) == (storages[name], versions[name])
    assert "its forward hooks leave its output as it is, and were left out" in found.notes


def test_the_example_is_left_as_it_was() -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sub_(x.mean(-1, keepdim=True)).div_((x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt())

    example = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    before = example.clone()
    assert identify_module(InPlace(), example).spec is not None
    assert torch.equal(example, before)


def test_half_precision_modules_are_identified_in_float64() -> None:
    found = identify_module(nn.LayerNorm(6).bfloat16(), torch.zeros(4, 6, dtype=torch.bfloat16))
    assert found.spec is not None
    assert found.spec.eps == 1e-5


def test_inference_and_frozen_parameters_are_no_obstacle() -> None:
    module = nn.LayerNorm(6).requires_grad_(False)
    with torch.inference_mode():
        example = torch.zeros(4, 6)
    assert identify_module(module, example).spec is not None


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(BadInput) as caught:
        identify_module(nn.LazyBatchNorm1d(), torch.zeros(4, 6))
    assert str(caught.value) == (
        "a module is identified by its values, and weight of LazyBatchNorm1d is not initialized yet (a lazy module). "
        "Run one forward first"
    )


def test_meta_modules_are_refused() -> None:
    with pytest.raises(BadInput) as caught:
        identify_module(nn.LayerNorm(6, device="meta"), torch.zeros(4, 6))
    assert str(caught.value) == (
        "a module is identified by its values, and weight of LayerNorm is on the meta device. Load its values first: "
        "module.to_empty(device='cpu'), then load_state_dict"
    )


def test_what_cannot_be_copied_is_refused() -> None:
    class Open(nn.LayerNorm):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle a handle")

    with pytest.raises(BadInput) as caught:
        identify_module(Open(6), torch.zeros(4, 6))
    assert str(caught.value) == (
        "a module is identified on a copy, and Open cannot be copied (TypeError: cannot pickle a handle). Drop open "
        "handles first, or pass a function of one array"
    )


def test_an_example_without_floating_numbers_is_refused() -> None:
    with pytest.raises(BadInput) as caught:
        identify_module(nn.LayerNorm(6), torch.zeros(4, 6, dtype=torch.int64))
    assert str(caught.value) == (
        "an example holds one floating array to vary; got torch.int64. Pass a tensor like those that the module "
        "normalizes"
    )


def test_a_module_that_raises_on_the_example() -> None:
    with pytest.raises(ModelError) as caught:
        identify_module(nn.LayerNorm(6), torch.zeros(4, 7))
    assert str(caught.value).startswith(
        "module LayerNorm raised on a torch.float64 input of shape (4, 7) (RuntimeError: Given normalized_shape=[6]"
    )
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_random_numbers_of_other_libraries_are_put_back() -> None:
    class Drawing(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0 * random.random() + 0 * np.random.rand()  # noqa: NPY002

    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert identify_module(Drawing(6), torch.zeros(4, 6)).spec is not None
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


def test_a_whole_network_is_judged_as_a_function() -> None:
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()) for _ in range(4)]
    found = identify_module(nn.Sequential(*blocks), torch.zeros(4, 6))
    assert found.spec is None
    assert found.notes[-1] == (
        "it has 16 tensors, more than a normalization: it was judged as a function of its input alone"
    )


def test_another_shape_is_no_normalization() -> None:
    found = identify_module(nn.Linear(6, 3), torch.zeros(4, 6))
    assert found.reason == (
        "an input of shape (4, 6) gives an output of shape (4, 3); a normalization keeps the shape"
    )


def test_hooks_of_torch_stay() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    found = identify_module(copy.deepcopy(module), torch.zeros(4, 6))
    assert found.spec is None
    assert not any("hooks" in note for note in found.notes)


def test_a_pruned_module_that_was_called() -> None:
    module = nn.LayerNorm(6)
    with torch.no_grad():
        module.weight.copy_(torch.arange(1.0, 7.0))
    prune.l1_unstructured(module, "weight", amount=2)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    module(x)
    pruned = (
        module.weight
    )  # made of weight_orig and a mask, by a hook of torch: not a tensor that torch copies
    kept = module(x)
    module.kept = [kept]
    found = identify_module(module, x)
    assert found.spec is not None
    assert found.weight is not None
    assert found.weight.tolist() == [0.0, 0.0, 3.0, 4.0, 5.0, 6.0]
    assert found.notes == ()
    assert module.weight is not pruned
    assert kept.grad_fn is not None
    plain = nn.LayerNorm(6)
    with torch.no_grad():
        plain.weight.copy_(module.weight)
    assert compare(module, plain, x).same is True
    assert compare(module, nn.LayerNorm(6), x).same is False


def test_a_compiled_module_is_copied_without_its_wrapper() -> None:
    x = torch.zeros(4, 6)
    compiled: Any = torch.compile(nn.LayerNorm(6), backend="eager")
    held = nn.Sequential(compiled)
    held(x)
    for module in (compiled, held):
        assert compare(module, nn.LayerNorm(6), x).same is True
        assert identify_module(module, x).spec == identify_module(nn.LayerNorm(6), x).spec
