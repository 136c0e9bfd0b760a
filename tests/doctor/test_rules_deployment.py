"""Rules on what happens to a norm in deployment (folds, exports, flags), and on the last batch of an epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normscope
from normscope.doctor.report import Finding

torch.set_num_threads(1)


def images(count: int = 8, channels: int = 3) -> torch.Tensor:
    return torch.randn(count, channels, 8, 8, generator=torch.Generator().manual_seed(0))


def found(model: nn.Module, code: str, inputs: object, **options: object) -> tuple[Finding, ...]:
    report = normscope.check(model, inputs, select=[code], **options)  # type: ignore[arg-type]
    nothing_to_ask = ("no site keeps running statistics", "no site whose specification is known")
    assert not [n for n in report.not_run if n.reason not in nothing_to_ask], report.not_run
    return report.findings


def obstacles(model: nn.Module, inputs: object) -> dict[str, str]:
    """Site -> what stands in the way of its fold."""
    findings = found(model, "NS801", inputs)
    assert {f.severity for f in findings} <= {"info"}
    return {f.site: "; ".join(f.evidence["obstacles"]) for head in findings for f in (head, *head.also)}


def foldable(model: nn.Module, inputs: object) -> dict[str, str]:
    """Site -> the layer that it could be folded into."""
    findings = found(model, "NS804", inputs)
    assert len(findings) < 2, "one finding for all of them"
    return {f.site: f.evidence["into"] for head in findings for f in (head, *head.also)}


def used(norm: nn.Module) -> nn.Module:
    """A batch norm with statistics, gain and bias that do something."""
    g = torch.Generator().manual_seed(1)
    for tensor in (norm.running_mean, norm.bias.data):
        tensor.copy_(torch.randn(tensor.shape, generator=g))
    for tensor in (norm.running_var, norm.weight.data):
        tensor.copy_(0.5 + torch.rand(tensor.shape, generator=g))
    return norm


def conv(**settings: object) -> nn.Conv2d:
    return nn.Conv2d(3, 8, 3, **settings)  # type: ignore[arg-type]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 8), used(nn.BatchNorm1d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x.flatten(2).transpose(1, 2)).transpose(1, 2))


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(), used(nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.norm(y) + y


class Function(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.norm = nn.Parameter(torch.randn(8, 3, 3, 3)), used(nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(F.conv2d(x, self.kernel))


class WithoutBias(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.weight)


class Padding(nn.Conv2d):
    """As EfficientNet's: the layer pads by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias)


def hooked() -> nn.Module:
    layer = conv()
    layer.register_forward_hook(lambda *_: None)
    return layer


def shared_norm() -> nn.Module:
    norm = used(nn.BatchNorm2d(3))
    return nn.Sequential(nn.Conv2d(3, 3, 1), norm, nn.Conv2d(3, 3, 1), norm)


def shared_layer() -> nn.Module:
    layer = nn.Conv2d(3, 3, 1)
    return nn.Sequential(layer, used(nn.BatchNorm2d(3)), layer, nn.ReLU())


class TestFoldable:
    @pytest.mark.parametrize(
        ("model", "expected"),
        [
            (nn.Sequential(conv(), used(nn.BatchNorm2d(8))), {"1": "0"}),
            (nn.Sequential(conv(bias=False), used(nn.BatchNorm2d(8)), nn.ReLU()), {"1": "0"}),
            (nn.Sequential(Padding(3, 8, 3, bias=False), used(nn.BatchNorm2d(8))), {"1": "0"}),
            (nn.Sequential(nn.ConvTranspose2d(3, 8, 3), used(nn.BatchNorm2d(8))), {"1": "0"}),
            (nn.Sequential(nn.Flatten(), nn.Linear(192, 8), used(nn.BatchNorm1d(8))), {"2": "1"}),
            (Tokens(), {"norm": "linear"}),
        ],
        ids=["conv", "conv without bias", "padding inside", "transposed", "linear", "tokens"],
    )  # fmt: skip
    def test_into_the_layer_before(self, model: nn.Module, expected: dict[str, str]) -> None:
        model.eval()
        assert foldable(model, images()) == expected
        assert obstacles(model, images()) == {}

    def test_many_are_one_finding(self) -> None:
        blocks = (
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), used(nn.BatchNorm2d(3)), nn.ReLU()) for _ in range(5)
        )
        (finding,) = found(nn.Sequential(*blocks), "NS804", images())
        assert (finding.severity, finding.evidence["sites"], len(finding.also)) == ("info", 5, 4)

    @pytest.mark.parametrize(
        "model",
        [
            nn.Sequential(conv(), nn.ReLU(), nn.BatchNorm2d(8)),
            nn.Sequential(conv(), nn.GroupNorm(2, 8)),
            nn.Sequential(conv(), nn.BatchNorm2d(8, track_running_stats=False)),
            nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), conv()),
        ],
        ids=["activation between", "group norm", "no running statistics", "activation behind"],
    )
    def test_not_told(self, model: nn.Module) -> None:
        assert foldable(model, images()) == {}
        assert obstacles(model, images()) == {}

    def test_what_is_told_can_be_folded(self) -> None:
        """The fold, done: into the layer after where that does not pad."""
        norm, layer = used(nn.BatchNorm2d(3)), conv()
        model = nn.Sequential(norm, layer).double().eval()
        assert foldable(model, images().double()) == {"0": "1"}
        y, folded = model(images().double()), _into_the_layer_after(norm, layer)
        assert (folded(images().double()) - y).abs().max() < 1e-12  # float64: 27 products of order one


