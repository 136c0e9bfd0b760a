"""When two specifications are one function, in words: each verdict in full."""

from __future__ import annotations

import numpy as np
import pytest

from normscope import reference
from normscope.spec import NormSpec, Running, SpecError, canonical_factor, families

BN = families.batch_norm(running=False)
IN = families.instance_norm(weight=True, bias=True)
BARE = {"weight": False, "bias": False}
SAME = "the same function"


@pytest.mark.parametrize(
    ("a", "b", "options", "verdict"),
    [
        (
            families.group_norm(1, **BARE),
            families.layer_norm("c h w", **BARE),
            {"shape": (2, 6, 4, 4)},
            SAME,
        ),
        (
            families.group_norm(1, **BARE),
            families.layer_norm("c h w", **BARE),
            {},
            "the same function only where the input has 4 axes",
        ),
        (families.group_norm(1, **BARE, layout="b (g c) h w"), NormSpec("b c h w -> b"), {}, SAME),
        (
            families.group_norm(1),
            families.layer_norm("c h w"),
            {"shape": (2, 6, 4, 4)},
            "the same function only where the weight is constant along ...0 (h of the other), ...1 (w of the other) "
            "and the bias is constant along ...0 (h of the other), ...1 (w of the other)",
        ),
        (families.group_norm(1), families.layer_norm(), {"shape": (8, 6)}, SAME),
        (families.group_norm(6), IN, {"shape": (2, 6, 5)}, SAME),
        (
            families.group_norm(6),
            IN,
            {},
            "the same function only where c has size 1 or the input is the same along c",
        ),
        (
            families.group_norm(3),
            IN,
            {"shape": (2, 6, 5)},
            "the same function only where the input is the same along c",
        ),
        (BN, IN, {"shape": (1, 6, 5)}, SAME),
        (BN, IN, {}, "the same function only where b has size 1 or the input is the same along b"),
        (BN, IN, {"shape": (4, 6, 5)}, "the same function only where the input is the same along b"),
        (
            families.batch_norm(),
            IN,
            {"shape": (1, 6, 5)},
            "the same function only where statistics of the batch normalize, as only one carries running state",
        ),
        (
            families.batch_norm(),
            families.onnx_batch_normalization(),
            {},
            "the same function only where statistics of the batch normalize (correction 1 against 0)",
        ),
        (
            families.batch_norm(),
            families.batch_norm(momentum=None, eps=1e-3),
            {},
            "not the same function: eps 1e-05 at variance of std against 0.001 at variance of std",
        ),
        (
            BN.replace(correction=1),
            IN,
            {"shape": (4, 6, 5)},
            "not the same function: one keeps b, the other erases it; "
            "eps 1e-05 at variance of std, correction 1 against 1e-05 at variance of std",
        ),
        (
            families.layer_norm(bias=False),
            families.rms_norm(eps=1e-5),
            {},
            "the same function only where the mean of every set is 0",
        ),
        (
            families.td_batch_norm(0.5),
            families.td_batch_norm(),
            {},
            f"{SAME}, with second's weight = first's weight * 0.5",
        ),
        (
            families.gemma_rms_norm(),
            families.llama_rms_norm(),
            {},
            f"{SAME}, with second's weight = (1 + first's weight)",
        ),
        (
            families.llama_rms_norm(),
            families.gemma_rms_norm(),
            {},
            f"{SAME}, with second's weight = first's weight - 1",
        ),
        (families.l2_normalize(eps=1e-6), families.tf_l2_normalize(), {}, SAME),
        (
            families.l2_normalize(eps=1e-6),
            families.rms_norm(eps=1e-12, weight=False),
            {"shape": (2, 4)},
            "not the same function: eps 1e-06 at max of l2 against 1e-12 at variance of rms; "
            "without a weight they differ by the factor 2",
        ),
        (
            families.scale_norm(eps=0),
            families.rms_norm(eps=0),
            {"shape": (2, 16)},
            "the same function only where the weight is constant along d, with second's weight = first's weight * 0.25",
        ),
        (
            families.scale_norm(eps=0),
            families.rms_norm(eps=0),
            {},
            "the same function only where the weight is constant along d, with second's weight = "
            "first's weight * a number that the size of a set decides (pass shape)",
        ),
        (
            families.l2_normalize(eps=0),
            families.rms_norm(eps=0),
            {"shape": (2, 16)},
            "the same function only where the second's weight is 0.25",
        ),
        (
            BN,
            families.batch_norm(running=False, weight=False),
            {},
            "the same function only where the first's weight is 1",
        ),
        (
            BN,
            families.batch_norm(running=False, bias=False),
            {},
            "the same function only where the bias is 0",
        ),
        (
            families.td_batch_norm(0.5, **BARE),
            families.td_batch_norm(**BARE),
            {},
            "not the same function: without a weight they differ by the factor 2",
        ),
        (
            BN.replace(source="input"),
            BN,
            {},
            "not the same function: the weight of one is an input, of the other a parameter; "
            "the bias of one is an input, of the other a parameter",
        ),
        (families.ghost_batch_norm(number=1), families.batch_norm(), {}, SAME),
        (
            families.ghost_batch_norm(size=4, remainder="short"),
            families.ghost_batch_norm(size=4),
            {},
            "the same function only where the samples divide into whole virtual batches",
        ),
        (
            families.ghost_batch_norm(size=4, remainder="short"),
            families.ghost_batch_norm(size=4, remainder="balanced"),
            {"shape": (9, 3)},
            "not the same function: they cut the samples into virtual batches of different sizes",
        ),
        (
            families.group_norm(4),
            families.group_norm(6),
            {"shape": (2, 24, 5)},
            "not the same function: one cuts an input axis into g=4, c=6, the other into g=6, c=4",
        ),
        (families.batch_whitening(1, running=False), BN, {}, SAME),
        (
            families.batch_whitening(4),
            families.batch_whitening(4, method="cholesky"),
            {},
            "not the same function: one divides by zca, the other by cholesky",
        ),
        (
            families.batch_whitening(4, method="iternorm"),
            families.batch_whitening(4, method="iternorm", iterations=7),
            {},
            "not the same function: iterations 5 against 7",
        ),
        (
            families.batch_renorm(),
            families.batch_norm(),
            {},
            "not the same function: renorm (3.0, 5.0) against None",
        ),
        (
            families.batch_norm(ndim=(4, 4)),
            families.batch_norm(ndim=(3, 3)),
            {},
            "not the same function: no number of axes is read by both",
        ),
        (
            families.rms_norm(),
            families.rms_norm(eps=1e-6),
            {},
            "not the same function: eps of the dtype at variance of rms against 1e-06 at variance of rms",
        ),
        (
            NormSpec("b t c -> t c", running=Running(over="c")),
            NormSpec("b t c -> t c", running=Running()),
            {},
            "not the same function: the running state of only one has an axis for t",
        ),
    ],
)
def test_the_verdict(a: NormSpec, b: NormSpec, options: dict[str, object], verdict: str) -> None:
    same = a.same_function(b, **options)  # type: ignore[arg-type]
    assert str(same) == verdict
    assert bool(same) == (verdict.startswith(SAME) and "only where" not in verdict)
    assert (same.reason == "") == bool(same)


