"""Flax layers, nnx and linen, identified as functions: float64 inside, the layer itself untouched."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
from flax import linen, nnx  # noqa: E402

from normscope.errors import BadInput  # noqa: E402
from normscope.identify import Identification, identify  # noqa: E402
from normscope.spec import NormSpec, families  # noqa: E402

pytestmark = pytest.mark.frameworks

VERIFIED = 1e-9
"""the promise for float64; rounding gives 1e-15"""
Shape = tuple[int, ...]


def claims(found: Identification, expected: NormSpec, shape: Shape) -> None:
    assert found.spec is not None, str(found)
    same = found.spec.same_function(expected, shape=shape)
    assert same, f"{same}\n{found}"
    assert found.max_error is not None
    assert found.max_error < VERIFIED


def trained(module: Any) -> Any:
    """Random numbers in every variable, as after training."""
    graph, state = nnx.split(module)
    random = np.random.default_rng(0)
    return nnx.merge(
        graph, jax.tree.map(lambda v: jnp.asarray(random.uniform(0.5, 1.5, v.shape), v.dtype), state)
    )


CHANNELS_LAST = "b ... c"
SHAPE = (4, 3, 5, 6)
INSTANCE = families.instance_norm(eps=1e-6, weight=True, bias=True, layout=CHANNELS_LAST)
BATCH_MODE = NormSpec("b ... c -> c", weight="c", bias="c")


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nnx.LayerNorm(6, rngs=nnx.Rngs(0)), (4, 3, 6), families.layer_norm(eps=1e-6)),
        (
            nnx.LayerNorm(6, use_bias=False, rngs=nnx.Rngs(0)),
            (4, 6),
            families.layer_norm(eps=1e-6, bias=False),
        ),
        (nnx.RMSNorm(6, rngs=nnx.Rngs(0)), (4, 3, 6), families.rms_norm(eps=1e-6)),
        (
            nnx.GroupNorm(6, 2, rngs=nnx.Rngs(0)),
            SHAPE,
            families.group_norm(2, eps=1e-6, layout="b ... (g c)"),
        ),
        (nnx.InstanceNorm(6, rngs=nnx.Rngs(0)), SHAPE, INSTANCE),
        (nnx.BatchNorm(6, rngs=nnx.Rngs(0)), SHAPE, BATCH_MODE),
        (nnx.BatchNorm(6, use_scale=False, rngs=nnx.Rngs(0)), (4, 6), NormSpec("b c -> c", bias="c")),
    ],
    ids=["layer", "layer without bias", "rms", "group", "instance", "batch", "batch without scale"],
)
def test_nnx(module: Any, shape: Shape, expected: NormSpec) -> None:
    layer = trained(module)
    before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(nnx.state(layer))]
    claims(identify(layer, jnp.zeros(shape)), expected, shape)
    for old, leaf in zip(before, jax.tree.leaves(nnx.state(layer)), strict=True):
        np.testing.assert_array_equal(old, np.asarray(leaf))
    assert not jax.config.jax_enable_x64


def test_nnx_batch_norm_by_stored_statistics_is_a_fixed_map() -> None:
    layer = trained(nnx.BatchNorm(6, use_running_average=True, rngs=nnx.Rngs(0)))
    found = identify(layer, jnp.zeros(SHAPE), layout="b h w c")
    assert found.fixed is not None, str(found)
    assert found.fixed.axes == "c"
    slope = layer.scale[...] / np.sqrt(np.asarray(layer.var[...], np.float64) + 1e-5)
    np.testing.assert_allclose(found.fixed.a, slope, rtol=1e-6)


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (linen.LayerNorm(), (4, 3, 6), families.layer_norm(eps=1e-6)),
        (linen.RMSNorm(epsilon=1e-5), (4, 6), families.rms_norm(eps=1e-5)),
        (linen.GroupNorm(num_groups=3), SHAPE, families.group_norm(3, eps=1e-6, layout="b ... (g c)")),
        (linen.BatchNorm(use_running_average=False), SHAPE, BATCH_MODE),
    ],
    ids=["layer", "rms", "group", "batch"],
)
def test_linen(module: Any, shape: Shape, expected: NormSpec) -> None:
    random = np.random.default_rng(0)
    variables = jax.tree.map(
        lambda v: jnp.asarray(random.uniform(0.5, 1.5, v.shape), v.dtype),
        module.init(jax.random.key(0), jnp.zeros(shape)),
    )
    claims(identify(module.bind(variables), shape), expected, shape)


def test_linen_without_variables_is_refused() -> None:
    with pytest.raises(BadInput) as caught:
        identify(linen.LayerNorm(), (4, 6))
    assert str(caught.value) == (
        "a linen module is identified with its variables; LayerNorm is not bound to any. Pass module.bind(variables), "
        "with variables from module.init(key, x)"
    )


def test_a_jitted_function_in_its_own_precision() -> None:
    @jax.jit
    def norm(x: Any) -> Any:
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    found = identify(norm, jnp.zeros((4, 8)))
    assert found.spec is not None, str(found)
    assert (found.spec.center, found.spec.scale, found.spec.eps) == (False, "rms", 1e-6)


@pytest.mark.parametrize("module", [nnx.Linear(6, 6, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))])
def test_not_a_normalization(module: Any) -> None:
    found = identify(module, jnp.zeros((4, 6)))
    assert found.spec is None, str(found)


def test_torch_is_not_needed() -> None:
    assert "torch" not in sys.modules


def standardized(x: Any) -> Any:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-3)


@pytest.mark.parametrize(
    "fn", [standardized, jax.jit(standardized), lambda x: standardized(x.at[0].set(x[0]))]
)
@pytest.mark.parametrize("example", [(4, 6), np.zeros((4, 6)), np.zeros((4, 6), np.float32)])
def test_a_jax_function_with_an_example_of_numpy_was_refused(fn: Any, example: Any) -> None:
    found = identify(fn, example)
    assert found.spec is not None
    assert found.spec == NormSpec("... d -> ...", eps=found.spec.eps)
    assert found.spec.eps == pytest.approx(1e-3, rel=1e-5)
    assert found.name.endswith(", on JAX float32")
    assert "it was called with JAX arrays of float32, as it is a function of these" in found.notes
