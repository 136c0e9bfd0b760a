"""Ported layers against their source: outputs in evaluation and training, and ten updates of the running statistics.

Flax in float64 (``jax_enable_x64``) to 1e-14; Keras, whose arithmetic is float32, to float32.
"""

from __future__ import annotations

import copy
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
from normscope.identify.adapters.jax_arrays import double_precision  # noqa: E402
from normscope.reading import UnknownNormalization  # noqa: E402

pytestmark = pytest.mark.frameworks

IMAGE, ROWS, TABLE = (4, 3, 5, 6), (4, 3, 6), (8, 6)
FLAX = 1e-14
"""of the largest output: two sums of 60 float64 numbers in another order are a few 1e-16 apart"""
KERAS = 4e-6
"""float32: 64 roundoffs of 2**-24"""
layers, rngs = keras.layers, nnx.Rngs(0)


def apart(mine: Any, other: Any) -> float:
    mine, other = np.asarray(mine, np.float64), np.asarray(other, np.float64)
    assert mine.shape == other.shape
    return float(np.abs(mine - other).max() / np.abs(other).max())


def order_of(report: Any) -> tuple[int, ...] | None:
    said = next((note for note in report.notes if "x.permute(" in note), None)
    return (
        None if said is None else tuple(int(n) for n in said.partition("permute(")[2].strip(")").split(","))
    )


def data(shape: tuple[int, ...], seed: int, dtype: Any = np.float64) -> Any:
    return np.random.default_rng(seed).normal(0.5, 2.0, shape).astype(dtype)


def run(ported: Any, report: Any, x: Any) -> Any:
    order = order_of(report)
    given = torch.from_numpy(x)
    with torch.no_grad():
        if order is None:
            return ported(given).numpy()
        return ported(given.permute(order)).permute(*np.argsort(order)).numpy()


def float64_variables(module: Any) -> Any:
    graph, state = nnx.split(module)
    random = np.random.default_rng(0)
    return nnx.merge(
        graph, jax.tree.map(lambda v: jnp.asarray(random.uniform(0.5, 1.5, v.shape), jnp.float64), state)
    )


NNX = {
    "batch": (
        lambda: nnx.BatchNorm(6, momentum=0.9, use_fast_variance=False, rngs=rngs),
        IMAGE,
        "BatchNorm2d",
    ),
    "fast variance": (lambda: nnx.BatchNorm(6, rngs=rngs), TABLE, "BatchNorm1d"),
    "axis": (
        lambda: nnx.BatchNorm(3, axis=1, use_scale=False, use_fast_variance=False, rngs=rngs),
        IMAGE,
        "BatchNorm2d",
    ),
    "layer": (lambda: nnx.LayerNorm(6, use_fast_variance=False, rngs=rngs), ROWS, "LayerNorm"),
    "no scale": (
        lambda: nnx.LayerNorm(6, use_scale=False, use_fast_variance=False, rngs=rngs),
        ROWS,
        "LayerNorm",
    ),
    "all": (
        lambda: nnx.LayerNorm(
            18, reduction_axes=(-2, -1), feature_axes=(-2, -1), use_fast_variance=False, rngs=rngs
        ),
        ROWS,
        "LayerNorm",
    ),
    "one group": (
        lambda: nnx.LayerNorm(6, reduction_axes=(1, 2, 3), use_fast_variance=False, rngs=rngs),
        IMAGE,
        "GroupNorm",
    ),
    "rms": (lambda: nnx.RMSNorm(6, rngs=rngs), ROWS, "RMSNorm"),
    "group": (lambda: nnx.GroupNorm(6, 2, use_fast_variance=False, rngs=rngs), IMAGE, "GroupNorm"),
    "instance": (
        lambda: nnx.InstanceNorm(6, use_bias=False, use_fast_variance=False, rngs=rngs),
        IMAGE,
        "InstanceNorm2d",
    ),
}


