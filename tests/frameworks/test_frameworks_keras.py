"""Keras 3 layers, identified as functions through float64 twins; the backend is that of ``KERAS_BACKEND``."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")

from normscope.errors import BadInput  # noqa: E402
from normscope.identify import Identification, identify  # noqa: E402
from normscope.spec import NormSpec, families  # noqa: E402

pytestmark = pytest.mark.frameworks

VERIFIED = 1e-9
"""the promise for float64; rounding gives 1e-15"""
SHAPE = (4, 3, 5, 6)


def built(layer: Any, shape: tuple[int, ...]) -> Any:
    """With random weights, as after training."""
    layer.build(shape)
    random = np.random.default_rng(0)
    layer.set_weights([random.uniform(0.5, 1.5, weight.shape) for weight in layer.get_weights()])
    return layer


def claims(found: Identification, expected: NormSpec, shape: tuple[int, ...]) -> None:
    assert found.spec is not None, str(found)
    same = found.spec.same_function(expected, shape=shape)
    assert same, f"{same}\n{found}"
    assert found.max_error is not None
    assert found.max_error < VERIFIED


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (keras.layers.LayerNormalization(), (4, 3, 6), families.layer_norm(eps=1e-3)),
        (keras.layers.LayerNormalization(axis=[1, 2], epsilon=1e-5), (4, 3, 6), families.layer_norm("l d")),
        (keras.layers.RMSNormalization(), (4, 3, 6), families.rms_norm(eps=1e-6)),
        (keras.layers.GroupNormalization(2), SHAPE, families.group_norm(2, eps=1e-3, layout="b ... (g c)")),
    ],
    ids=["layer", "layer over two", "rms", "group"],
)
def test_layers(layer: Any, shape: tuple[int, ...], expected: NormSpec) -> None:
    layer = built(layer, shape)
    before = [weight.copy() for weight in layer.get_weights()]
    claims(identify(layer, np.zeros(shape, np.float32)), expected, shape)
    for old, new in zip(before, layer.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_unit_normalization() -> None:
    found = identify(keras.layers.UnitNormalization(), (4, 6))
    assert found.spec is not None, str(found)
    assert (found.spec.center, found.spec.scale) == (False, "l2")


def test_batch_normalization_in_evaluation_is_a_fixed_map() -> None:
    layer = built(keras.layers.BatchNormalization(), SHAPE)
    found = identify(layer, SHAPE, layout="b h w c")
    assert found.fixed is not None, str(found)
    assert found.fixed.axes == "c"
    gamma, _, _, variance = (np.asarray(weight, np.float64) for weight in layer.get_weights())
    np.testing.assert_allclose(found.fixed.a, gamma / np.sqrt(variance + 1e-3), rtol=1e-9)


def test_batch_normalization_in_training() -> None:
    layer = built(keras.layers.BatchNormalization(), SHAPE)

    class Trains(keras.layers.BatchNormalization):
        def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            return super().call(inputs, training=True, mask=mask)

    trains = built(Trains(), SHAPE)
    trains.set_weights(layer.get_weights())
    claims(identify(trains, SHAPE), NormSpec("b ... c -> c", weight="c", bias="c", eps=1e-3), SHAPE)
    for old, new in zip(layer.get_weights(), trains.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    "layer", [keras.layers.Softmax(), keras.layers.Dense(6), keras.layers.Activation("gelu")]
)
def test_not_a_normalization(layer: Any) -> None:
    found = identify(layer, (4, 6))
    assert found.spec is None, str(found)


def test_a_layer_that_cannot_be_rebuilt_is_refused() -> None:
    class Own(keras.layers.Layer):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def call(self, x: Any) -> Any:
            return x * self.factor

        def get_config(self) -> dict[str, Any]:
            return {}

    with pytest.raises(BadInput) as caught:
        identify(Own(2.0), (4, 6))
    assert str(caught.value).startswith(
        "a Keras layer is identified through a float64 twin, and Own cannot be rebuilt from its "
        "configuration (TypeError: "
    )


def test_modes_are_for_torch_modules() -> None:
    with pytest.raises(BadInput) as caught:
        identify(built(keras.layers.BatchNormalization(), SHAPE), SHAPE, training=True)
    assert str(caught.value).startswith("training is for torch modules")