@pytest.mark.parametrize(
    ("a", "b", "layout"),
    [
        (families.batch_norm(), families.batch_norm(layout="b ... c"), {}),
        (BN, NormSpec("n y x k -> k", weight="k", bias="k"), {"b": "n", "c": "k"}),
        (families.group_norm(4), families.group_norm(4, layout="b ... (g c)"), {}),
        (families.convnext_layer_norm(), families.convnext_layer_norm(channels_first=False), {"c": "d"}),
        (families.td_batch_norm(), families.td_batch_norm(layout="b t c ..."), {}),
        (families.td_batch_norm(), families.td_batch_norm(layout="(t b) c ...", steps=4), {}),
        (
            families.td_batch_norm(layout="(t b) c ...", steps=4),
            families.td_batch_norm(layout="b t c ..."),
            {},
        ),
    ],
)
def test_another_layout_is_the_same_function(a: NormSpec, b: NormSpec, layout: dict[str, str]) -> None:
    verdict = a.same_function(b, layout=layout)
    assert verdict, str(verdict)


def test_the_same_tensor_is_read_in_one_layout() -> None:
    first, last = families.batch_norm(), families.batch_norm(layout="b ... c")
    assert not first.same_function(last, shape=(8, 3, 5))
    assert first.same_function(last, shape=(8, 3))


