"""Every torch.nn norm in both modes: what behaviour shows is what the class says (read by other code)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import normscope.nn as own
from normscope.identify.modules import identify_module
from normscope.reading import read
from normscope.spec import Running

VERIFIED = 1e-9
"""the promise; float64 gives 1e-15"""


def trained(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with random parameters and buffers, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            if name.endswith("var"):
                tensor.abs_().add_(0.5)
    return module


BATCHED = [
    (nn.BatchNorm1d(6), (4, 6)),
    (nn.BatchNorm1d(6, eps=1e-3, momentum=0.01), (4, 6, 5)),
    (nn.BatchNorm2d(6), (4, 6, 3, 5)),
    (nn.BatchNorm2d(6, affine=False), (4, 6, 3, 5)),
    (nn.BatchNorm2d(6, momentum=None), (4, 6, 3, 5)),
    (nn.BatchNorm2d(6, momentum=0.37), (4, 6, 3, 5)),
    (nn.BatchNorm2d(6, momentum=1.0), (4, 6, 3, 5)),
    (nn.BatchNorm2d(6, track_running_stats=False), (4, 6, 3, 5)),
    (nn.BatchNorm3d(6), (2, 6, 2, 3, 5)),
    (nn.InstanceNorm1d(6), (4, 6, 5)),
    (nn.InstanceNorm2d(6, affine=True), (4, 6, 3, 5)),
    (nn.InstanceNorm2d(6, affine=True, track_running_stats=True), (4, 6, 3, 5)),
    (nn.InstanceNorm2d(6, track_running_stats=True, momentum=0.3), (4, 6, 3, 5)),
    (nn.InstanceNorm3d(6, affine=True), (2, 6, 2, 3, 5)),
]
STATELESS = [
    (nn.GroupNorm(2, 6), (4, 6, 3, 5)),
    (nn.GroupNorm(3, 6, affine=False), (4, 6, 3, 5)),
    (nn.GroupNorm(1, 6), (4, 6, 5)),
    (nn.GroupNorm(6, 6), (4, 6, 5)),
    (nn.LayerNorm(6), (4, 3, 6)),
    (nn.LayerNorm(6, elementwise_affine=False), (4, 3, 6)),
    (nn.LayerNorm(6, bias=False), (4, 3, 6)),
    (nn.LayerNorm((3, 5), eps=1e-12), (4, 6, 3, 5)),
    (nn.LayerNorm((6, 3, 5)), (4, 6, 3, 5)),
    (nn.RMSNorm(6), (4, 3, 6)),
    (nn.RMSNorm(6, eps=1e-6), (4, 3, 6)),
    (nn.RMSNorm((3, 6), elementwise_affine=False), (4, 3, 6)),
]
OWN = [
    (own.BatchNorm2d(6), (4, 6, 3, 5)),
    (own.InstanceNorm2d(6, affine=True, track_running_stats=True), (4, 6, 3, 5)),
    (own.GroupNorm(2, 6), (4, 6, 3, 5)),
    (own.LayerNorm(6), (4, 3, 6)),
    (own.RMSNorm(6), (4, 3, 6)),
    (own.ScaleNorm(6), (4, 3, 6)),
    (own.PixelNorm(), (4, 6, 3, 5)),
    (own.L2Norm(), (4, 3, 6)),
    (own.ChannelsFirstLayerNorm(6), (4, 6, 3, 5)),
]


def named(case: Any) -> str:
    return f"{case}" if isinstance(case, nn.Module) else "x".join(map(str, case))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("module", "shape"), [*BATCHED, *STATELESS, *OWN], ids=named)
def test_behaviour_says_what_the_class_says(
    module: nn.Module, shape: tuple[int, ...], training: bool
) -> None:
    module = trained(module).train(training)
    expected = read(module, input_ndim=len(shape))
    found = identify_module(module, torch.zeros(shape))
    assert found.spec is not None, str(found)
    told = expected.spec.replace(eps=2.0**-52) if expected.spec.eps is None else expected.spec
    mine = found.spec.replace(eps=2.0**-52) if found.spec.eps is None else found.spec
    same = mine.same_function(told, shape=shape)
    assert same, f"{same}\n{found}"
    assert found.spec.running == expected.spec.running
    assert found.spec.weight_offset == expected.spec.weight_offset
    assert found.mode == expected.mode_now, str(found)
    assert found.max_error is not None
    assert found.max_error < VERIFIED
    for what, value in (("weight", found.weight), ("bias", found.bias)):
        tensor = expected.tensors.get(what)
        assert (value is None) == (tensor is None)
        if tensor is not None and value is not None:
            np.testing.assert_array_equal(value.ravel(), tensor.detach().double().numpy().ravel())


@pytest.mark.parametrize("module", [nn.RMSNorm(6), nn.RMSNorm(6, eps=None)])
def test_an_eps_that_follows_the_dtype_is_none(module: nn.Module) -> None:
    found = identify_module(module, torch.zeros(4, 6))
    assert found.spec is not None
    assert found.spec.eps is None


def test_synchronized_batch_norm_in_eval() -> None:
    module = trained(nn.SyncBatchNorm(6)).eval()
    found = identify_module(module, torch.zeros(4, 6, 3, 5))
    assert found.spec is not None, str(found)
    assert found.spec.stats == "b c ... -> c"
    assert found.mode == "running"
    assert found.spec.eps == 1e-5
    np.testing.assert_array_equal(found.weight, module.weight.detach().double().numpy())


class EvaluatesOnly(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise RuntimeError("needs a process group")
        return super().forward(x)


def test_a_mode_that_raises_is_said() -> None:
    found = identify_module(trained(EvaluatesOnly(6)).eval(), torch.zeros(4, 6, 3, 5))
    assert found.spec is not None, str(found)
    assert (found.spec.stats, found.mode, found.spec.eps) == ("b c ... -> c", "running", 1e-5)
    assert found.notes == (
        "in training it raises, so that mode was not seen (RuntimeError: needs a process group)",
        "the axes that statistics were taken over were not seen: only stored ones were used",
        "how training moves them was not seen: momentum and correction stand at their defaults",
    )


def test_mode_is_kept_or_forced() -> None:
    module = trained(nn.BatchNorm2d(6)).eval()
    x = torch.zeros(4, 6, 3, 5)
    assert identify_module(module, x).mode == "running"
    assert identify_module(module, x, training=True).mode == "batch"
    assert not module.training


def test_the_momentum_is_seen_from_training_though_eval_was_asked() -> None:
    module = trained(nn.BatchNorm2d(6, momentum=0.25)).eval()
    found = identify_module(module, torch.zeros(4, 6, 3, 5))
    assert found.spec is not None
    assert found.spec.running is not None
    assert (found.spec.running.momentum, found.spec.running.correction) == (0.25, 1)


def test_cumulative_statistics_after_some_batches() -> None:
    module = nn.BatchNorm2d(6, momentum=None)
    for seed in range(3):
        module(torch.randn(4, 6, 3, 5, generator=torch.Generator().manual_seed(seed)))
    found = identify_module(module, torch.zeros(4, 6, 3, 5))
    assert found.spec is not None
    assert found.spec.running is not None
    assert found.spec.running.average == "cumulative"


def test_layout_names_the_axes() -> None:
    found = identify_module(nn.LayerNorm(6), torch.zeros(4, 3, 6), layout="b t d")
    assert found.spec is not None
    assert found.spec.same_function(read(nn.LayerNorm(6)).spec, shape=(4, 3, 6))


@pytest.mark.parametrize("gain", [0.0, 1.0])
def test_gains_of_zero_hide_nothing(gain: float) -> None:
    module = nn.LayerNorm(6)
    nn.init.constant_(module.weight, gain)
    found = identify_module(module, torch.zeros(4, 6))
    assert found.spec is not None
    assert found.weight is not None
    assert found.weight.tolist() == [gain] * 6


class Constant(nn.Module):
    """An eps that is a number, though it is float64's machine epsilon."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2.0**-52)


