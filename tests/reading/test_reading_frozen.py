"""Frozen batch norm, as the detection packages write it."""

import numpy as np
import pytest
import torch
from torch import nn

from normscope import reference
from normscope.reading import UnknownNormalization, read
from normscope.spec import RunningState


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.eps = eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(features, dtype=torch.float64) + 0.5)

    def forward(self, x):
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class Sub(FrozenBatchNorm2d):
    pass


@pytest.mark.parametrize("cls", [FrozenBatchNorm2d, Sub])
@pytest.mark.parametrize("train", [True, False])
def test_frozen_batch_norm_computes_what_is_read(cls, train):
    module = cls(3, eps=0.2).train(train)
    reading = read(module)
    assert (reading.mode_now, reading.mode_train, reading.mode_eval, reading.updates) == ("frozen",) * 3 + (
        (),
    )
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    stored = {name: tensor.numpy() for name, tensor in reading.tensors.items()}
    expected = reference.forward(
        x.numpy(),
        reading.spec,
        stored["weight"],
        stored["bias"],
        running=RunningState(stored["running_mean"], stored["running_var"]),
        training=False,
    )
    # one product, one sum and one difference of numbers below 16
    np.testing.assert_allclose(module(x).numpy(), expected, rtol=0, atol=3 * 16 * 2.0**-52)


def faulty(change):
    module = FrozenBatchNorm2d(3)
    change(module)
    return module


class OwnForward(FrozenBatchNorm2d):
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        (faulty(lambda m: delattr(m, "running_var")), "has no buffer running_var"),
        (
            faulty(lambda m: delattr(m, "eps")),
            "has no attribute eps: the constant in its forward cannot be read",
        ),
        (
            faulty(lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(3)))),
            "has a parameter scale, so it is not frozen",
        ),
        (OwnForward(3), "overrides forward"),
    ],
    ids=["buffer", "eps", "parameter", "forward"],
)
def test_what_only_bears_the_name_is_refused(module, fault):
    with pytest.raises(UnknownNormalization) as error:
        read(module)
    assert str(error.value) == (
        f"{__name__}.{type(module).__name__} is called FrozenBatchNorm2d, but {fault}. Expected: buffers weight, bias, "
        f"running_mean and running_var, no parameters, and an attribute eps, as in torchvision.ops.FrozenBatchNorm2d."
    )


def test_a_forward_put_on_a_frozen_batch_norm_is_unknown():
    module = FrozenBatchNorm2d(3)
    module.forward = lambda x: x
    with pytest.raises(UnknownNormalization, match="has a forward put on it that is not its class's"):
        read(module)
