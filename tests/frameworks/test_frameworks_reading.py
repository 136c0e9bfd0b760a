"""Specifications read from Keras and Flax layers: the reference under each computes what the layer does."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")
pytest.importorskip("flax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import linen, nnx  # noqa: E402

from normscope import reference  # noqa: E402
from normscope.errors import BadInput  # noqa: E402
from normscope.identify import identify  # noqa: E402
from normscope.identify.framework_layers import framework_layer  # noqa: E402
from normscope.reading import UnknownNormalization, read, spec_of  # noqa: E402
from normscope.spec import RunningState, families  # noqa: E402

pytestmark = pytest.mark.frameworks

TOLERANCE = 1e-12
"""float64: sums of 100 numbers of size 1 and a variance by E[x^2] - E[x]^2 lose 1e-14 or so"""
IMAGE, ROWS, TABLE = (4, 3, 5, 6), (4, 3, 6), (4, 6)
layers, rngs = keras.layers, nnx.Rngs(0)


def keras_layer(layer: Any, shape: tuple[int, ...]) -> Any:
    layer.build(shape)
    random = np.random.default_rng(0)
    layer.set_weights([random.uniform(0.5, 1.5, weight.shape) for weight in layer.get_weights()])
    return layer


def nnx_module(module: Any, shape: tuple[int, ...]) -> Any:
    graph, state = nnx.split(module)
    random = np.random.default_rng(0)
    return nnx.merge(
        graph, jax.tree.map(lambda v: jnp.asarray(random.uniform(0.5, 1.5, v.shape), v.dtype), state)
    )


def linen_module(module: Any, shape: tuple[int, ...]) -> Any:
    random = np.random.default_rng(0)
    variables = jax.tree.map(
        lambda v: jnp.asarray(random.uniform(0.5, 1.5, v.shape), v.dtype),
        module.init(jax.random.key(0), jnp.zeros(shape)),
    )
    return module.bind(variables)


KERAS = [
    (layers.BatchNormalization(), IMAGE),
    (layers.BatchNormalization(axis=1, momentum=0.9, epsilon=1e-5), IMAGE),
    (layers.BatchNormalization(axis=2, scale=False), IMAGE),
    (layers.BatchNormalization(axis=-2, center=False), IMAGE),
    (layers.BatchNormalization(axis=0), TABLE),
    (layers.LayerNormalization(), ROWS),
    (layers.LayerNormalization(axis=[-2, -1], scale=False), ROWS),
    (layers.LayerNormalization(axis=[1, 2, 3], center=False), IMAGE),
    (layers.LayerNormalization(rms_scaling=True), ROWS),
    (layers.RMSNormalization(), ROWS),
    (layers.RMSNormalization(axis=[1, 2], epsilon=1e-5), ROWS),
    (layers.GroupNormalization(2), IMAGE),
    (layers.GroupNormalization(3, axis=1, scale=False), (4, 6, 5, 2)),
    (layers.GroupNormalization(-1, axis=2), IMAGE),
    (layers.UnitNormalization(), ROWS),
    (layers.UnitNormalization(axis=[1, 2]), ROWS),
]
NNX = [
    (nnx.BatchNorm(6, rngs=rngs), IMAGE),
    (nnx.BatchNorm(3, axis=1, momentum=0.9, use_scale=False, rngs=rngs), IMAGE),
    (nnx.BatchNorm(5, axis=-2, use_bias=False, use_fast_variance=False, rngs=rngs), IMAGE),
    (nnx.LayerNorm(6, rngs=rngs), ROWS),
    (nnx.LayerNorm(6, reduction_axes=(1, 2), use_bias=False, rngs=rngs), ROWS),
    (nnx.LayerNorm(3, reduction_axes=(-2, -1), feature_axes=-2, rngs=rngs), ROWS),
    (nnx.RMSNorm(6, rngs=rngs), ROWS),
    (nnx.RMSNorm(3, reduction_axes=1, feature_axes=1, rngs=rngs), ROWS),
    (nnx.RMSNorm(6, use_scale=False, rngs=rngs), ROWS),
    (nnx.GroupNorm(6, 2, rngs=rngs), IMAGE),
    (nnx.GroupNorm(6, None, 3, use_bias=False, rngs=rngs), TABLE),
    (nnx.InstanceNorm(6, rngs=rngs), IMAGE),
    (nnx.InstanceNorm(3, feature_axes=1, use_scale=False, rngs=rngs), IMAGE),
]
LINEN = [
    (linen.BatchNorm(use_running_average=False), IMAGE),
    (linen.BatchNorm(use_running_average=True, axis=(1, 3), momentum=0.9), IMAGE),
    (linen.LayerNorm(), ROWS),
    (linen.LayerNorm(reduction_axes=(1, 2), feature_axes=(1, 2), use_scale=False), ROWS),
    (linen.LayerNorm(reduction_axes=-1, feature_axes=1), ROWS),
    (linen.RMSNorm(epsilon=1e-5), ROWS),
    (linen.GroupNorm(num_groups=3), IMAGE),
    (linen.GroupNorm(num_groups=2, reduction_axes=(-1,)), ROWS),
    (linen.GroupNorm(num_groups=None, group_size=3, reduction_axes=(2, 3)), IMAGE),
    (linen.InstanceNorm(use_bias=False), ROWS),
]
CASES = [
    *((keras_layer, *case) for case in KERAS),
    *((nnx_module, *case) for case in NNX),
    *((linen_module, *case) for case in LINEN),
]


@pytest.mark.parametrize(
    ("make", "layer", "shape"), CASES, ids=[f"{m.__name__}-{i}" for i, (m, *_) in enumerate(CASES)]
)
def test_the_reference_under_the_spec_is_the_layer(make: Any, layer: Any, shape: tuple[int, ...]) -> None:
    layer = make(layer, shape)
    found = framework_layer(layer, shape)
    assert found is not None
    reading = found.reading
    values = found.held
    x = np.random.default_rng(1).normal(1.0, 2.0, shape)
    state = None
    if reading.spec.running is not None:
        state = RunningState(values["running_mean"], values["running_var"])
    # a linen module that says use_running_average=True has no other mode: no call can change it
    fixed = make is linen_module and getattr(layer, "use_running_average", None) is True
    for training in (False, True):
        y, after = found.run(x, training, {})
        by_batch = training and not fixed
        expected = reference.forward(
            x, reading.spec, values.get("weight"), values.get("bias"), running=state, training=by_batch
        )
        np.testing.assert_allclose(y, expected, rtol=TOLERANCE, atol=TOLERANCE)
    if state is not None:
        moved = state if fixed else reference.update_running(state, x, reading.spec)
        np.testing.assert_allclose(after["running_mean"], moved.mean, rtol=TOLERANCE)
        np.testing.assert_allclose(after["running_var"], moved.var, rtol=TOLERANCE)


def test_the_families_are_those_of_the_layers() -> None:
    assert spec_of(layers.BatchNormalization()).same_function(families.keras_batch_normalization())
    assert spec_of(layers.GroupNormalization(2)).same_function(families.keras_group_normalization(2))
    assert spec_of(layers.LayerNormalization()).same_function(families.keras_layer_normalization())
    assert spec_of(layers.RMSNormalization()).same_function(families.keras_rms_normalization())
    for module, family in [
        (nnx.BatchNorm(6, rngs=rngs), families.flax_batch_norm()),
        (nnx.LayerNorm(6, rngs=rngs), families.flax_layer_norm()),
        (nnx.GroupNorm(6, 2, rngs=rngs), families.flax_group_norm(2)),
        (nnx.InstanceNorm(6, rngs=rngs), families.flax_instance_norm()),
        (nnx.RMSNorm(6, rngs=rngs), families.flax_rms_norm()),
        (linen.BatchNorm(), families.flax_batch_norm()),
        (linen.LayerNorm(), families.flax_layer_norm()),
    ]:
        assert spec_of(module) == family


def test_modes() -> None:
    norm = read(layers.BatchNormalization())
    assert (norm.mode_now, norm.mode_train, norm.mode_eval) == ("running", "batch", "running")
    assert norm.updates == ("train",)
    frozen = read(layers.BatchNormalization(trainable=False))
    assert (frozen.mode_now, frozen.mode_train, frozen.updates) == ("frozen", "frozen", ())
    module = nnx.BatchNorm(6, rngs=rngs)
    assert read(module).mode_now == "batch"
    module.eval()
    assert read(module).mode_now == "running"
    assert read(linen.BatchNorm(use_running_average=True)).mode_now == "running"


def test_what_no_specification_says() -> None:
    module = nnx.BatchNorm(6, axis_name="batch", dtype=jnp.bfloat16, rngs=rngs)
    reading = read(module)
    assert reading.synchronized
    assert reading.remarks == (
        "the variance is mean(x^2) - mean(x)^2, which loses digits where the mean is large beside the deviation "
        "(use_fast_variance=False does not)",
        "statistics are averaged over the devices of axis 'batch'",
        "the output is bfloat16 whatever the input is",
        "stored statistics are rounded to the dtype of the output before they normalize",
    )
    assert read(nnx.RMSNorm(6, rngs=rngs)).remarks == ()
    half = linen.LayerNorm(force_float32_reductions=False)
    assert spec_of(half).cast.compute == "input"


def test_variables_are_references() -> None:
    layer = keras_layer(layers.BatchNormalization(), IMAGE)
    assert read(layer).tensors["running_var"] is layer.moving_variance.value
    assert read(layers.BatchNormalization()).tensors == {}
    module = nnx.BatchNorm(6, rngs=rngs)
    assert read(module).tensors["running_mean"] is module.mean[...]
    assert read(linen.LayerNorm()).tensors == {}


def test_weight_norms() -> None:
    kernel = np.random.default_rng(0).standard_normal((4, 6))
    module = nnx.WeightNorm(nnx.Linear(4, 6, rngs=rngs), rngs=rngs)
    spec = read(module).spec
    module.layer_instance.kernel[...] = jnp.asarray(kernel, jnp.float32)
    module(jnp.ones((2, 4)))
    expected = reference.forward(kernel, spec, np.ones(6))
    np.testing.assert_allclose(module.layer_instance.kernel[...], expected, rtol=1e-5)
    assert spec_of(linen.WeightNorm(linen.Dense(6))) == spec


class _Own(nnx.LayerNorm):
    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        return 2 * super().__call__(x, mask=mask)


REFUSED = [
    (
        lambda: layers.BatchNormalization(renorm=True),
        "keras.layers.BatchNormalization has renorm=True, which keeps a second pair of statistics for training and "
        "averages standard deviations. No specification holds that. normscope.nn.BatchRenorm2d is batch "
        "renormalization with one pair.",
    ),
    (
        lambda: layers.SpectralNormalization(layers.Dense(6)),
        "keras.layers.SpectralNormalization divides a kernel by its largest singular value, found by power iteration: "
        "it has no statistic sets and is outside the family. Leave it out.",
    ),
    (
        lambda: layers.LayerNormalization(axis=[1, -1]),
        "keras.layers.LayerNormalization names its axes from both ends, [1, -1], and Keras then lays out its gain in "
        "another order than the axes. Count all of them from one end.",
    ),
    (
        lambda: nnx.SpectralNorm(nnx.Linear(4, 6, rngs=rngs), rngs=rngs),
        "flax.nnx.SpectralNorm divides kernels by their largest singular value, found by power iteration: it has no "
        "statistic sets and is outside the family. Leave it out.",
    ),
    (
        lambda: nnx.GroupNorm(6, 2, reduction_axes=(-1,), rngs=rngs),
        "flax.nnx.GroupNorm reduces the axes [-1]. Groups over all axes but the first are read, other axes of a linen "
        "module with input_ndim; an nnx module repeats its statistics along axis 1, right for those alone.",
    ),
    (
        lambda: linen.LayerNorm(reduction_axes=-1, feature_axes=1),
        "flax.linen.LayerNorm reduces [-1] with features on [1], which depends on the rank. Pass input_ndim.",
    ),
    (
        lambda: _Own(6, rngs=rngs),
        f"{__name__}._Own inherits from flax.nnx.LayerNorm but overrides __call__, so it may compute something else. "
        "normscope.identify(layer, example) finds what it computes; or say it with normscope.NormSpec(...).",
    ),
]


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_refused(make: Any, text: str) -> None:
    with pytest.raises(UnknownNormalization) as caught:
        read(make())
    assert str(caught.value) == text


@pytest.mark.parametrize("method", ["call", "_moments"])
def test_a_method_that_was_put_on_a_layer_was_overlooked(method: str) -> None:
    layer = keras_layer(layers.BatchNormalization(), TABLE)
    setattr(layer, method, lambda *given, **named: given[0])
    with pytest.raises(UnknownNormalization) as caught:
        spec_of(layer)
    assert str(caught.value) == (
        f"keras.layers.BatchNormalization has a {method} put on it that is not its class's, so it may compute "
        "something else. Define it in a subclass, and normscope.identify(layer, example) finds what it computes; or "
        "say it with normscope.NormSpec(...)."
    )
    with pytest.raises(
        BadInput, match=f"the {method} that was put on BatchNormalization 'batch_normalization"
    ):
        identify(layer, TABLE)


def test_a_call_put_on_a_flax_module_is_not_what_python_calls() -> None:
    module, x = nnx.LayerNorm(6, rngs=rngs), jnp.arange(12.0).reshape(2, 6)
    module.__call__ = lambda x: 2 * x
    assert jnp.array_equal(module(x), nnx.LayerNorm(6, rngs=rngs)(x))
    assert spec_of(module) == spec_of(nnx.LayerNorm(6, rngs=rngs))


@pytest.mark.parametrize("layer", [layers.Dense(6), nnx.Linear(4, 6, rngs=rngs), linen.Dense(6)])
def test_no_normalization(layer: Any) -> None:
    with pytest.raises(UnknownNormalization) as caught:
        read(layer)
    assert not caught.value.recognized


def test_another_rank_than_it_was_built_for() -> None:
    with pytest.raises(ValueError, match="was built for an input of 4 axes, input_ndim is 3"):
        read(keras_layer(layers.BatchNormalization(), IMAGE), input_ndim=3)


def test_the_torch_kernel_takes_other_axes_than_keras_says() -> None:
    """On (2, 3, 3) it normalizes axis 2 under ``axis=1`` without an error."""
    layer = layers.LayerNormalization(axis=1)
    layer.build((2, 3, 3))
    y = np.asarray(keras.ops.convert_to_numpy(layer(np.random.default_rng(0).standard_normal((2, 3, 3)))))
    if keras.backend.backend() != "torch":
        assert np.abs(y.mean(1)).max() < 1e-6
        assert spec_of(layer).stats == "b d1 ... -> b ..."
        return
    assert np.abs(y.mean(1)).max() > 0.1
    assert np.abs(y.mean(2)).max() < 1e-6
    with pytest.raises(UnknownNormalization) as caught:
        spec_of(layer)
    assert str(caught.value) == (
        "keras.layers.LayerNormalization has axis [1], and on the torch backend Keras gives it to a kernel that "
        "normalizes over the last axes: it raises, or where sizes are equal normalizes over another axis. Move the "
        "axis to the end, or run Keras on another backend."
    )
    assert spec_of(layers.LayerNormalization(axis=[1, 2]), input_ndim=3).weight == "l d"


def test_the_torch_backend_of_keras_takes_the_variance_of_squares() -> None:
    """3000 +- 0.25 in float32: squares near 9e6 are whole numbers, and their mean less 9e6 is 0."""
    layer = layers.BatchNormalization()
    layer.build((4, 1))
    x = np.float32([[3000.25], [2999.75], [3000.25], [2999.75]])
    y = np.asarray(keras.ops.convert_to_numpy(layer(x, training=True)))
    exact = reference.forward(np.float64(x), read(layer).spec, running=RunningState(np.zeros(1), np.ones(1)))
    remarks = read(layer).remarks
    if keras.backend.backend() == "torch":
        assert np.abs(y - exact).max() > 5
        assert remarks == (
            "on the torch backend the variance is mean(x^2) - mean(x)^2, which loses digits where the mean is large "
            "beside the deviation, and may come out below 0",
        )
    else:
        np.testing.assert_allclose(y, exact, atol=1e-3)
        assert remarks == ()
    assert read(layers.LayerNormalization()).remarks == ()
