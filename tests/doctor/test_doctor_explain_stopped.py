"""Gradients that are cut or replaced on purpose are not called wrong; wrong ones beside them still are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import normscope

torch.set_num_threads(1)


class Stage(nn.Module):
    """A backbone, a norm and a head; each case overrides what stands between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.inner = nn.Parameter(torch.ones(8))
        self.register_buffer("average", torch.zeros(8))

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.middle(self.norm(self.first(x))))
        return out


class StopGradient(Stage):
    def forward(self, x):
        z = self.norm(self.first(x)).tanh()
        return F.cosine_similarity(self.head(z), z.detach()[:, :4], dim=-1)


class Data(Stage):
    def middle(self, h):
        return h * self.inner.data + h.data


class StraightThrough(Stage):
    def middle(self, h):
        return h + (h.round() - h).detach()


class FrozenBackbone(Stage):
    def forward(self, x):
        with torch.no_grad():
            h = self.first(x)
        return self.head(self.norm(h))


class InferenceBackbone(Stage):
    def forward(self, x):
        with torch.inference_mode():
            h = self.first(x)
        return self.head(self.norm(h.clone()))


class Number(Stage):
    def middle(self, h):
        return h / h.abs().max().item()


class InPlace(Stage):
    def middle(self, h):
        return h * h.square().sum(-1, keepdim=True).detach_()


class MovingAverage(Stage):
    """A buffer that is updated in place from a value with a gradient, and used."""

    def middle(self, h):
        with torch.no_grad():
            self.average.lerp_(h.mean(0), 0.5).lerp_(self.inner, 0.5)
        return h - self.average


class Clamped(Stage):
    """Its own weight is changed in place, so a run from other parameters is another function."""

    def middle(self, h):
        self.inner.data.clamp_(0.999, 1.001)
        return h * self.inner


class Gumbel(Stage):
    def middle(self, h):
        return F.gumbel_softmax(h, hard=True)


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (v,) = ctx.saved_tensors
        return gradient / (1 + 10 * v.abs()) ** 2


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -gradient, None