@pytest.mark.parametrize("name", NNX)
def test_nnx(name: str) -> None:
    make, shape, wanted = NNX[name]
    with double_precision():
        layer = float64_variables(make())
        ported, report = ns.port(layer, input_shape=shape)
        assert type(ported).__name__ == wanted
        assert [a.difference <= a.allowed for a in report.agreements]
        assert ported.training == (type(layer).__name__ == "BatchNorm")
        for step in range(10 if ported.training else 1):
            x = data(shape, step)
            assert apart(run(ported, report, x), layer(jnp.asarray(x))) <= FLAX * (
                4 if name == "fast variance" else 1
            )
        if isinstance(layer, nnx.BatchNorm):
            assert apart(ported.running_mean, layer.mean[...]) <= FLAX
            assert apart(ported.running_var, layer.var[...]) <= FLAX
            layer.eval()
            ported.eval()
            x = data(shape, 99)
            assert apart(run(ported, report, x), layer(jnp.asarray(x))) <= FLAX


LINEN = {
    "batch": (linen.BatchNorm(use_running_average=False, momentum=0.8, use_fast_variance=False), IMAGE),
    "layer": (linen.LayerNorm(use_bias=False, use_fast_variance=False), ROWS),
    "rms": (linen.RMSNorm(epsilon=1e-5), TABLE),
    "group": (linen.GroupNorm(num_groups=None, group_size=3, use_fast_variance=False), IMAGE),
    "instance": (linen.InstanceNorm(use_fast_variance=False), ROWS),
}


@pytest.mark.parametrize("name", LINEN)
def test_linen(name: str) -> None:
    module, shape = LINEN[name]
    with double_precision():
        variables = module.init(jax.random.key(0), jnp.zeros(shape))
        random = np.random.default_rng(0)
        variables = jax.tree.map(
            lambda v: jnp.asarray(random.uniform(0.5, 1.5, v.shape), jnp.float64), variables
        )
        ported, report = ns.port(module.bind(variables), input_shape=shape)
        for step in range(10 if name == "batch" else 1):
            x = data(shape, step)
            y, moved = module.apply(variables, jnp.asarray(x), mutable=["batch_stats"])
            variables = {**variables, **moved}
            assert apart(run(ported, report, x), y) <= FLAX
        if name == "batch":
            assert apart(ported.running_var, variables["batch_stats"]["var"]) <= FLAX
            x = data(shape, 99)
            y = module.clone(use_running_average=True).apply(variables, jnp.asarray(x))
            assert apart(run(ported.eval(), report, x), y) <= FLAX


KERAS_LAYERS = {
    "batch": (lambda: layers.BatchNormalization(momentum=0.9), IMAGE, "BatchNorm2d"),
    "axis": (lambda: layers.BatchNormalization(axis=1, scale=False), ROWS, "BatchNorm1d"),
    "table": (lambda: layers.BatchNormalization(center=False), TABLE, "BatchNorm1d"),
    "layer": (lambda: layers.LayerNormalization(), ROWS, "LayerNorm"),
    "layer over two": (lambda: layers.LayerNormalization(axis=[1, 2], center=False), ROWS, "LayerNorm"),
    "rms": (lambda: layers.RMSNormalization(), ROWS, "RMSNorm"),
    "group": (lambda: layers.GroupNormalization(2), IMAGE, "GroupNorm"),
    "groups of one": (lambda: layers.GroupNormalization(-1), IMAGE, "GroupNorm"),
    "unit": (lambda: layers.UnitNormalization(), ROWS, "L2Norm"),
}


def keras_layer(make: Any, shape: tuple[int, ...]) -> Any:
    layer = make()
    layer.build((None, *shape[1:]))
    random = np.random.default_rng(0)
    layer.set_weights([random.uniform(0.5, 1.5, weight.shape) for weight in layer.get_weights()])
    return layer


