"""Rules on statistic sets, on faulty and innocent models: one element, tiny, wrong axis, dominant eps, constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normscope
from normscope.doctor.report import Finding

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def findings(code: str, model: nn.Module, *inputs: Tensor, **options: Any) -> list[Finding]:
    report = normscope.check(model, inputs, select=[code], **options)
    assert not [n for n in report.not_run if "internal error" in n.reason], report.not_run
    return list(report.findings)


def only(code: str, model: nn.Module, *inputs: Tensor, **options: Any) -> Finding:
    found = findings(code, model, *inputs, **options)
    assert len(found) == 1, found
    return found[0]


class Call(nn.Module):
    """A forward given as a function."""

    def __init__(self, forward: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = forward

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self, *args)


def pooled(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.AdaptiveAvgPool2d(1), norm)


IMAGES = (8, 3, 8, 8)


# NS101 -------------------------------------------------------------------------------------------------------------


def test_ns101_a_group_of_one_channel_at_one_place() -> None:
    found = only("NS101", pooled(nn.GroupNorm(16, 16)), torch.randn(IMAGES))
    assert (found.site, found.severity, found.mode) == ("2", "error", "eval")
    assert found.message == (
        "each of its 128 statistic sets has one element on an input of shape (8, 16, 1, 1): "
        "the output is the bias, whatever the input."
    )
    assert found.evidence["set_size"] == 1


def test_ns101_without_centering_the_sign_is_left() -> None:
    found = only("NS101", nn.Sequential(nn.Linear(4, 1), nn.RMSNorm(1)), torch.randn(8, 4))
    assert found.severity == "warning"
    assert found.message.endswith("only the sign of the input is left.")


def test_ns101_a_functional_call_over_an_axis_of_one() -> None:
    model = Call(lambda m, x: F.layer_norm(m.linear(x), (1,)), linear=nn.Linear(4, 1))
    assert only("NS101", model, torch.randn(8, 4)).severity == "error"


def test_ns101_training_on_one_sample_raises_and_is_told_in_training_mode_only() -> None:
    model = pooled(nn.BatchNorm2d(16))
    found = only("NS101", model.train(), torch.randn(1, 3, 8, 8))
    assert (found.severity, found.mode) == ("warning", "train")
    assert found.message == (
        "in training, as the model is now, this batch gives one element per channel (input (1, 16, 1, 1)): "
        "PyTorch raises an error here."
    )
    assert findings("NS101", model.eval(), torch.randn(1, 3, 8, 8)) == [], "stored statistics normalize"


@pytest.mark.parametrize("norm", [nn.GroupNorm(4, 16), nn.BatchNorm2d(16), nn.Flatten()], ids=str)
def test_ns101_is_silent_on_larger_sets(norm: nn.Module) -> None:
    model = nn.Sequential(pooled(norm), nn.Flatten(), nn.LayerNorm(16))
    assert findings("NS101", model, torch.randn(IMAGES)) == []


# NS102 -------------------------------------------------------------------------------------------------------------


def test_ns102_pairs_become_signs() -> None:
    model = pooled(nn.GroupNorm(8, 16))
    x = torch.randn(IMAGES)
    found = only("NS102", model, x)
    assert (found.severity, found.mode, found.evidence["set_size"]) == ("warning", "eval", 2)
    with torch.no_grad():
        largest = float(model(x).abs().median())
    assert found.evidence["output_standard_deviation"] == pytest.approx(largest, rel=1e-3)
    assert "so only which of the two is larger is kept" in found.message


def test_ns102_two_samples_are_no_batch() -> None:
    found = only("NS102", nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), torch.randn(2, 4))
    assert (found.severity, found.mode) == ("info", "train")


def test_ns102_few_elements_are_info() -> None:
    found = only("NS102", nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(8, 4))
    assert found.severity == "info"
    assert "4 numbers keep 2 degrees of freedom, and their scale is known to 40.8 %" in found.message


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)),
        nn.Sequential(nn.Linear(4, 2), nn.RMSNorm(2)),
        Call(lambda m, x: F.normalize(m.linear(x), dim=-1), linear=nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)),
    ],
    ids=["eight elements", "two, not centered", "directions in the plane", "a batch of eight"],
)
def test_ns102_is_silent(model: nn.Module) -> None:
    assert findings("NS102", model, torch.randn(8, 4)) == []


def test_ns102_is_silent_where_eps_leaves_pairs_free() -> None:
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.LayerNorm(2, eps=10.0))
    assert findings("NS102", model, torch.randn(8, 4)) == []


# NS103 -------------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Convolution over a sequence, then a layer norm of the last axis, which holds positions."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embed = nn.Conv1d(3, 16, 3, padding=1)
        self.norm = nn.LayerNorm(length)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.relu(self.embed(x)))


def test_ns103_layer_norm_over_tokens_of_equal_size() -> None:
    found = only("NS103", Tokens(16), torch.randn(8, 3, 16))
    assert (found.site, found.severity) == ("norm", "error")
    assert found.message == (
        "conv1d (embed) puts its 16 features on axis 1 of the input (8, 16, 16), but this norm takes axis 2 (size 16) "
        "for the features: the sizes are equal, so nothing complained."
    )
    assert found.fix == "move axis 1 to axis 2 before the norm and back after it"


def test_ns103_sizes_that_differ_are_a_warning() -> None:
    assert only("NS103", Tokens(20), torch.randn(8, 3, 20)).severity == "warning"


def test_ns103_batch_norm_on_tokens_first() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    found = only("NS103", model, torch.randn(8, 5, 6))  # (N, L, C), L = C = 5
    assert (found.severity, found.evidence["feature_axis"], found.evidence["norm_axis"]) == ("error", 2, [1])


def test_ns103_gains_that_come_with_the_input_stand_on_samples_too() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(3, 16)
            self.norm = normscope.nn.AdaptiveLayerNorm(12, condition_features=4)

        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            return self.norm(self.embed(x).transpose(1, 2), condition)

    report = normscope.check(Block(), (torch.randn(8, 12, 3), torch.randn(8, 4)), select=["NS103"])
    (found,) = report.findings
    assert (found.site, found.severity, found.evidence["norm_axis"]) == ("norm", "warning", [2])


def test_ns103_group_norm_on_tokens_first() -> None:
    assert (
        only("NS103", nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 12)), torch.randn(4, 12, 6)).severity
        == "warning"
    )


def test_ns103_instance_norm_reads_vectors_as_one_sample() -> None:
    found = only("NS103", nn.Sequential(nn.Linear(6, 16), nn.InstanceNorm1d(16)), torch.randn(8, 6))
    assert found.severity == "error"
    assert found.message == (
        "an input of shape (8, 16) is read as one sample with 8 channels: each of the 8 samples is normalized over its "
        "16 features, with no gain or bias of its own."
    )


def channels_last(m: Any, x: Tensor) -> Tensor:
    return m.norm(m.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


def mixer(m: Any, x: Tensor) -> Tensor:
    x = m.embed(x)
    x = x + m.tokens(m.norm1(x).transpose(1, 2)).transpose(1, 2)
    return m.channels(m.norm2(x))  # type: ignore[no-any-return]


def heads(m: Any, x: Tensor) -> Tensor:
    q = m.q(x).view(*x.shape[:2], 4, 4).transpose(1, 2)
    return m.norm(q)  # type: ignore[no-any-return]


INNOCENT: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "square maps, channels last": (
        Call(channels_last, conv=nn.Conv2d(3, 8, 1), norm=nn.LayerNorm(8)),
        IMAGES,
    ),
    "square maps, batch norm": (nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)), IMAGES),
    "square maps, group norm": (nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.GroupNorm(2, 8)), IMAGES),
    "square maps, all of them": (nn.Sequential(nn.Conv2d(3, 8, 1), nn.LayerNorm((8, 8, 8))), IMAGES),
    "square maps, instance norm": (nn.Sequential(nn.Conv2d(3, 8, 1), nn.InstanceNorm2d(8)), IMAGES),
    "tokens last": (nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16)), (8, 16, 6)),
    "batch norm of vectors": (nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), (8, 6)),
    "batch norm of sequences": (nn.Sequential(nn.Conv1d(6, 8, 1), nn.BatchNorm1d(8)), (8, 6, 8)),
    "a mixer": (
        Call(
            mixer,
            embed=nn.Linear(6, 8),
            norm1=nn.LayerNorm(8),
            tokens=nn.Linear(8, 8),
            norm2=nn.LayerNorm(8),
            channels=nn.Linear(8, 8),
        ),
        (4, 8, 6),
    ),
    "heads": (Call(heads, q=nn.Linear(6, 16), norm=nn.LayerNorm(4)), (2, 4, 6)),
    "unbatched instance norm": (nn.Sequential(nn.Conv1d(3, 8, 1), nn.InstanceNorm1d(8)), (3, 8)),
    "attention over positions": (
        Call(lambda m, x: F.normalize(m.q(x).transpose(1, 2), dim=-1), q=nn.Linear(6, 8)),
        (4, 8, 6),
    ),
    "a transformer": (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (4, 16, 16)),
}


@pytest.mark.parametrize("name", INNOCENT)
def test_ns103_is_silent(name: str) -> None:
    model, shape = INNOCENT[name]
    assert findings("NS103", model, torch.randn(shape)) == []


# NS401 -------------------------------------------------------------------------------------------------------------


def test_ns401_inputs_that_were_never_scaled() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16))
    x = 1e-3 * torch.randn(8, 16)
    found = only("NS401", model, x)
    assert (found.severity, found.evidence["share_over_variance"]) == ("warning", 1.0)
    with torch.no_grad():
        out = model(x).std(1, correction=0)
    assert found.evidence["median_shrinkage"] == pytest.approx(float(out.quantile(0.5)), rel=1e-3)


def test_ns401_stored_variances() -> None:
    norm = nn.BatchNorm2d(8)
    norm.running_var.copy_(torch.tensor([1e-7, 1e-7, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))  # type: ignore[union-attr]
    found = only("NS401", nn.Sequential(nn.Conv2d(3, 8, 1), norm).eval(), torch.randn(IMAGES))
    assert found.severity == "info"
    assert found.message == (
        "eps 1e-05 is larger than the variance in 33.3 % of 6 stored variances (2 constant sets not counted): before "
        "the gain the output has a standard deviation of 0.0995 instead of 1 (lowest 5 % of the sets)."
    )  # sqrt(1e-7 / (1e-7 + 1e-5))


def relu_dead(dead: int) -> nn.Module:
    conv = nn.Conv2d(3, 8, 1)
    with torch.no_grad():
        conv.bias[:dead] = -100.0  # type: ignore[index]
    return nn.Sequential(conv, nn.ReLU(), nn.InstanceNorm2d(8))


@pytest.mark.parametrize("dead", [0, 4, 8])
def test_ns401_is_silent_on_dead_channels(dead: int) -> None:
    assert findings("NS401", relu_dead(dead), torch.randn(IMAGES)) == []


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-3])
def test_ns401_is_silent_where_variances_are_ordinary(eps: float) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16, eps=eps), nn.BatchNorm1d(16, eps=eps))
    assert findings("NS401", model, torch.randn(8, 16)) == []


# NS402 -------------------------------------------------------------------------------------------------------------


def test_ns402_dead_channels() -> None:
    found = only("NS402", relu_dead(2), torch.randn(IMAGES))
    assert (found.severity, found.evidence["constant_sets"], found.evidence["sets"]) == ("info", 16, 64)
    assert found.message == (
        "16 of 64 statistic sets (25 %) are constant on this batch: their output is the bias; the first variation is "
        "multiplied by gain / sqrt(eps)."
    )


def test_ns402_most_are_constant() -> None:
    assert only("NS402", relu_dead(6), torch.randn(IMAGES)).severity == "warning"


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.GroupNorm(3, 3), nn.InstanceNorm2d(3)], ids=str)
def test_ns402_a_constant_channel_that_comes_out_as_noise(norm: nn.Module) -> None:
    """PyTorch on CPU gives about 8.4 instead of the bias; where a build does not, there is no error to report."""
    x = torch.randn(8, 3, 32, 32)
    x[:, 1] = 1e6 + 0.1
    model = nn.Sequential(norm).train()
    with torch.no_grad():
        noise = float(nn.Sequential(norm).train()(x)[:, 1].abs().max())
    found = only("NS402", model, x)
    assert found.evidence["distance_from_bias"] == pytest.approx(noise, rel=1e-3)
    assert found.severity == ("error" if noise >= 0.1 else "warning" if noise >= 0.01 else "info")


def test_ns402_zero_over_zero() -> None:
    x = torch.randn(8, 3, 8, 8)
    x[:, 1] = 0.0
    found = only("NS402", nn.Sequential(nn.InstanceNorm2d(3, eps=0.0)), x)
    assert found.severity == "error"
    assert found.message.endswith("eps is 0, so their output is 0 / 0, not a number.")


def test_ns402_copies_are_constant_over_the_batch_and_prove_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False))
    report = normscope.check(model, torch.randn(1, 6).repeat(8, 1), select=["NS402"])
    assert (report.findings, report.passed) == ((), ())
    assert [(entry.site, entry.reason) for entry in report.not_run] == [
        ("1", "cannot tell: the samples are not independent, only 1 of 8 samples are distinct (copies)")
    ]
    assert findings("NS402", model, torch.randn(8, 6)) == []


def test_ns402_copies_do_not_excuse_a_set_that_is_constant_in_each_sample() -> None:
    model = nn.Sequential(nn.InstanceNorm2d(3))
    assert only("NS402", model, torch.ones(8, 3, 4, 4)).severity == "warning"


def test_ns402_is_silent_behind_gains_of_zero() -> None:
    norm = nn.GroupNorm(4, 8)
    model = nn.Sequential(relu_dead(2)[:2], norm)  # type: ignore[index]
    assert findings("NS402", model, torch.randn(IMAGES))
    nn.init.zeros_(norm.weight)
    assert findings("NS402", model, torch.randn(IMAGES)) == []


def test_ns402_is_silent_on_padding_that_the_mask_names() -> None:
    x = torch.randn(4, 6, 16)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1:, 3:] = False
    x[~mask] = 0.0
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16))
    assert only("NS402", model, x).severity == "info"
    assert findings("NS402", model, x, mask=mask) == []


def test_ns402_is_silent_where_stored_statistics_normalize() -> None:
    model = nn.Sequential(relu_dead(2)[:2], nn.BatchNorm2d(8)).eval()  # type: ignore[index]
    found = findings("NS402", model, torch.randn(IMAGES))
    assert [f.mode for f in found] == ["train"], (
        "batch statistics of this batch would be constant, and only those"
    )


def test_one_element_is_told_from_the_module_alone() -> None:
    report = normscope.check(torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.LayerNorm(1)))
    assert [(f.code, f.site, f.severity) for f in report.findings if f.code == "NS101"] == [
        ("NS101", "1", "error")
    ]
    healthy = normscope.check(torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.LayerNorm(2)))
    assert not [f for f in healthy.findings if f.code == "NS101"]
    assert any(n.code == "NS101" and "the modules alone" in n.reason for n in healthy.not_run)


def test_eps_above_stored_variances_is_told_without_data() -> None:
    norm = torch.nn.BatchNorm1d(8).eval()
    norm.running_var.fill_(1e-7)
    report = normscope.check(torch.nn.Sequential(norm))
    found = [f for f in report.findings if f.code == "NS401"]
    assert [f.severity for f in found] == ["warning"]
    assert found[0].evidence["median_shrinkage"] == pytest.approx((1e-7 / (1e-7 + 1e-5)) ** 0.5, rel=1e-6)
    norm.running_var.fill_(1.0)
    assert not [f for f in normscope.check(torch.nn.Sequential(norm)).findings if f.code == "NS401"]


def test_gradient_run_survives_a_channels_last_group_norm_at_the_input() -> None:
    # torch 2.13 on the CPU crashes the interpreter where this norm's input gradient is not asked for
    model = torch.nn.Sequential(torch.nn.GroupNorm(2, 4), torch.nn.Conv2d(4, 4, 1))
    x = torch.randn(8, 4, 16, 16).to(memory_format=torch.channels_last)
    report = normscope.check(model, x)
    assert not [n for n in report.not_run if "raised" in n.reason]