def test_an_eps_that_is_a_number_is_not_none() -> None:
    found = identify_module(Constant(), torch.zeros(4, 6))
    assert found.spec is not None
    assert found.spec.eps == 2.0**-52


@pytest.mark.parametrize("shape", [(1, 6, 8, 8), (2, 6, 100, 100)], ids=["one sample", "large"])
def test_unhandy_examples(shape: tuple[int, ...]) -> None:
    found = identify_module(trained(nn.BatchNorm2d(6)), torch.zeros(shape))
    assert found.spec is not None, str(found)
    assert (found.spec.stats, found.mode) == ("b c ... -> c", "batch")


def test_compiled_modules_are_seen_through() -> None:
    module = nn.LayerNorm(6)
    found = identify_module(torch.compile(module), torch.zeros(4, 6))  # type: ignore[arg-type]
    assert found.spec is not None
    assert found.name == "module LayerNorm, in training"


def test_a_single_channel_is_a_channel() -> None:
    found = identify_module(nn.BatchNorm2d(1), torch.zeros(4, 1, 5, 3))
    assert found.spec is not None, str(found)
    assert (found.spec.stats, found.spec.weight, found.spec.bias) == ("b c ... -> c", "c", "c")


def test_statistics_that_never_move() -> None:
    found = identify_module(nn.BatchNorm2d(6, momentum=0.0), torch.zeros(4, 6, 3, 5))
    assert found.spec is not None
    assert found.spec.running == Running(momentum=0.0)
    assert found.mode == "batch"


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_ruined_statistics_hide_nothing(value: float) -> None:
    module = nn.BatchNorm2d(6).eval()
    assert module.running_var is not None
    module.running_var.fill_(value)
    found = identify_module(module, torch.zeros(4, 6, 3, 5))
    assert found.spec is not None, str(found)
    assert (found.spec.eps, found.mode) == (1e-5, "running")


def test_one_sample_of_which_training_takes_no_statistics() -> None:
    found = identify_module(nn.BatchNorm1d(6), torch.zeros(1, 6))
    assert found.spec is not None, str(found)
    assert (found.spec.stats, found.mode) == ("b c ... -> c", "batch")