@pytest.mark.parametrize(
    ("layout", "verdict"),
    [
        (
            {"c": "z"},
            "not the same function: the layout maps 'c' to 'z', which are no axes of the two patterns",
        ),
        (
            {},
            "not the same function: pairing by name leaves b, c of one and k of the other; name more in the layout",
        ),
    ],
)
def test_a_layout_that_does_not_fit(layout: dict[str, str], verdict: str) -> None:
    a, b = NormSpec("b c h -> c"), NormSpec("k h -> k")
    assert str(a.same_function(b, layout=layout)) == verdict


def test_conditions_are_what_makes_them_the_same() -> None:
    """Fulfil each condition and the numbers agree."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 6, 4, 4))
    gain, shift = rng.standard_normal((2, 6))
    np.testing.assert_allclose(
        reference.forward(x, families.group_norm(1), gain, shift),
        reference.forward(
            x,
            families.layer_norm("c h w"),
            np.broadcast_to(gain[:, None, None], (6, 4, 4)),
            np.broadcast_to(shift[:, None, None], (6, 4, 4)),
        ),
        atol=1e-12,
    )
    alike = np.broadcast_to(x[:1], x.shape)
    np.testing.assert_allclose(
        reference.forward(alike, BN, gain, shift), reference.forward(alike, IN, gain, shift), atol=1e-12
    )


def test_weights_convert_as_the_verdict_says() -> None:
    x, weight = np.random.default_rng(1).standard_normal((2, 16))
    a, b = families.gemma_rms_norm(), families.scale_norm(eps=0).replace(weight="d")
    a = a.replace(eps=0)
    verdict = a.same_function(b, shape=(16,))
    assert verdict.weight == "second's weight = (1 + first's weight) * 4"
    np.testing.assert_allclose(
        reference.forward(x, a, weight), reference.forward(x, b, (1 + weight) * 4), atol=1e-12
    )


def test_the_factor_between_corrections() -> None:
    spec = NormSpec("... d -> ...", weight="d", correction=1, eps=1e-6)
    assert canonical_factor(spec, 12) == pytest.approx((11 / 12) ** 0.5, rel=1e-15)
    assert spec.canonical(12).eps == pytest.approx(1e-6 * 11 / 12, rel=1e-15)
    assert spec.replace(eps_at="std").canonical(12).eps == pytest.approx(1e-6 * (11 / 12) ** 0.5, rel=1e-15)
    assert spec.replace(sizes={"d": 12}).canonical() == spec.replace(sizes={"d": 12}).canonical(12)


@pytest.mark.parametrize(
    ("spec", "set_size", "message"),
    [
        (
            NormSpec("b c -> c", correction=1),
            None,
            "the canonical form depends on the number of elements of a set; got set_size=None for "
            "'b c -> c; centered; std, unbiased; eps 1e-05 inside the root; no weight; no bias'. "
            "Pass set_size, such as spec.bind(shape).set_size.",
        ),
        (
            NormSpec("b c -> c", correction=1),
            1,
            "a set has more elements than the correction 1; got set_size=1. Smaller sets have no variance.",
        ),
        (
            NormSpec("b c -> c", correction=1, eps=None),
            4,
            "an eps that follows the dtype cannot be rescaled; got eps=None for "
            "'b c -> c; centered; std, unbiased; eps of the dtype inside the root; no weight; no bias'. "
            "Put in the number first: spec.replace(eps=2**-23).",
        ),
    ],
)
def test_no_canonical_form(spec: NormSpec, set_size: int | None, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec.canonical(set_size)
    assert str(caught.value) == message


def test_a_floor_that_is_never_reached_is_none() -> None:
    assert NormSpec("b c -> c", eps=-1.0, eps_at="max").same_function(NormSpec("b c -> c", eps=0))
    assert not NormSpec("b c -> c", eps=-1.0).same_function(NormSpec("b c -> c", eps=0))
