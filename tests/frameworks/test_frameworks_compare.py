"""Layers of Keras and Flax compared with torch's: by their specifications, in training and evaluation."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")
pytest.importorskip("flax")
torch = pytest.importorskip("torch")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import linen, nnx  # noqa: E402

import normscope as ns  # noqa: E402

pytestmark = pytest.mark.frameworks


def trained(layer: Any, shape: tuple[int, ...]) -> Any:
    layer.build(shape)
    random = np.random.default_rng(0)
    layer.set_weights([random.uniform(0.5, 1.5, weight.shape) for weight in layer.get_weights()])
    return layer


def test_a_keras_batch_norm_and_its_port_are_one_function_in_every_mode() -> None:
    layer = trained(keras.layers.BatchNormalization(momentum=0.9), (4, 3, 5, 6))
    held = [weight.copy() for weight in layer.get_weights()]
    found = ns.compare(layer, ns.port(layer)[0], layout="b h w c -> b c h w")
    assert found.same, str(found)
    assert found.modes == {"train": True, "eval": True, "update": True}
    for old, new in zip(held, layer.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_torch_stores_another_variance() -> None:
    layer = trained(keras.layers.BatchNormalization(momentum=0.9), (8, 6))
    found = ns.compare(layer, ns.port(layer, layers="torch")[0])
    assert found.same is False
    if keras.backend.backend() != "torch":  # whose variance of squares rounds visibly far from 0
        assert found.modes == {"train": True, "eval": True, "update": False}
    assert [(d.field, d.a, d.b) for d in found.differences] == [("running.correction", "0", "1")]


def test_eps_is_what_differs() -> None:
    found = ns.compare(nnx.LayerNorm(6, rngs=nnx.Rngs(0)), torch.nn.LayerNorm(6))
    assert found.same is False
    assert [(d.field, d.a, d.b) for d in found.differences] == [("eps", "1e-06", "1e-05")]
    assert ns.compare(nnx.LayerNorm(6, epsilon=1e-5, rngs=nnx.Rngs(0)), torch.nn.LayerNorm(6)).same


def test_bound_linen_modules() -> None:
    module = linen.RMSNorm()
    bound = module.bind(module.init(jax.random.key(0), jnp.zeros((2, 6))))
    assert ns.compare(bound, torch.nn.RMSNorm(6, eps=1e-6), (4, 6)).same
    assert ns.compare(bound, torch.nn.LayerNorm(6, eps=1e-6), (4, 6)).same is False


def test_a_fast_variance_is_no_other_function() -> None:
    for layer in (nnx.BatchNorm(6, rngs=nnx.Rngs(0)), nnx.BatchNorm(6, momentum=0.9, rngs=nnx.Rngs(0))):
        assert ns.compare(layer, ns.port(layer, input_shape=(8, 6))[0], (8, 6)).same
