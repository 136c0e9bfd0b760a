"""What a fold keeps of a model, and what it says that it changes; norms without stored statistics."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normscope
import normscope.nn as own
from normscope.transforms import fold

torch.set_num_threads(1)


def randomized(module: nn.Module, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            if name.endswith("running_var"):
                tensor.abs_().add_(0.1)
    return module.eval()


def net() -> nn.Sequential:
    parts = (
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
    )
    return randomized(nn.Sequential(*parts))


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(9))


def close(one: nn.Module, other: nn.Module, *x: Tensor) -> None:
    with torch.no_grad():
        a, b = one(*x), other(*x)
    assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


def test_a_copy_by_default_and_a_rehearsal_changes_nothing() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    folded, report = fold(model, X)
    rehearsed, plan = fold(model, X, dry_run=True)
    assert folded is not model
    assert rehearsed is model
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert [type(part) for part in model] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Conv2d, nn.BatchNorm2d]
    assert plan.done == report.done
    assert plan.folds == report.folds
    assert str(plan).splitlines()[0] == (
        "fold: 2 of 2 normalizations would be done (rehearsed, the model is as it was)"
    )
    assert "  1: into 0, which feeds it" in str(plan).splitlines()


def test_keys_and_report() -> None:
    model = net()
    folded, report = fold(model, X)
    assert report.added_keys == ("0.bias",)
    state = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert report.removed_keys == tuple(f"{at}.{name}" for at in (1, 4) for name in state)
    assert set(folded.state_dict()) == set(model.state_dict()) - set(report.removed_keys) | set(
        report.added_keys
    )
    assert "  state dict: 10 keys gone (1.weight, 1.bias, 1.running_mean and 7 more), 1 new (0.bias)" in str(
        report
    )
    document = json.loads(report.to_json())
    assert [one["into"] for one in document["folds"]] == [["0"], ["3"]]
    assert [one["dtype"] for one in document["agreements"]] == ["float64", "float32"]


def test_which_keys_there_are_does_not_depend_on_values() -> None:
    """A folded fresh model takes the weights of a folded trained one, also behind norms that padding keeps."""

    def build() -> nn.Sequential:
        padded = nn.Conv2d(3, 3, 3, padding=1)
        return nn.Sequential(
            nn.BatchNorm2d(3),
            padded,
            nn.ReLU(),
            *net()[:3],
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 3, bias=False),
        )

    trained, _ = fold(randomized(build()), X)
    fresh = build()
    fresh[4] = nn.BatchNorm2d(4)
    empty, report = fold(fresh.eval(), X)
    assert report.added_keys == ("3.bias", "7.bias")
    assert [one.name for one in report.left] == ["0"]
    empty.load_state_dict(trained.state_dict())
    with torch.no_grad():
        assert torch.equal(empty(X), trained(X))


def test_what_is_kept() -> None:
    model = net()
    model[3].weight.requires_grad_(False)
    model.to(memory_format=torch.channels_last)
    seen: list[int] = []
    model[2].register_forward_hook(lambda *_: seen.append(1))
    weights, strides = (
        [model[0].weight, model[3].weight],
        [model[0].weight.stride(), model[3].weight.stride()],
    )
    reference = copy.deepcopy(model)
    norm = model[1]
    folded, _ = fold(model, X, inplace=True)
    assert folded is model
    assert all(a is b for a, b in zip((model[0].weight, model[3].weight), weights, strict=True))
    assert [model[0].weight.stride(), model[3].weight.stride()] == strides
    assert model[0].bias.requires_grad
    assert not model[3].weight.requires_grad
    assert model[1] is norm
    assert type(norm) is nn.Identity
    assert not norm.training
    seen.clear()
    close(model, reference, X)
    assert seen == [1, 1]


def test_an_optimizer_follows() -> None:
    model = net()
    decayed = [model[0].weight, model[3].weight]
    others = [p for p in model.parameters() if all(p is not q for q in decayed)]
    optimizer = torch.optim.AdamW([{"params": decayed, "lr": 0.5}, {"params": others, "weight_decay": 0.0}])
    model(X).sum().backward()
    optimizer.step()
    _, report = fold(model, X, inplace=True, optimizer=optimizer)
    first, second = optimizer.param_groups
    assert [id(p) for p in first["params"]] == [
        id(p) for p in (model[0].weight, model[3].weight, model[0].bias)
    ]
    assert [id(p) for p in second["params"]] == [id(model[3].bias)]
    assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}
    assert report.notes[-1] == (
        "the optimizer still remembers the folded weights at their old scale (momentum, second moments)"
    )
    model(X).sum().backward()
    optimizer.step()


def test_compiled_models_are_folded_inside() -> None:
    model = net()
    compiled: Any = torch.compile(model)
    folded, report = fold(compiled, X)
    assert len(report.done) == 2
    assert type(folded) is type(compiled)
    close(folded._orig_mod, model, X)


def test_tensors_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = net()
    reference = copy.deepcopy(model)
    folded, report = fold(model, X, inplace=True)
    assert len(report.done) == 2
    close(folded, reference, X)


class Block(nn.Module):
    """A norm read by three layers, one of them through a slice and dropout."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.drop = norm, nn.Dropout(0.5)
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        score = torch.tanh(self.q(y) + self.k(y)).mean(-1, keepdim=True)
        return score * self.v(self.drop(y[:, 1:]))[:, :1] + x.mean(-1, keepdim=True)


