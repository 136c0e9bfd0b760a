"""Which path a call takes, and that each computes the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from normscope.kernels import composite, dispatch, library
from normscope.kernels.layout import call
from normscope.spec import NormSpec, Running, families

native = pytest.mark.skipif(library.LIBRARY is None, reason="no native kernels here")

TORCHS = {
    "layer": (families.layer_norm(), (3, 4), (4,), lambda x, w, b: F.layer_norm(x, (4,), w, b)),
    "rms": (families.rms_norm(eps=None), (3, 4), (4,), lambda x, w, b: F.rms_norm(x, (4,), w)),
    "group": (families.group_norm(2), (2, 4, 5), (4,), lambda x, w, b: F.group_norm(x, 2, w, b)),
    "instance": (
        families.instance_norm(weight=True, bias=True),
        (2, 4, 5),
        (4,),
        lambda x, w, b: F.instance_norm(x, None, None, w, b),
    ),
    "batch": (
        families.batch_norm(),
        (5, 4, 3),
        (4,),
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    ),
}


class Taken:
    """Counts what a call goes through."""

    def __init__(self, monkeypatch) -> None:
        self.paths: list[str] = []
        for module, name, path in (
            (dispatch.ops, "norm_only", "native"),
            (composite, "normalize", "composite"),
            *((F, f"{kind}_norm", "torch") for kind in TORCHS),
        ):
            monkeypatch.setattr(module, name, self.counting(getattr(module, name), path))

    def counting(self, function, path):
        def run(*args, **kwargs):
            self.paths.append(path)
            return function(*args, **kwargs)

        return run

    def of(self, function) -> str:
        self.paths.clear()
        function()
        return self.paths[0]


def given(name: str, dtype=torch.float32, device="cpu"):
    spec, shape, parameter, own = TORCHS[name]
    x = torch.randn(shape, device=device).to(dtype)
    w = torch.rand(parameter, device=device).to(dtype)
    return x, w, None if spec.bias is None else w + 1, call(spec, len(shape)), own


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TORCHS)
def test_cpu_tensors_go_to_native_kernels(name, dtype, monkeypatch):
    x, w, b, c, _ = given(name, dtype)
    assert Taken(monkeypatch).of(lambda: dispatch.norm(x, w, b, c)) == "native"


@pytest.mark.parametrize("name", TORCHS)
def test_other_devices_go_to_torchs_functions(name, monkeypatch):
    x, w, b, c, _ = given(name, device="meta")
    assert Taken(monkeypatch).of(lambda: dispatch.norm(x, w, b, c)) == "torch"
    scaled = call(c.spec.replace(gain=2.0), x.ndim)  # none of torch's
    assert Taken(monkeypatch).of(lambda: dispatch.norm(x, w, b, scaled)) == "composite"


@pytest.mark.parametrize("name", TORCHS)
def test_without_native_kernels_what_torch_computes_exactly_is_torchs(name, monkeypatch):
    x, w, b, c, own = given(name)
    monkeypatch.setattr(library, "LIBRARY", None)
    fresh = call(
        c.spec.replace(eps=c.eps if c.eps is None else 1.25e-5), x.ndim
    )  # one that keeps nothing of before
    fresh.derived.clear()
    assert Taken(monkeypatch).of(lambda: dispatch.norm(x, w, b, fresh)) == (
        "torch" if name == "rms" else "composite"
    )
    y = dispatch.norm(x, w, b, fresh)
    fresh.derived.clear()
    # float32, sums of at most 15 terms, eps moved by 2.5e-6
    assert torch.allclose(y, own(x, w, b), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_path_computes_the_same(name, dtype):
    x, w, b, c, own = given(name, dtype)
    # half types: torch rounds more than once; else sums of at most 15 terms
    atol = 4 * torch.finfo(dtype).eps * (2 if dtype == torch.bfloat16 else 16)
    assert torch.allclose(dispatch.norm(x, w, b, c), own(x, w, b), rtol=0, atol=atol)
    assert torch.allclose(dispatch.norm(x, w, b, c), composite.normalize(x, c.spec, w, b), rtol=0, atol=atol)


@pytest.mark.parametrize("kernels", ["native", "none"])
@pytest.mark.parametrize("eps", [1e-3, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_eps_none_is_the_epsilon_that_torch_takes(dtype, eps, kernels, monkeypatch):
    c = call(families.rms_norm(eps=eps), 2)
    if kernels == "none":
        monkeypatch.setattr(library, "LIBRARY", None)
        c.derived.clear()
    x = torch.full((1, 8), 1e-4).to(dtype)  # small enough for it to matter
    y, own = dispatch.norm(x, None, None, c), F.rms_norm(x, (8,), eps=eps)
    c.derived.clear()
    assert torch.allclose(y, own, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("kernels", ["native", "none"])
@pytest.mark.parametrize("state", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["batch", "instance"])
def test_running_statistics_are_torchs(name, state, kernels, monkeypatch):
    x, w, b, c, _ = given(name)
    if kernels == "none":
        monkeypatch.setattr(library, "LIBRARY", None)
        c.derived.clear()
    ours = torch.randn(4).to(state), torch.rand(4).to(state)
    torchs = [t.float().clone() for t in ours]
    y = dispatch.norm_running(x, w, b, *ours, c, 0.3)
    own = F.batch_norm if name == "batch" else F.instance_norm
    expected = own(x, *torchs, w, b, True, 0.3)
    c.derived.clear()
    # float32, sums of at most 15 terms
    assert torch.allclose(y, expected, rtol=0, atol=1e-5)
    for a, e in zip(ours, torchs, strict=True):
        assert torch.allclose(a.float(), e, rtol=0, atol=1e-6)


def test_virtual_batches_update_one_after_the_other():
    spec = NormSpec("(v b) c -> v c", sizes={"b": 4}, running=Running())
    c = call(spec, 2)
    x = torch.randn(8, 3)
    mean, var = torch.zeros(3), torch.ones(3)
    dispatch.norm_running(x, None, None, mean, var, c, 0.25)
    expected = torch.zeros(3)
    for half in (x[:4], x[4:]):
        expected = 0.75 * expected + 0.25 * half.mean(0)
    assert torch.allclose(mean, expected, rtol=0, atol=1e-6)


def test_nothing_follows_an_empty_batch_or_half_a_state():
    c = call(families.batch_norm(), 2)
    mean, var = torch.zeros(3), torch.ones(3)
    assert dispatch.norm_running(torch.randn(0, 3), None, None, mean, var, c, 0.1).shape == (0, 3)
    dispatch.norm_running(torch.randn(5, 3), None, None, mean, None, c, 0.1)
    assert torch.equal(mean, torch.zeros(3))
    assert torch.equal(var, torch.ones(3))


def test_into_a_given_tensor():
    for name in TORCHS:
        x, w, b, c, _ = given(name)
        out = torch.full_like(x, torch.nan)
        assert dispatch.norm(x, w, b, c, out) is out
        assert torch.equal(out, dispatch.norm(x, w, b, c))


@native
def test_the_first_call_may_meet_fake_tensors():
    """What a call keeps for later is made of real ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    c = call(families.layer_norm(eps=2e-5), 2)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(2, 3))
        assert dispatch.norm(fake, None, None, c).shape == (2, 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        dispatch._native(torch.nn.Parameter(torch.randn(2, 3)), c)
    assert torch.isfinite(dispatch.norm(torch.randn(2, 3), None, None, c)).all()
