"""Named families: their conventions in numbers, and the same function as PyTorch's own layers."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from normscope import reference
from normscope.spec import Cast, NormSpec, Running, RunningState, families

RNG = np.random.default_rng(0)
# float64 on both sides; sums of up to 400 terms in another order
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


@pytest.mark.parametrize("name", families.__all__)
def test_every_family_round_trips_and_documents_itself(name: str) -> None:
    make = getattr(families, name)
    needed = {"groups": 2, "group_size": 2}
    given = {
        p: needed[p]
        for p, v in inspect.signature(make).parameters.items()
        if p in needed and v.default is v.empty
    }
    if name == "ghost_batch_norm":
        given = {"size": 4}
    spec = make(**given)
    assert NormSpec.parse(str(spec)) == spec
    assert NormSpec.from_json(spec.to_json()) == spec
    page = inspect.getdoc(make)
    assert page is not None
    assert ">>>" in page
    assert spec.properties().cautions == (
        ("eps is the machine epsilon, so the function depends on the dtype",)
        if spec.eps is None
        else ("eps is 0: a set without spread divides 0 by 0",)
        if spec.eps == 0
        else ()
    )


@pytest.mark.parametrize(
    ("spec", "eps", "momentum", "correction"),
    [
        (families.batch_norm(), 1e-5, 0.1, 1),
        (families.keras_batch_normalization(), 1e-3, 0.01, 0),
        (families.flax_batch_norm(), 1e-5, 0.01, 0),
        (families.onnx_batch_normalization(), 1e-5, 0.1, 0),
        (families.instance_norm(running=True), 1e-5, 0.1, 1),
        (families.batch_norm(momentum=None), 1e-5, None, 1),
    ],
)
def test_running_conventions(spec: NormSpec, eps: float, momentum: float | None, correction: float) -> None:
    assert spec.eps == eps
    assert spec.running == Running(momentum=momentum, correction=correction)


@pytest.mark.parametrize(
    ("spec", "eps", "offset", "cast"),
    [
        (families.llama_rms_norm(), 1e-6, 0.0, Cast("float32", "after")),
        (families.t5_layer_norm(), 1e-6, 0.0, Cast("float32", "after")),
        (families.gemma_rms_norm(), 1e-6, 1.0, Cast("float32", "before")),
        (families.rms_norm(), None, 0.0, Cast()),
        (families.bert_layer_norm(), 1e-12, 0.0, Cast()),
        (families.vit_layer_norm(), 1e-6, 0.0, Cast()),
        (families.convnext_layer_norm(), 1e-6, 0.0, Cast()),
        (families.keras_layer_normalization(), 1e-3, 0.0, Cast()),
        (families.keras_group_normalization(), 1e-3, 0.0, Cast()),
        (families.keras_rms_normalization(), 1e-6, 0.0, Cast()),
        (families.flax_layer_norm(), 1e-6, 0.0, Cast()),
        (families.flax_group_norm(), 1e-6, 0.0, Cast()),
        (families.flax_instance_norm(), 1e-6, 0.0, Cast()),
        (families.flax_rms_norm(), 1e-6, 0.0, Cast()),
        (families.onnx_layer_normalization(), 1e-5, 0.0, Cast("float32", "after")),
    ],
)
def test_model_conventions(spec: NormSpec, eps: float | None, offset: float, cast: Cast) -> None:
    assert (spec.eps, spec.weight_offset, spec.cast) == (eps, offset, cast)


def test_keras_names_its_parameters_its_own_way() -> None:
    assert families.keras_batch_normalization(scale=False).weight is None
    assert families.keras_batch_normalization(scale=False).bias == "c"
    assert families.keras_batch_normalization(center=False).bias is None


X = RNG.standard_normal((4, 6, 3, 5))
T = torch.from_numpy(X)
W, B = RNG.standard_normal((2, 6))
TW, TB = torch.from_numpy(W), torch.from_numpy(B)
LAST = RNG.standard_normal((2, 5))


@pytest.mark.parametrize(
    ("spec", "parameters", "theirs"),
    [
        (
            families.batch_norm(running=False),
            (W, B),
            lambda: F.batch_norm(T, None, None, TW, TB, training=True),
        ),
        (families.group_norm(3), (W, B), lambda: F.group_norm(T, 3, TW, TB)),
        (
            families.instance_norm(weight=True, bias=True),
            (W, B),
            lambda: F.instance_norm(T, weight=TW, bias=TB),
        ),
        (families.layer_norm(), tuple(LAST), lambda: F.layer_norm(T, (5,), *map(torch.from_numpy, LAST))),
        (families.rms_norm(), (LAST[0],), lambda: F.rms_norm(T, (5,), torch.from_numpy(LAST[0]))),
        (families.l2_normalize(eps=3.0), (), lambda: F.normalize(T, dim=-1, eps=3.0)),
        (families.tf_l2_normalize(epsilon=9.0), (), lambda: F.normalize(T, dim=-1, eps=3.0)),
        (
            families.channels_first_layer_norm(),
            (W, B),
            lambda: F.layer_norm(T.movedim(1, -1), (6,), TW, TB, 1e-6).movedim(-1, 1),
        ),
        (families.pixel_norm(), (), lambda: F.rms_norm(T.movedim(1, -1), (6,), eps=1e-8).movedim(-1, 1)),
        (
            families.filter_response_norm(),
            (W, B),
            lambda: F.rms_norm(T, (3, 5), eps=1e-6) * TW[:, None, None] + TB[:, None, None],
        ),
        (
            families.weight_standardization(),
            (),
            lambda: (T - T.mean((1, 2, 3), keepdim=True)) / (T.std((1, 2, 3), keepdim=True) + 1e-5),
        ),
        (
            families.biased_weight_standardization(),
            (),
            lambda: F.layer_norm(T, (6, 3, 5), eps=1e-10),
        ),
        (
            families.scaled_weight_standardization(gamma=1.7, eps=50.0, weight=False),
            (),
            lambda: (
                (T - T.mean((1, 2, 3), keepdim=True))
                * 1.7
                * torch.rsqrt(torch.clamp(90 * T.var((1, 2, 3), correction=0, keepdim=True), min=50.0))
            ),
        ),
        (
            families.weight_norm(),
            (W[:4],),
            lambda: torch._weight_norm(T, TW[:4, None, None, None], 0),
        ),
        (
            families.td_batch_norm(0.7, 0.5, layout="b t c ...", running=False),
            (W[:3], B[:3]),
            lambda: F.batch_norm(T.movedim(2, 1), None, None, 0.35 * TW[:3], TB[:3], training=True).movedim(
                1, 2
            ),
        ),
    ],
)
def test_the_family_is_what_pytorch_computes(
    spec: NormSpec, parameters: tuple[np.ndarray, ...], theirs
) -> None:
    np.testing.assert_allclose(reference.forward(X, spec, *parameters), theirs().numpy(), **CLOSE)


def test_running_state_follows_pytorch() -> None:
    layer = torch.nn.BatchNorm2d(6, dtype=torch.float64)
    state = RunningState(np.zeros(6), np.ones(6))
    for scale in (1.0, 2.0):
        layer(scale * T)
        state = reference.update_running(state, scale * X, families.batch_norm())
    np.testing.assert_allclose(state.mean, layer.running_mean.numpy(), **CLOSE)
    np.testing.assert_allclose(state.var, layer.running_var.numpy(), **CLOSE)


def test_whitening_decorrelates() -> None:
    for method in ("zca", "cholesky"):
        spec = families.batch_whitening(3, method=method, eps=0.0, weight=False, bias=False, running=False)
        y = reference.forward(X, spec).transpose(1, 0, 2, 3).reshape(2, 3, -1)
        covariance = y @ y.swapaxes(1, 2) / y.shape[-1]
        np.testing.assert_allclose(covariance, np.broadcast_to(np.eye(3), (2, 3, 3)), **CLOSE)


def test_steps_fold_into_the_batch() -> None:
    """tdBN over (T, B, C) is batch norm over (T B, C), times the threshold."""
    spec = families.td_batch_norm(0.5, weight=False, bias=False, running=False)
    folded = families.td_batch_norm(
        0.5, weight=False, bias=False, running=False, layout="(t b) c ...", steps=4
    )
    x = RNG.standard_normal((4, 2, 3, 5))
    flat = x.reshape(8, 3, 5)
    plain = families.batch_norm(weight=False, bias=False, running=False)
    np.testing.assert_allclose(
        reference.forward(x, spec).reshape(8, 3, 5), 0.5 * reference.forward(flat, plain), **CLOSE
    )
    np.testing.assert_allclose(reference.forward(flat, folded), 0.5 * reference.forward(flat, plain), **CLOSE)


def test_through_time_is_batch_norm_at_each_step() -> None:
    spec = families.batch_norm_through_time(eps=1e-5, running=False)
    x, weight = RNG.standard_normal((4, 2, 3, 5)), RNG.standard_normal((4, 3))
    plain = families.batch_norm(bias=False, running=False)
    each = [reference.forward(step, plain, w) for step, w in zip(x, weight, strict=True)]
    np.testing.assert_allclose(reference.forward(x, spec, weight), np.stack(each), **CLOSE)


def test_a_wrong_rank_is_not_silent() -> None:
    for spec, shape in (
        (families.instance_norm(), (6, 5)),
        (families.td_batch_norm(), (8, 3)),
        (families.filter_response_norm(), (8, 3)),
    ):
        with pytest.raises(ValueError, match=r"the (input|pattern) has .*, the shape has 2"):
            spec.bind(shape)
