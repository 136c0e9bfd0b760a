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
from normscope.errors import BadInput  # noqa: E402

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


def bound(module: Any, x: Any) -> Any:
    return module.bind(module.init(jax.random.key(0), x))


def test_a_batch_norm_bound_to_its_stored_statistics_is_another_in_training() -> None:
    x = jnp.zeros((5, 3))
    stored, batch = (bound(linen.BatchNorm(use_running_average=by), x) for by in (True, False))
    found = ns.compare(stored, batch, x.shape)
    assert found.modes == {"train": False, "eval": True, "update": False}
    assert [(d.field, d.a, d.b, d.mode) for d in found.differences] == [
        ("statistics in training", "stored", "of the input", "train")
    ]
    frozen = trained(keras.layers.BatchNormalization(trainable=False), (5, 3))
    assert [
        d.field for d in ns.compare(frozen, trained(keras.layers.BatchNormalization(), (5, 3))).differences
    ] == ["statistics in training"]


def test_the_mode_of_an_nnx_batch_norm_is_no_part_of_its_function() -> None:
    found = ns.compare(
        nnx.BatchNorm(3, use_running_average=True, rngs=nnx.Rngs(0)),
        nnx.BatchNorm(3, rngs=nnx.Rngs(0)),
        (5, 3),
    )
    assert found.same is True
    assert found.notes == (
        "flax.nnx.BatchNorm, on float64: use_running_average=True is the mode it is in, which train(), eval() and each "
        "call set: both were compared",
    )


def test_half_parameters_are_no_other_function() -> None:
    layer = nnx.LayerNorm(6, epsilon=1e-5, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert ns.compare(layer, torch.nn.LayerNorm(6), (4, 6)).same is True


def mixed() -> Any:
    layer = keras.layers.LayerNormalization(epsilon=1e-5, dtype="mixed_bfloat16")
    layer.build((4, 6))
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nnx.LayerNorm(6, epsilon=1e-5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
        lambda: bound(linen.LayerNorm(epsilon=1e-5, dtype=jnp.bfloat16), jnp.zeros((4, 6))),
        mixed,
    ],
    ids=["nnx", "linen", "keras"],
)
def test_a_half_type_is_no_other_function_of_real_numbers(layer: Any) -> None:
    found = ns.compare(layer(), torch.nn.LayerNorm(6), (4, 6))
    assert (found.modes, found.precision) == ({"train": True, "eval": True}, "float64")
    assert found.notes[0].endswith(
        "it computes in bfloat16; compared was the function of real numbers, not how it rounds"
    )


class Scaled(keras.layers.LayerNormalization):
    def call(self, x: Any, training: Any = None) -> Any:
        return super().call(x) * (1.01 if training else 1.0)


def test_keras_layers_that_no_reader_knows_are_compared_as_callables_in_both_modes() -> None:
    right = torch.nn.LayerNorm(6, eps=1e-3)
    scaled = Scaled()
    scaled.build((4, 6))
    found = ns.compare(scaled, right, (4, 6))
    assert found.modes == {"train": False, "eval": True}
    assert [(d.field, d.b, d.mode) for d in found.differences] == [
        ("beyond the specifications", "LayerNorm", "train")
    ]
    inside = keras.Input((6,))
    model = keras.Model(inside, keras.layers.LayerNormalization()(inside))
    assert ns.compare(model, right, (4, 6)).same is True
    random = keras.Sequential([keras.layers.LayerNormalization(), keras.layers.Dropout(0.1)])
    found = ns.compare(random, right, (4, 6))
    assert (found.same, found.modes) == (None, {"train": None, "eval": True})
    assert found.notes[0] == "the output in training was not compared: one of them raises, or is random"


def test_a_call_that_was_put_on_a_keras_layer_is_noticed() -> None:
    layer = trained(keras.layers.LayerNormalization(name="inner"), (4, 6))
    own = layer.call
    layer.call = lambda x: own(x) * 2
    for target in (layer, keras.Sequential([layer])):
        with pytest.raises(BadInput) as caught:
            ns.compare(target, torch.nn.LayerNorm(6), (4, 6))
        assert str(caught.value) == (
            "a Keras layer is identified through a float64 twin, and the call that was put on LayerNormalization "
            "'inner' would be missing there. Define call in a subclass, or pass a function: lambda x: layer(x)"
        )