def _into_the_layer_after(norm: nn.Module, layer: nn.Conv2d) -> nn.Conv2d:
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    shift = norm.bias - scale * norm.running_mean
    folded = nn.Conv2d(3, 8, 3, padding=layer.padding).double()
    with torch.no_grad():
        folded.weight.copy_(layer.weight * scale[:, None, None])
        folded.bias.copy_(layer.bias + (layer.weight.sum((2, 3)) * shift).sum(1))
    return folded


class TestUnsafeToTransform:
    @pytest.mark.parametrize(
        ("model", "site", "what"),
        [
            (shared_norm(), "1", "the norm is registered under 2 names"),
            (shared_layer(), "1", "0 (conv2d) is registered under 2 names"),
            (Fork(), "norm", "the output of conv (conv2d) has 2 readers, and the others want it as it is"),
            (
                nn.Sequential(nn.utils.parametrizations.weight_norm(conv()), used(nn.BatchNorm2d(8))),
                "1",
                "the weight of 0 (conv2d) is computed in the forward (parametrized, standardized or packed)",
            ),
            (
                Function(),
                "norm",
                "the model (conv2d) is a call of a function, whose bias is out of reach",
            ),
            (
                nn.Sequential(WithoutBias(3, 8, 3, bias=False), used(nn.BatchNorm2d(8))),
                "1",
                "the forward of WithoutBias at 0 takes no bias",
            ),
            (
                nn.Sequential(hooked(), used(nn.BatchNorm2d(8))),
                "1",
                "0 has forward hooks, which would see other tensors",
            ),
        ],
        ids=["shared norm", "shared layer", "two readers", "weight norm", "function", "no bias", "hook"],
    )
    def test_what_stands_in_the_way(self, model: nn.Module, site: str, what: str) -> None:
        model.eval()
        assert obstacles(model, images()) == {site: what}
        assert site not in foldable(model, images())

    def test_a_norm_under_two_names(self) -> None:
        model = nn.Sequential(conv(), used(nn.BatchNorm2d(8)))
        model.alias = model[1]
        model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
        assert obstacles(model, images()) == {"1": "the norm is registered under 2 names"}

    def test_a_replaced_forward(self) -> None:
        model = nn.Sequential(conv(), used(nn.BatchNorm2d(8)))
        plain = model[0].forward
        model[0].forward = lambda x: plain(x)  # type: ignore[method-assign]
        assert obstacles(model, images()) == {"1": "the forward of 0 was replaced"}

    def test_batch_statistics_in_eval(self) -> None:
        class Adapting(nn.Sequential):
            def train(self, mode: bool = True) -> Adapting:
                super().train(mode)
                self[1].train()
                return self

        model = Adapting(conv(), used(nn.BatchNorm2d(8))).eval()
        assert obstacles(model, images()) == {
            "1": "the norm normalizes by the batch, also in evaluation: its function is not linear"
        }

    @pytest.mark.parametrize("padding", [1, "same"])
    def test_padding_between_is_wrong_at_the_border_alone(self, padding: int | str) -> None:
        norm, layer = used(nn.BatchNorm2d(3)), conv(padding=padding)
        model = nn.Sequential(norm, layer).double().eval()
        x = images().double()
        (finding,) = found(model, "NS801", x)
        assert (finding.site, finding.evidence["where"]) == ("0", "after")
        shift = norm.bias - norm.weight * norm.running_mean / (norm.running_var + norm.eps).sqrt()
        assert finding.evidence["largest_shift"] == pytest.approx(shift.abs().max().item(), rel=1e-12)
        assert "1 (conv2d) fills in zeros at the border" in finding.message
        assert foldable(model, x) == {}
        difference = (_into_the_layer_after(norm, layer)(x) - model(x)).abs().amax((0, 1))
        assert difference[1:-1, 1:-1].max() < 1e-12  # float64: 27 products of order one
        assert difference[0].min() > 1e-3

    def test_padding_with_values_of_the_image_is_not_judged(self) -> None:
        model = nn.Sequential(used(nn.BatchNorm2d(3)), conv(padding=1, padding_mode="reflect")).eval()
        assert obstacles(model, images()) == {}

    def test_padding_does_not_matter_where_the_layer_before_can_take_it(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 3, 1), used(nn.BatchNorm2d(3)), conv(padding=1)).eval()
        assert obstacles(model, images()) == {}
        assert foldable(model, images()) == {"1": "0"}