class Square(torch.autograd.Function):
    """Sound: its backward is its derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Wrong(Square):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x * gradient


spike = Spike.apply  # bound once, as spiking networks do


class Spiking(Stage):
    def middle(self, h):
        v = torch.zeros_like(h)
        total = torch.zeros_like(h)
        for _ in range(4):
            v = 0.8 * v + h
            total = total + spike(v - 1)
        return total


class Reversed(Stage):
    def middle(self, h):
        return Reverse.apply(h, 1.0)


class Squared(Stage):
    def middle(self, h):
        return Square.apply(h) + h.detach()


class WrongBesideCuts(Stage):
    def middle(self, h):
        with torch.no_grad():
            scale = h.square().mean()
        return Wrong.apply(h) * scale + h.detach()


class Checkpointed(Stage):
    """A cut inside a part that reentrant checkpointing runs twice, unseen both times."""

    def middle(self, h):
        return checkpoint(lambda h: h * h.detach().square(), h, use_reentrant=True)


class WrongCheckpointed(Stage):
    def middle(self, h):
        return checkpoint(lambda h: Wrong.apply(h) + h.detach(), h, use_reentrant=True)


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))


class DetachedLayerNorm(Affine):
    def forward(self, x):
        mean, v = x.mean(-1, keepdim=True).detach(), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(v + 1e-5).detach() * self.weight + self.bias


class DetachedRMSNorm(Affine):
    def forward(self, x):
        with torch.no_grad():
            inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x * inverse * self.weight


class WithoutGradient(Affine):
    def forward(self, x):
        y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)
        return y.detach() * self.weight + self.bias


class HalfAGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g / 2


class WrongAndDetached(Affine):
    def forward(self, x):
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5).detach()
        return HalfAGradient.apply(x * inverse + 0)


def padded() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8, padding_idx=0), nn.LayerNorm(8), nn.Linear(8, 4))


def tied() -> nn.Module:
    model = padded()
    model[2] = nn.Linear(8, 10)
    model[2].weight = model[0].weight  # the padding's row has a gradient, by way of the head
    return model


def x() -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def tokens() -> torch.Tensor:
    return torch.randint(0, 10, (16, 6), generator=torch.Generator().manual_seed(1))


HELD = {
    "padding_idx": (padded, tokens, "embedding (1)"),
    "tied padding_idx": (tied, tokens, "embedding (1)"),
    "stop-gradient": (StopGradient, x, "detach (1)"),
    "data": (Data, x, "data (2)"),
    "straight-through": (StraightThrough, x, "detach (1)"),
    "no_grad": (FrozenBackbone, x, "torch.no_grad (1)"),
    "inference_mode": (InferenceBackbone, x, "torch.no_grad (1)"),
    "item": (Number, x, "item (1)"),
    "detach_": (InPlace, x, "detach_ (1)"),
    "moving average": (MovingAverage, x, "torch.no_grad (2)"),
    "reentrant checkpoint": (Checkpointed, x, "detach (1)"),
    "a sound function beside a cut": (Squared, x, "detach (1)"),
}


@pytest.mark.parametrize("name", HELD)
def test_paths_cut_on_purpose_called_innocent_models_wrong(name: str) -> None:
    make, inputs, held = HELD[name]
    step = normscope.explain(make(), inputs()).steps[3]
    assert step.ok, step
    told = f"(what the model cuts off from the gradient held fixed: {held})."
    assert any(line.startswith("the whole model, ") and line.endswith(told) for line in step.seen), step.seen


REPLACED = {
    "spikes": (Spiking, f"{__name__}.Spike"),
    "gradient reversal": (Reversed, f"{__name__}.Reverse"),
    "hard gumbel softmax": (Gumbel, "gumbel_softmax(hard=True)"),
}


@pytest.mark.parametrize("name", REPLACED)
def test_gradients_replaced_on_purpose_were_called_wrong(name: str) -> None:
    make, by = REPLACED[name]
    step = normscope.explain(make(), x()).steps[3]
    assert step.ok, step
    assert step.seen[-1] == f"cannot tell: gradients are replaced on purpose by {by}."


def test_a_model_that_writes_into_what_it_detached_is_not_compared() -> None:
    step = normscope.explain(Clamped(), x()).steps[3]
    assert step.ok
    assert any("it writes into tensors that it has detached" in line for line in step.seen), step.seen


def test_a_wrong_backward_beside_cuts_is_still_found() -> None:
    step = normscope.explain(WrongBesideCuts(), x()).steps[3]
    assert step.ok is False
    assert f"{__name__}.Wrong" in step.todo


def test_a_detach_inside_a_reentrant_checkpoint_hid_a_wrong_backward() -> None:
    before = torch.utils.checkpoint.CheckpointFunction
    step = normscope.explain(WrongCheckpointed(), x()).steps[3]
    assert step.ok is False
    assert f"{__name__}.Wrong" in step.todo
    assert torch.utils.checkpoint.CheckpointFunction is before


def gradients_of(norm: nn.Module) -> normscope.doctor.explain.Step:
    model = Stage()
    model.norm = norm
    return normscope.explain(model, x()).steps[3]


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (
            DetachedLayerNorm,
            "norm cuts its mean and its scale off from the gradient (detach (2)): autograd agrees with differences "
            "that hold this fixed, which is the gradient of a shift and a scale by constants; along a random direction "
            "of the input it says ",
        ),
        (
            DetachedRMSNorm,
            "norm cuts its scale off from the gradient (torch.no_grad (1)): autograd agrees with differences that hold "
            "this fixed, which is the gradient of a scale by constants; along a random direction of the input it says ",
        ),
    ],
)
def test_statistics_detached_on_purpose_were_called_a_wrong_gradient(norm: Any, said: str) -> None:
    step = gradients_of(norm())
    (line,) = (line for line in step.seen if line.startswith("norm cuts"))
    assert line.startswith(said)
    autograd, moving = (float(n) for n in line[len(said) : -1].split(" where what is computed changes by "))
    assert abs(autograd - moving) > 0.1
    assert step.ok
    assert step.follows == (
        "gradients are those of what is computed, with what norm cut off held fixed. Where that is not meant, let "
        "autograd follow it."
    )


def test_a_norm_that_passes_no_gradient_is_told() -> None:
    step = gradients_of(WithoutGradient())
    assert step.ok
    assert "norm passes no gradient to the input, on which its output depends (detach (1))." in step.seen


def test_a_wrong_backward_beside_detached_statistics_is_no_choice() -> None:
    step = gradients_of(WrongAndDetached())
    assert step.ok is False
    assert (step.site, f"{__name__}.HalfAGradient" in step.todo) == ("norm", True)


def test_a_small_bert_was_called_wrong() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    ids = torch.randint(0, 20, (8, 16), generator=torch.Generator().manual_seed(1))
    step = normscope.explain(transformers.BertModel(config), {"input_ids": ids}).steps[3]
    assert step.ok, step