@pytest.mark.parametrize("name", KERAS_LAYERS)
def test_keras(name: str) -> None:
    make, shape, wanted = KERAS_LAYERS[name]
    layer = keras_layer(make, shape)
    held = [weight.copy() for weight in layer.get_weights()]
    ported, report = ns.port(layer)
    assert type(ported).__name__ == wanted
    assert not ported.training or name not in ("batch", "axis", "table")
    for old, new in zip(held, layer.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    batch = isinstance(layer, layers.BatchNormalization)
    for step in range(10 if batch else 1):
        x = data(shape, step, np.float32)
        y = keras.ops.convert_to_numpy(layer(x, training=True) if batch else layer(x))
        assert apart(run(ported.train(), report, x), y) <= KERAS
    if batch:
        assert apart(ported.running_mean, keras.ops.convert_to_numpy(layer.moving_mean)) <= KERAS
        assert apart(ported.running_var, keras.ops.convert_to_numpy(layer.moving_variance)) <= KERAS
        x = data(shape, 99, np.float32)
        assert apart(run(ported.eval(), report, x), keras.ops.convert_to_numpy(layer(x))) <= KERAS


def test_a_frozen_keras_layer_stays_frozen() -> None:
    layer = keras_layer(lambda: layers.BatchNormalization(trainable=False), IMAGE)
    ported, report = ns.port(layer)
    assert type(ported).__name__ == "FrozenBatchNorm"
    x = data(IMAGE, 0, np.float32)
    y = keras.ops.convert_to_numpy(layer(x, training=True))
    assert apart(run(ported.train(), report, x), y) <= KERAS


def test_channels_first_layer_norms() -> None:
    for make, shape, wanted in [
        (lambda: layers.LayerNormalization(), IMAGE, "ChannelsFirstLayerNorm"),
        (lambda: layers.LayerNormalization(axis=[-3, -2, -1]), IMAGE, "LayerNorm"),
    ]:
        layer = keras_layer(make, shape)
        ported, report = ns.port(layer, channels_first=True)
        assert type(ported).__name__ == wanted
        assert order_of(report) == (0, 3, 1, 2)
        x = data(shape, 0, np.float32)
        assert apart(run(ported, report, x), keras.ops.convert_to_numpy(layer(x))) <= KERAS


def test_torch_layers_drift_as_the_report_says() -> None:
    """The running variance of torch.nn settles M / (M - 1) above: told, and so it comes."""
    layer = keras_layer(lambda: layers.BatchNormalization(momentum=0.5), TABLE)
    ported, report = ns.port(layer, layers="torch")
    assert type(ported) is torch.nn.BatchNorm1d
    assert any("settles 1 / 3 above" in note for note in report.notes), report
    x = data((4, 6), 0, np.float32)
    for _ in range(40):
        layer(x, training=True)
        ported.train()(torch.from_numpy(x))
    ratio = ported.running_var.numpy() / keras.ops.convert_to_numpy(layer.moving_variance)
    np.testing.assert_allclose(ratio, 4 / 3, rtol=1e-5)


BACK = [
    (torch.nn.BatchNorm2d(6, eps=1e-3, momentum=0.2), (4, 6, 5, 3)),
    (torch.nn.LayerNorm(6, eps=1e-6), ROWS),
    (torch.nn.LayerNorm((3, 6)), ROWS),
    (torch.nn.GroupNorm(2, 6), (4, 6, 5)),
    (torch.nn.RMSNorm(6, eps=1e-6), ROWS),
    (ns.nn.RMSNorm(6, convention="gemma"), ROWS),
    (ns.nn.ChannelsFirstLayerNorm(6), (4, 6, 5)),
    (torch.nn.InstanceNorm1d(6, affine=True), (4, 6, 5)),
]


def trained(module: Any) -> Any:
    module = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return module.eval()


@pytest.mark.parametrize("target", ["keras", "flax", "linen"])
@pytest.mark.parametrize("number", range(len(BACK)))
def test_back(number: int, target: str) -> None:
    module, shape = BACK[number]
    module = trained(module)
    arrays, report = ns.port(module, target=target)
    settings = dict(report.settings)
    kind = settings.pop("class")
    x = data(shape, 0, np.float32)
    with torch.no_grad():
        expected = module(torch.from_numpy(x)).numpy()
    last = target != "keras" and kind == "GroupNorm"  # Flax has its channels there
    given = np.moveaxis(x, 1, -1) if last else x
    if target == "keras" and settings.get("axis") == 1 and kind == "LayerNormalization":
        assert any(
            note.startswith("on the torch backend Keras normalizes over the last axes")
            for note in report.notes
        )
        if keras.backend.backend() == "torch":
            return
    if target == "keras":
        layer = getattr(layers, kind)(**settings)
        layer.build(shape)
        layer.set_weights(list(arrays.values()))
        y = keras.ops.convert_to_numpy(layer(given))
    elif target == "linen":
        y = getattr(linen, kind)(**settings).apply(arrays, given)
    else:
        layer = getattr(nnx, kind)(**settings, rngs=rngs)
        nnx.update(layer, jax.tree.map(jnp.asarray, arrays))
        y = layer(jnp.asarray(given))
    y = np.moveaxis(np.asarray(y), -1, 1) if last else np.asarray(y)
    assert apart(y, expected) <= KERAS


def test_states() -> None:
    inside = [
        layers.Dense(6, name="d"),
        layers.BatchNormalization(name="bn"),
        layers.LayerNormalization(name="ln"),
    ]
    model = keras.Sequential([layers.Input((5, 6)), *inside], name="net")
    bn = torch.nn.BatchNorm1d(6)
    model.get_layer("bn").set_weights([np.full(6, value) for value in (2.0, 3.0, 4.0, 5.0)])
    state, report = ns.port({v.path: v for v in model.variables}, source="keras", rename={"net/bn": "net.1"})
    assert set(state) == {f"net.1.{name}" for name in bn.state_dict()} | {"net.ln.weight", "net.ln.bias"}
    bn.load_state_dict({name.rpartition(".")[2]: state[name] for name in state if name.startswith("net.1.")})
    assert [getattr(bn, name)[0].item() for name in ("weight", "bias", "running_mean", "running_var")] == [
        2,
        3,
        4,
        5,
    ]
    assert [site.name for site in report.left] == ["net/d"]

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.dense = nnx.Linear(6, 6, rngs=rngs)
            self.norms = nnx.List([nnx.BatchNorm(6, rngs=rngs), nnx.RMSNorm(6, rngs=rngs)])

    state, report = ns.port(nnx.state(Block()), source="flax")
    assert set(state) == {f"norms.0.{name}" for name in bn.state_dict()} | {"norms.1.weight"}
    variables = linen.BatchNorm(use_running_average=True).init(jax.random.key(0), jnp.zeros(TABLE))
    state, _ = ns.port({c: {"bn": held} for c, held in variables.items()}, source="linen", target="keras")
    assert set(state) == {"bn/gamma", "bn/beta", "bn/moving_mean", "bn/moving_variance"}


def test_bad_layers() -> None:
    for make, text in [
        (
            lambda: ns.port(layers.BatchNormalization()),
            "keras.layers.BatchNormalization has no weight, bias, running_mean, running_var. It is not built: call it "
            "on an input, or layer.build(shape), first.",
        ),
        (
            lambda: ns.port(linen.LayerNorm(), input_shape=ROWS),
            "flax.linen.LayerNorm has no weight, bias. It is not bound to variables: pass module.bind(variables), with "
            "variables from module.init(key, x).",
        ),
        (
            lambda: ns.port(nnx.eval_shape(lambda: nnx.LayerNorm(6, rngs=nnx.Rngs(0))), input_shape=ROWS),
            "flax.nnx.LayerNorm: weight is abstract, a ShapeDtypeStruct of shape (6,) without values. Build the layer, "
            "or load its values, first.",
        ),
        (
            lambda: ns.port(nnx.BatchNorm(6, rngs=rngs)),
            "flax.nnx.BatchNorm does not say how many axes its input has, nor its sizes. Pass input_shape, such as "
            "(8, 32, 32, 64).",
        ),
        (
            lambda: ns.port(nnx.BatchNorm(6, rngs=rngs), input_shape=(4, 5)),
            "weight has shape (6,), and a BatchNorm1d on this input takes (5,). Pass input_shape, the sizes of an "
            "input of the source.",
        ),
        (
            lambda: ns.port(nnx.BatchNorm(6, rngs=rngs), source="keras"),
            "source is 'keras', and BatchNorm is a layer of flax. Leave it out.",
        ),
        (
            lambda: ns.port(nnx.BatchNorm(6, rngs=rngs), target="keras"),
            "a layer of flax is ported to torch; for keras port its state, with source='flax', target='keras'.",
        ),
    ]:
        with pytest.raises(BadInput) as caught:
            make()
        assert str(caught.value) == text


def test_layers_that_torch_has_not() -> None:
    with pytest.raises(UnknownNormalization) as caught:
        ns.port(keras_layer(lambda: layers.LayerNormalization(rms_scaling=True), ROWS))
    assert str(caught.value) == (
        "no layer of torch.nn or normscope.nn computes '... d -> ...' as it is here (no layer divides so). "
        "normscope.normalize(x, spec, weight, bias) computes any."
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_types_are_carried_as_they_are(dtype: Any) -> None:
    layer = nnx.LayerNorm(6, dtype=dtype, param_dtype=dtype, rngs=rngs)
    layer.scale[...] = jnp.asarray([0.1, 0.2, 0.3, 1.7, 2.9, 100.0], dtype)
    ported, report = ns.port(layer)
    assert str(ported.weight.dtype) == f"torch.{jnp.dtype(dtype).name}"
    np.testing.assert_array_equal(
        ported.weight.detach().float().numpy(), np.asarray(layer.scale[...], np.float32)
    )
    assert f"the output is {jnp.dtype(dtype).name} whatever the input is" in report.notes


@pytest.mark.parametrize("make", [nnx.BatchNorm, nnx.LayerNorm])
def test_layers_that_average_over_devices(make: Any) -> None:
    layer = make(6, axis_name="devices", rngs=nnx.Rngs(0))
    _, report = ns.port(layer, input_shape=ROWS)
    does = "in torch SyncBatchNorm does so" if make is nnx.BatchNorm else "torch has no layer that does so"
    assert (
        f"the source takes statistics over several devices together; {does}. This one takes those of what comes into "
        "it, and outputs were compared on one device"
    ) in report.notes
    assert len(report.agreements) == (2 if make is nnx.BatchNorm else 1)
    assert layer.axis_name == "devices"


def test_a_linen_layer_that_averages_over_devices() -> None:
    variables = linen.LayerNorm().init(jax.random.key(0), jnp.zeros(ROWS))
    ported, report = ns.port(linen.LayerNorm(axis_name="devices").bind(variables))
    assert type(ported).__name__ == "LayerNorm"
    assert len(report.agreements) == 1


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.LayerNorm((2, 3), elementwise_affine=False),
        torch.nn.GroupNorm(2, 6, affine=False),
        torch.nn.InstanceNorm1d(6),
        torch.nn.RMSNorm(6, elementwise_affine=False),
        ns.nn.ChannelsFirstLayerNorm(6, elementwise_affine=False),
    ],
)
def test_settings_make_a_layer_without_parameters(module: Any) -> None:
    settings = dict(ns.port(module, target="flax")[1].settings)
    getattr(nnx, settings.pop("class"))(**settings, rngs=rngs)
    assert settings["num_features"] == 6