class Looked(nn.Module):
    """Somebody looks at what the convolution, or the norm, returns, in a way that is no operation on a tensor."""

    def __init__(self, look: Callable[[nn.Module, torch.Tensor], object], at: str) -> None:
        super().__init__()
        self.look, self.at = look, at
        self.conv, self.norm, self.out = conv(), used(nn.BatchNorm2d(8)), nn.Conv2d(8, 2, 1)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x) if self.at == "conv" else torch.relu(self.conv(x))
        if self.at == "conv":
            self.look(self, y)
            return self.out(torch.relu(self.norm(y)))
        z = self.norm(y)
        self.look(self, z)
        return self.out(z)


LOOKS = {
    "view": (lambda m, y: y[:, :2].clamp_(-50, 50), "clamp_ writes into {} in place"),
    "numpy": (lambda m, y: y.detach().numpy().max(), "numpy takes {} out of sight"),
    "kept": (lambda m, y: setattr(m, "kept", y), "the model keeps {} as kept after the forward"),
}


class TestReadersThatNoGraphShows:
    """What `fold` refuses must not be called foldable; both read one watch."""

    # a write into what the norm reads is in the graph: the norm's neighbour is then no convolution
    @pytest.mark.parametrize(
        ("name", "at"),
        [(name, at) for name in LOOKS for at in ("conv", "norm") if (name, at) != ("view", "conv")],
    )
    def test_seen_by_rules_and_by_the_fold(self, name: str, at: str) -> None:
        look, what = LOOKS[name]
        model = Looked(look, at)
        told = what.format("the output of conv (conv2d)" if at == "conv" else "its output")
        assert foldable(model, images()) == {}
        assert told in obstacles(model, images())["norm"]
        _, report = normscope.transforms.fold(model, images())
        (left,) = report.left
        assert told in left.reason

    def test_a_hook_elsewhere_reads_it(self) -> None:
        model = nn.Sequential(nn.Sequential(conv()), used(nn.BatchNorm2d(8)), nn.ReLU()).eval()
        assert foldable(model, images()) == {"1": "0.0"}
        model[0].register_forward_hook(lambda *_: None)
        told = "the forward hooks of 0 see the output of 0.0 (conv2d)"
        assert (foldable(model, images()), obstacles(model, images())) == ({}, {"1": told})


