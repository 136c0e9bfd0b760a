"""Threshold-dependent batch norm of spiking networks, written by hand: its gain goes into the layer before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normscope.reading import Reading
from normscope.spec import families
from normscope.transforms import fold, freeze

torch.set_num_threads(1)
STEPS, SAMPLES = 3, 2
X = torch.randn(STEPS, SAMPLES, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Thresholded(nn.Module):
    """y = weight * alpha * threshold * (x - mean) / sqrt(var + eps) + bias, and says so."""

    def __init__(
        self, channels: int, layout: str = "t b c ...", threshold: float = 0.5, alpha: float = 0.7
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(channels)
        self.layout, self.threshold, self.alpha = layout, threshold, alpha
        self.weight = nn.Parameter(torch.randn(channels, generator=generator))
        self.bias = nn.Parameter(torch.randn(channels, generator=generator))
        self.register_buffer("running_mean", torch.randn(channels, generator=generator))
        self.register_buffer("running_var", 0.1 + torch.rand(channels, generator=generator))

    def __normscope__(self, input_ndim: int | None) -> Reading:
        steps = STEPS if "(" in self.layout else None
        spec = families.td_batch_norm(self.threshold, self.alpha, layout=self.layout, steps=steps)
        held = {name: getattr(self, name) for name in ("weight", "bias", "running_mean", "running_var")}
        return Reading(spec, "Thresholded", held, "batch" if self.training else "running", "batch", "running")

    def forward(self, x: Tensor) -> Tensor:
        axis = 1 if "(" in self.layout else 2
        over = [i for i in range(x.ndim) if i != axis]
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean, var = x.mean(over), x.var(over, unbiased=False)
        a = self.weight * self.alpha * self.threshold / (var + 1e-5).sqrt()
        shape = [-1 if i == axis else 1 for i in range(x.ndim)]
        return a.view(shape) * (x - mean.view(shape)) + self.bias.view(shape)


class OfTwo(Thresholded):
    """The same, made of a batch norm and a factor."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.inner = nn.BatchNorm2d(channels, affine=False)
        self.inner.running_mean, self.inner.running_var = self.running_mean, self.running_var

    def forward(self, x: Tensor) -> Tensor:
        unit = self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        gain = self.weight * self.alpha * self.threshold
        return gain.view(-1, 1, 1) * unit + self.bias.view(-1, 1, 1)


class Steps(nn.Module):
    """A layer over samples, run on all steps at once."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def conv(**settings: Any) -> nn.Conv2d:
    torch.manual_seed(1)
    return nn.Conv2d(3, 4, 3, **settings)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("model", "x", "into"),
    [
        (nn.Sequential(Steps(conv(padding=1, bias=False)), Thresholded(4), nn.Tanh()), X, "0.layer"),
        (nn.Sequential(Steps(conv()), Thresholded(4, "b t c ..."), nn.Tanh()), X, "0.layer"),
        (nn.Sequential(nn.Flatten(0, 1), conv(), nn.Unflatten(0, (STEPS, SAMPLES)), Thresholded(4)), X, "1"),
        (nn.Sequential(nn.Flatten(0, 1), conv(), Thresholded(4, "(t b) c ...")), X, "1"),
        (nn.Sequential(nn.Tanh(), Thresholded(3), Steps(conv())), X, "2.layer"),
        (nn.Sequential(nn.Linear(6, 4), Thresholded(4), nn.Tanh()), X[:, :, 0, 0], "0"),
        (nn.Sequential(Steps(conv()), OfTwo(4), nn.Tanh()), X, "0.layer"),
    ],
    ids=["wrapper", "samples first", "flatten", "one axis", "layer behind", "linear", "made of two"],
)
def test_threshold_dependent_batch_norm(model: nn.Module, x: Tensor, into: str, frozen: bool) -> None:
    model = model.eval().double()
    if frozen:
        model = freeze(model)[0]
    folded, report = fold(model, x.double())
    (done,) = report.done
    assert report.folds[0].into == (into,)
    assert (done.before.endswith(("Thresholded", "OfTwo")), done.after) == (True, "torch.nn.Identity")
    assert not any("running" in key for key in folded.state_dict())
    # float64: a dozen products
    torch.testing.assert_close(folded(x.double()), model(x.double()), rtol=1e-12, atol=1e-12)
    inner = [("1.inner", "is part of 1, which is gone")] if isinstance(model[1], OfTwo) else []
    assert [(site.name, site.reason) for site in report.left] == inner


def test_a_loop_over_steps_is_left() -> None:
    class Loop(Steps):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.layer(step) for step in x])

    model = nn.Sequential(Loop(conv()), Thresholded(4), nn.Tanh()).eval()
    _, report = fold(model, X)
    assert [site.reason for site in report.left] == [
        "not backwards: its input comes from 0 (stack); not forwards: the model returns its output"
    ]
