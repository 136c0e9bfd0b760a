"""torch.func, forward mode and tensor subclasses: right through whatever path the call takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap
from torch.nn import functional as F

from normscope.kernels import dispatch
from normscope.kernels.layout import call
from normscope.spec import families

X = torch.randn(3, 4, 6, dtype=torch.float64)
WEIGHT, BIAS = torch.rand(6).double() + 0.5, torch.rand(6).double()
CHANNELS = torch.rand(4).double() + 0.5
OURS_AND_TORCHS = {
    "layer": (
        lambda x: dispatch.norm(x, WEIGHT, BIAS, call(families.layer_norm(), x.ndim)),
        lambda x: F.layer_norm(x, (6,), WEIGHT, BIAS),
    ),
    "rms": (
        lambda x: dispatch.norm(x, WEIGHT, None, call(families.rms_norm(eps=1e-5), x.ndim)),
        lambda x: F.rms_norm(x, (6,), WEIGHT, 1e-5),
    ),
    "batch": (
        lambda x: dispatch.norm(x, CHANNELS, None, call(families.batch_norm(), x.ndim)),
        lambda x: F.batch_norm(x, None, None, CHANNELS, None, True),
    ),
    "stored": (
        lambda x: dispatch.fixed(x, CHANNELS, CHANNELS, CHANNELS, None, call(families.batch_norm(), x.ndim)),
        lambda x: F.batch_norm(x, CHANNELS, CHANNELS, CHANNELS, None, False),
    ),
    "sum": (
        lambda x: dispatch.add_norm(x, x.sin(), WEIGHT, BIAS, call(families.layer_norm(), x.ndim))[0],
        lambda x: F.layer_norm(x + x.sin(), (6,), WEIGHT, BIAS),
    ),
}


def same(a: Tensor, b: Tensor) -> bool:
    """float64; sums of at most 72 terms, and derivatives of them."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", OURS_AND_TORCHS)
def test_torch_func(name):
    ours, torchs = OURS_AND_TORCHS[name]
    tangent = torch.randn_like(X)
    assert same(jvp(ours, (X,), (tangent,))[1], jvp(torchs, (X,), (tangent,))[1])
    assert same(jacrev(ours)(X), jacrev(torchs)(X))
    assert same(jacfwd(ours)(X), jacfwd(torchs)(X))
    scalar = lambda f: lambda x: f(x).sin().sum()  # noqa: E731
    assert same(grad(scalar(ours))(X), grad(scalar(torchs))(X))
    assert same(grad(scalar(grad(scalar(ours))))(X), grad(scalar(grad(scalar(torchs))))(X))
    batch = torch.stack([X, X.cos()])
    assert same(vmap(ours)(batch), torch.stack([torchs(x) for x in batch]))
    assert same(vmap(grad(scalar(ours)))(batch), torch.stack([grad(scalar(torchs))(x) for x in batch]))


@pytest.mark.parametrize("name", OURS_AND_TORCHS)
def test_forward_mode(name):
    ours, torchs = OURS_AND_TORCHS[name]
    tangent = torch.randn_like(X)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(ours(forward_ad.make_dual(X, tangent))).tangent
    assert same(found, jvp(torchs, (X,), (tangent,))[1])


def test_gradients_of_every_sample():
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(WEIGHT.clone())

        def forward(self, x: Tensor) -> Tensor:
            return dispatch.norm(x, self.weight, None, call(families.rms_norm(eps=1e-5), x.ndim))

    layer = Layer()
    parameters = dict(layer.named_parameters())
    loss = lambda p, x: functional_call(layer, p, (x,)).sin().sum()  # noqa: E731
    found = vmap(grad(loss), in_dims=(None, 0))(parameters, X)["weight"]
    for x, g in zip(X, found, strict=True):
        layer.zero_grad()
        layer(x).sin().sum().backward()
        assert same(layer.weight.grad, g)


@pytest.mark.parametrize(
    "transform", [vmap, lambda f: grad(lambda x: f(x).sin().sum())], ids=["vmap", "grad"]
)
def test_transforms_inside_a_compiled_program(transform):
    torch._dynamo.reset()
    c = call(families.layer_norm(), 2 if transform is vmap else 3)
    ours = lambda x: dispatch.norm(x, WEIGHT, BIAS, c)  # noqa: E731
    run = torch.compile(transform(ours), fullgraph=True, backend="aot_eager")
    assert same(run(X), transform(ours)(X))


class Logged(Tensor):
    """A subclass that sees each function of torch that touches it."""

    seen: list[str]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_subclass_sees_operators_of_torch():
    Logged.seen = []
    y = OURS_AND_TORCHS["layer"][0](X.as_subclass(Logged))
    assert isinstance(y, Logged)
    assert same(y.as_subclass(Tensor), OURS_AND_TORCHS["layer"][1](X))
    assert Logged.seen
    assert not [name for name in Logged.seen if "norm_" in name or "normalize" in name]