def traced(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the tracer deprecates itself, and warns of the size test in batch norm
        return torch.jit.trace(model, images(), check_trace=False)


def scripted(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(model)


def exported(model: nn.Module) -> nn.Module:
    return torch.export.export(model, (images(),)).module()


def small(norm: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(conv(), nn.BatchNorm2d(8) if norm is None else norm, nn.ReLU())


class TestTrainingModeExport:
    @pytest.mark.parametrize("form", [traced, exported])
    def test_in_training_mode(self, form) -> None:  # type: ignore[no-untyped-def]
        report = normscope.check(form(small().train()), images(), select=["NS802", "NS202"])
        (finding,) = (f for f in report.findings if f.code == "NS802")
        assert (finding.site, finding.severity, finding.mode) == ("1", "warning", "eval")
        assert finding.evidence["strength"] > 0
        assert "other samples of the batch change its output" in finding.message

    @pytest.mark.parametrize("form", [traced, exported])
    def test_in_eval_mode(self, form) -> None:  # type: ignore[no-untyped-def]
        assert not found(form(small().eval()), "NS802", images())

    def test_a_script_has_its_modes(self) -> None:
        assert not found(scripted(small().train()), "NS802", images())

    def test_a_module_in_training_mode_is_no_export(self) -> None:
        assert not found(small().train(), "NS802", images())

    @pytest.mark.parametrize("form", [traced, exported])
    @pytest.mark.parametrize("tracking", [False, True])
    def test_instance_norm_is_always_in_training_mode(self, form, tracking: bool) -> None:  # type: ignore[no-untyped-def]
        model = small(nn.InstanceNorm2d(8, affine=True, track_running_stats=tracking))
        assert not found(form(model.train() if tracking else model.eval()), "NS802", images())

    def test_a_batch_norm_that_keeps_no_statistics(self) -> None:
        model = small(nn.BatchNorm2d(8, track_running_stats=False)).eval()
        assert not found(traced(model), "NS802", images())


class Call(nn.Module):
    """A batch norm as a function call."""

    def __init__(self, flag: bool | None, *, stored: bool = True) -> None:
        super().__init__()
        self.flag, self.stored = flag, stored
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flag = self.training if self.flag is None else self.flag
        mean, var = (self.mean, self.var) if self.stored else (None, None)
        return F.batch_norm(x, mean, var, training=flag)


class Instance(Call):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.instance_norm(x, self.mean, self.var, use_input_stats=True)


class Thrown(Call):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True)


class TestConstantTrainingFlag:
    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_hard_wired(self, mode: str) -> None:
        model = nn.Sequential(Call(True)).train(mode == "train")
        report = normscope.check(model, images(), select=["NS803", "NS202"])
        (finding,) = (f for f in report.findings if f.code == "NS803")
        assert (finding.site, finding.severity) == ("0:F.batch_norm", "warning")
        assert finding.evidence["mode_in_eval"] == "batch"
        assert finding.evidence["strength"] > 0

    @pytest.mark.parametrize(
        "model",
        [Call(None), Call(False), Call(True, stored=False), Instance(True), Thrown(True), small()],
        ids=[
            "follows training",
            "frozen",
            "no statistics",
            "instance norm",
            "statistics thrown away",
            "module",
        ],
    )
    def test_innocent(self, model: nn.Module) -> None:
        for mode in (True, False):
            assert not found(model.train(mode), "NS803", images())


class TestLastBatch:
    @staticmethod
    def vectors() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))

    @pytest.mark.parametrize(("rest", "severity"), [(1, "warning"), (2, "warning"), (3, "info"), (4, "info")])
    def test_what_is_left(self, rest: int, severity: str) -> None:
        (finding,) = found(self.vectors(), "NS204", torch.randn(10, 8), dataset_size=100 + rest)
        assert (finding.site, finding.severity, finding.mode) == ("1", severity, "train")
        assert (finding.evidence["last_batch"], finding.evidence["set_size"]) == (rest, rest)
        assert "unless the loader drops that batch, which cannot be seen" in finding.message

    def test_what_it_warns_of_happens(self) -> None:
        model = self.vectors().train()
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model(torch.randn(1, 8))
        assert (
            model(torch.randn(2, 8)).abs() - 1
        ).abs().median() < 1e-3  # eps over a variance of order one tenth

    @pytest.mark.parametrize("size", [100, 105, 109])
    def test_nothing_or_enough_is_left(self, size: int) -> None:
        assert not found(self.vectors(), "NS204", torch.randn(10, 8), dataset_size=size)

    def test_places_count(self) -> None:
        model = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8))
        (finding,) = found(model, "NS204", images(), dataset_size=17)
        assert (finding.site, finding.also) == ("3", ())

    @pytest.mark.parametrize(
        "norm", [nn.LayerNorm(16), nn.BatchNorm1d(16).requires_grad_(False)], ids=["layer norm", "frozen"]
    )
    def test_only_where_the_batch_is_normalized_by(self, norm: nn.Module) -> None:
        class Frozen(nn.Sequential):
            def train(self, mode: bool = True) -> Frozen:
                super().train(mode)
                self[1].eval()
                return self

        model = Frozen(nn.Linear(8, 16), norm).eval()
        assert not found(model, "NS204", torch.randn(10, 8), dataset_size=101)

    def test_without_the_size_of_the_set(self) -> None:
        report = normscope.check(self.vectors(), torch.randn(10, 8), select=["NS204"])
        assert [n.reason for n in report.not_run] == ["needs dataset_size: the number of training samples"]