TOKENS = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(5)) * 3 + 1


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(6), nn.RMSNorm(6), own.LayerNorm(6), own.RMSNorm(6, convention="gemma")], ids=repr
)
def test_gain_and_bias_go_into_all_readers(norm: nn.Module) -> None:
    model = randomized(Block(norm))
    folded, report = fold(model, TOKENS)
    assert report.folds[0].into == ("q", "k", "v")
    assert [*folded.norm.parameters()] == []
    assert type(folded.norm) is type(norm)
    shifted = any("bias" in key for key in report.removed_keys)
    assert report.added_keys == (("k.bias",) if shifted else ())
    close(folded, model, TOKENS)
    assert normscope.spec_of(folded.norm).weight is None


def test_gains_stay_where_asked() -> None:
    model = randomized(Block(nn.LayerNorm(6)))
    same, report = fold(model, TOKENS, gains=False)
    assert same is model
    assert [one.reason for one in report.left] == ["gains stay where they are, as was asked for"]


def test_a_hand_written_norm_gets_a_neutral_gain() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    assert transformers
    for make, neutral in ((LlamaRMSNorm, 1.0), (GemmaRMSNorm, 0.0)):
        model = randomized(Block(make(6)))
        folded, report = fold(model, TOKENS)
        assert len(report.done) == 1, report
        assert folded.norm.weight.tolist() == [neutral] * 6
        assert report.removed_keys == ()
        close(folded, model, TOKENS)


@pytest.mark.parametrize("linear", [nn.Linear(6, 6), nn.Linear(6, 6, bias=False)], ids=str)
@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(6), own.LayerNorm(6), nn.LayerNorm(6, elementwise_affine=False)], ids=repr
)
def test_a_layer_norm_becomes_an_rms_norm(linear: nn.Module, norm: nn.Module) -> None:
    model = randomized(nn.Sequential(linear, norm, nn.Linear(6, 3)))
    folded, report = fold(model, TOKENS, center=True)
    home = own if isinstance(norm, own.LayerNorm) else nn
    assert type(folded[1]) is home.RMSNorm
    assert report.sites[0].after.endswith(".RMSNorm")
    assert report.folds[0].centering == "0"
    close(folded, model, TOKENS)


def test_a_bias_of_0_keeps_its_key_too() -> None:
    """Centering that took it away would leave other keys in a fresh model than in a trained one."""
    _, report = fold(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)).eval(), TOKENS, center=True)
    assert report.left[0].reason == (
        "the model returns its output; centering stays: its bias has no place in an RMS norm"
    )


def test_why_centering_stays() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(x + self.a(x)))

    _, report = fold(randomized(Residual()), TOKENS, center=True)
    assert "norm: centering stays: its input comes from a sum in the model" in report.notes
    _, report = fold(randomized(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))), TOKENS, center=True)
    assert report.left[0].reason == (
        "the model returns its output; centering stays: its bias has no place in an RMS norm"
    )


def test_frozen_norms_and_instance_norms_with_statistics() -> None:
    frozen = own.FrozenBatchNorm(4)
    instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    model = randomized(nn.Sequential(nn.Conv2d(3, 4, 3), frozen, nn.ReLU(), nn.Conv2d(4, 4, 3), instance))
    folded, report = fold(model, X)
    assert len(report.done) == 2, report
    close(folded, model, X)


def test_nothing_to_fold() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    same, report = fold(model, X)
    assert same is model
    assert str(report) == "fold: no normalization was found"
