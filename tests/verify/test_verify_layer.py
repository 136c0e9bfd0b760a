"""The protocol on a user's layer: right layers pass, wrong ones fail, and the layer is never touched."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from normscope import verify
from normscope.reading import UnknownNormalization

torch.set_num_threads(1)


def randomized(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.3)
    return module


def flag_off(module):
    module.track_running_stats = False
    return module


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized():
    layer = nn.LayerNorm(5)
    nn.utils.parametrize.register_parametrization(layer, "weight", Twice())
    return layer


LAYERS = [
    nn.BatchNorm1d(3),
    nn.BatchNorm2d(3, momentum=None),
    nn.BatchNorm3d(3, affine=False),
    nn.SyncBatchNorm(3),
    nn.BatchNorm2d(3, track_running_stats=False),
    flag_off(nn.BatchNorm2d(3)),
    nn.BatchNorm2d(3).bfloat16(),
    nn.LayerNorm(4),
    nn.LayerNorm(1),
    nn.LayerNorm((3, 4, 5)),
    nn.LayerNorm(300).half(),
    nn.GroupNorm(2, 6),
    nn.GroupNorm(4, 8, affine=False),
    nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    nn.InstanceNorm2d(3),
    flag_off(nn.InstanceNorm2d(3, track_running_stats=True)),
    nn.InstanceNorm3d(3),
    nn.RMSNorm(8),
    nn.RMSNorm(8, eps=0.0),
    parametrized(),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize("zero_gain", [False, True])
def test_torch_layers_pass(layer, zero_gain):
    layer = randomized(copy.deepcopy(layer))
    if zero_gain and isinstance(getattr(layer, "weight", None), nn.Parameter):
        nn.init.zeros_(layer.weight)
    report = verify.run_layer(layer)
    assert report.passed, "\n".join(str(item) for item in report.failed)


def test_the_layer_is_not_touched():
    layer = randomized(nn.BatchNorm2d(3))
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    random_state = torch.get_rng_state()
    verify.run_layer(layer)
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    assert layer.training
    assert layer.weight.dtype == torch.float32
    assert layer.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_parametrized_layer_is_not_touched_either():
    layer = parametrized()
    before = layer.weight.detach().clone()
    assert verify.run_layer(layer).passed
    assert torch.equal(layer.weight, before)


class FrozenBatchNorm2d(nn.Module):
    eps = 1e-3

    def __init__(self):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.full((3,), 0.5))

    def forward(self, x):
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return (x - self.running_mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


def test_a_frozen_norm_passes_by_its_stored_statistics():
    report = verify.run_layer(FrozenBatchNorm2d())
    assert report.passed, "\n".join(str(item) for item in report.failed)
    assert {item.result["mode"] for item in report.evidence if "mode" in item.result} == {"frozen"}


def hooked(layer, hook):
    layer = randomized(layer)
    layer.register_forward_hook(hook)
    return layer


def write_state(module, args, output):
    module.running_mean += 0.5


FAULTS = {
    "too large by a thousandth": (nn.LayerNorm(6), lambda m, a, y: 1.001 * y, "computes its specification"),
    "mixes samples": (
        nn.LayerNorm(6),
        lambda m, a, y: y + y.mean(0),
        "beside other companions a sample's output stays",
    ),
    "passes half precision": (
        nn.LayerNorm(6),
        lambda m, a, y: y.half().to(y.dtype),
        "loses no more than rounding",
    ),
    "stops the gradient": (
        nn.GroupNorm(2, 6),
        lambda m, a, y: y.detach() + 0 * a[0],
        "its gradient is the closed",
    ),
    "writes its state": (nn.BatchNorm2d(3), write_state, "in eval a forward leaves its state alone"),
    "keeps the sign": (nn.RMSNorm(6), lambda m, a, y: y.abs(), "a scale of -1 flips the sign"),
    "keeps the level": (nn.LayerNorm(6), lambda m, a, y: y + a[0], "a shift by 8 is removed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_layer_fails(fault):
    layer, hook, claim = FAULTS[fault]
    report = verify.run_layer(hooked(copy.deepcopy(layer), hook))
    assert any(claim in item.claim for item in report.failed)


def test_a_model_is_checked_norm_by_norm():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Sequential(nn.ReLU(), nn.LayerNorm(6)))
    report = verify.run_layer(model, name="mine")
    assert report.target == "mine"
    assert [*dict.fromkeys(item.topic for item in report.evidence)] == ["1", "2.1"]
    record = json.loads(report.to_json())
    assert record["passed"]


def test_a_small_tensor_is_written_out_to_do_by_hand():
    report = verify.run_layer(nn.LayerNorm(4))
    item = report.evidence[0]
    assert item.input == [[0.0, 1.0, 4.0, 2.0], [2.0, 4.0, 1.0, 0.0], [1.0, 4.0, 2.0, 2.0]]
    assert item.result["mean"] == [1.75, 1.75, 2.25]
    assert item.result["mode"] == "input"


class Own(nn.LayerNorm):
    def forward(self, x):
        return functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class CenteredNorm(nn.Module):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()


class Plain(nn.Module):
    """The same arithmetic under a name that says nothing."""

    forward = CenteredNorm.forward


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.own, self.hand, self.plain = nn.LayerNorm(6), Own(6), CenteredNorm(), Plain()
        self.inner = nn.ModuleDict({"prenorm": nn.Sequential(nn.LayerNorm(6))})

    def forward(self, x):
        x = self.plain(self.hand(self.own(self.read(x))))
        return functional.layer_norm(self.inner["prenorm"](x), (6,))


def test_modules_that_cannot_be_read_are_told():
    report = verify.run_layer(Mixed())
    assert [*report.topics] == ["read", "inner.prenorm.0"]
    assert [item.site for item in report.not_verified] == ["hand", "own"]
    assert "cannot be read" in report.not_verified[0].why
    assert report.not_verified[1].why.startswith("inherits from torch.nn.LayerNorm but overrides forward")
    assert str(report).endswith("checks of 2 norms passed; 2 norms not verified: hand, own")


def test_with_inputs_what_is_called_or_written_inside_is_told_too():
    report = verify.run_layer(Mixed(), inputs=torch.randn(4, 6))
    assert [item.site for item in report.not_verified] == ["F.layer_norm", "hand", "own", "plain"]
    assert "called inside a forward" in report.not_verified[0].why
    assert "written by hand" in report.not_verified[3].why


def test_a_lazy_norm_and_one_on_a_weight_are_told():
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    report = verify.run_layer(nn.Sequential(linear, nn.LayerNorm(3), nn.LazyBatchNorm1d()))
    assert [(item.site, item.why.partition(",")[0]) for item in report.not_verified] == [
        ("0.parametrizations.weight.0", "normalizes a weight"),
        ("2", "has not seen an input yet"),
    ]


def test_a_model_that_does_not_run_says_so():
    report = verify.run_layer(Mixed(), inputs=torch.randn(4, 5))
    (reason,) = [item.why for item in report.not_verified if item.site == "calls inside the forward"]
    assert reason.startswith("the model raised ")
    assert {"hand", "own"} < {item.site for item in report.not_verified}


def test_nothing_to_check_is_an_error():
    with pytest.raises(UnknownNormalization, match="It holds other modules"):
        verify.run_layer(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(
        UnknownNormalization, match=r"can be verified: 0 \(.*Own\): inherits .* To verify a layer by"
    ):
        verify.run_layer(nn.Sequential(Own(2)))
    with pytest.raises(UnknownNormalization, match=r"let the target return \(layer, normscope.NormSpec"):
        verify.run_layer(Own(2))
    with pytest.raises(UnknownNormalization, match="has not seen an input yet"):
        verify.run_layer(nn.LazyBatchNorm1d())
