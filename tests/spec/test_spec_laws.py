"""Properties of the named families, as a person would state them."""

from __future__ import annotations

import pytest

from normscope.spec import NormSpec, Running, SpecError, families


@pytest.mark.parametrize(
    ("spec", "couples", "shift_on_c", "shift_common", "differs"),
    [
        (families.batch_norm(), True, True, True, True),
        (families.layer_norm(), False, None, True, False),
        (families.channels_first_layer_norm(), False, False, True, False),
        (families.group_norm(2), False, False, True, False),
        (families.instance_norm(), False, True, True, False),
        (families.instance_norm(running=True), False, True, True, True),
        (families.rms_norm(), False, None, False, False),
        (families.pixel_norm(), False, False, False, False),
        (families.filter_response_norm(), False, False, False, False),
        (families.ghost_batch_norm(size=4), True, True, True, True),
        (families.td_batch_norm(), True, True, True, True),
        (families.td_layer_norm(), False, False, True, False),
        (families.batch_norm_through_time(), True, True, True, True),
        (families.weight_standardization(), False, None, True, False),
        (families.batch_whitening(4), True, True, True, True),
    ],
)
def test_what_a_family_couples_and_removes(spec, couples, shift_on_c, shift_common, differs) -> None:
    law = spec.properties()
    assert law.couples_samples == couples
    if shift_on_c is not None:
        assert law.removes_shift("c") == shift_on_c
    assert law.removes_shift("") == shift_common
    assert law.train_differs_from_eval == differs
    assert law.state == (("running_mean", law.state[1], "num_batches_tracked") if differs else ())


@pytest.mark.parametrize(
    ("spec", "causal"),
    [
        (families.td_batch_norm(), False),
        (families.td_batch_norm(layout="(t b) c ...", steps=4), False),
        (families.td_layer_norm(per_step=True), True),
        (families.td_layer_norm(per_step=False), False),
        (families.batch_norm_through_time(), True),
        (families.batch_norm(), None),
    ],
)
def test_causality(spec: NormSpec, causal: bool | None) -> None:
    law = spec.properties()
    assert law.causal == causal
    assert law.couples_time == (causal is False)


def test_steps_folded_into_the_samples_are_no_samples() -> None:
    over_steps = NormSpec("(t b) c -> b", sizes={"t": 4}).properties()
    assert (over_steps.couples_samples, over_steps.couples_time) == (False, True)


def test_sizes_turn_laws() -> None:
    """One sample is coupled to nobody; one channel a group makes group norm remove a bias on every channel."""
    assert not families.batch_norm().properties((1, 3, 5)).couples_samples
    assert families.group_norm(6).properties((8, 6, 5)).removes_shift("(g c)")
    assert not families.group_norm(3).properties((8, 6, 5)).removes_shift("(g c)")
    assert not NormSpec("... -> ").properties((1, 4)).couples_samples
    assert NormSpec("... -> ").properties((2, 4)).couples_samples


@pytest.mark.parametrize(
    ("spec", "degree"),
    [
        (families.batch_norm(), "approximate"),
        (families.batch_norm(eps=0.0), "exact"),
        (families.rms_norm(eps=None), "approximate"),
        (families.l2_normalize(), "above eps"),
        (families.scaled_weight_standardization(), "above eps"),
        (families.weight_norm(), "exact"),
        (families.batch_whitening(4, eps_at="trace"), "exact"),
        (families.batch_renorm(), "none"),
        (families.batch_renorm(1, 0), "approximate"),
    ],
)
def test_scale_invariance_is_exact_only_without_eps(spec: NormSpec, degree: str) -> None:
    assert spec.properties().scale_invariance == degree


@pytest.mark.parametrize(
    ("spec", "folds"),
    [
        (families.batch_norm(), ["norm before c", "norm after c", "gain after c", "bias after c"]),
        (families.batch_norm(running=False), ["gain after c", "bias after c"]),
        (families.instance_norm(running=True), ["norm before c", "norm after c"]),
        (families.group_norm(2), ["gain after (g c)", "bias after (g c)"]),
        (families.layer_norm(), ["gain after d", "bias after d", "centering before d"]),
        (families.channels_first_layer_norm(), ["gain after c", "bias after c", "centering before c"]),
        (families.layer_norm("c h w"), []),
        (families.rms_norm(), ["gain after d"]),
        (families.scale_norm(), ["gain after every axis"]),
        (families.batch_norm_through_time(), []),
        (NormSpec("b c -> c", weight="b c", source="input", running=Running()), []),
        (families.l2_normalize(), []),
    ],
)
def test_folds(spec: NormSpec, folds: list[str]) -> None:
    assert [f"{fold.part} {fold.into} {fold.axis}" for fold in spec.properties().folds] == folds


def test_what_moves_a_shift_past_padding_says_so() -> None:
    padded = "no zero padding: at a padded border the shift would be wrong"
    for fold in families.batch_norm().properties().folds:
        assert fold.condition == (padded if fold.into == "after" and fold.part != "gain" else "")


@pytest.mark.parametrize(
    ("spec", "shape", "cautions"),
    [
        (families.batch_norm(), None, []),
        (families.batch_norm(), (8, 3), []),
        (
            families.batch_norm(),
            (1, 3),
            ["a set has 1 element: it is its own mean, and the output is the bias"],
        ),
        (
            families.batch_norm(),
            (2, 3),
            ["a set has 2 elements: the output carries the sign of their difference alone, but for eps"],
        ),
        (
            families.ghost_batch_norm(size=32, remainder="short"),
            (33, 3),
            ["a set has 1 element: it is its own mean, and the output is the bias"],
        ),
        (
            families.rms_norm(eps=1e-6),
            (4, 1),
            ["a set has 1 element: the output carries its sign alone, but for eps"],
        ),
        (
            NormSpec("b c -> c", center=False),
            (1, 3),
            ["a set has 1 element: its variance is 0, and eps alone divides"],
        ),
        (
            NormSpec("b c -> c", correction=3),
            (3, 2),
            ["a set has 3 elements, not more than the correction 3: no variance"],
        ),
        (families.rms_norm(), None, ["eps is the machine epsilon, so the function depends on the dtype"]),
        (families.batch_norm(eps=0), None, ["eps is 0: a set without spread divides 0 by 0"]),
        (
            families.batch_norm(eps=-0.5),
            None,
            ["eps is negative (-0.5): a set of small spread has no real denominator"],
        ),
        (families.batch_norm(momentum=0.0), None, ["momentum is 0.0: stored statistics never move"]),
        (families.batch_norm(momentum=-1.2), None, ["momentum is -1.2: stored statistics do not average"]),
        (families.batch_norm(momentum=None), None, []),
        (families.td_batch_norm(0.0), None, ["gain is 0: the output is the bias"]),
        (
            NormSpec("b c -> c", weight="b c"),
            None,
            ["the weight is a parameter on the samples (b), so it fixes the batch size"],
        ),
        (NormSpec("b c -> c", weight="b c", source="input"), None, []),
    ],
)
def test_cautions(spec: NormSpec, shape: tuple[int, ...] | None, cautions: list[str]) -> None:
    assert list(spec.properties(shape).cautions) == cautions


def test_sizes_with_a_shape_and_none_without() -> None:
    spec = families.batch_norm()
    law = spec.properties((8, 3, 5))
    assert (law.set_size, law.sets, law.weight_shape, law.bias_shape, law.running_shape) == (
        40,
        3,
        (3,),
        (3,),
        (3,),
    )
    law = spec.properties()
    assert (law.set_size, law.sets, law.weight_shape, law.bias_shape, law.running_shape) == (None,) * 5


def test_an_unknown_axis_is_an_error() -> None:
    with pytest.raises(SpecError) as caught:
        families.batch_norm().properties().removes_shift("d")
    assert str(caught.value) == "an axis of 'b c ... -> c' is meant; got 'd'. Its axes are b, c, ...."


def test_the_text() -> None:
    assert str(families.ghost_batch_norm(size=32, remainder="short", weight=False).properties((33, 3))) == (
        "removes a shift: along v, c, ...\n"
        "removes a scale: along v, c, ...\n"
        "to the degree: approximate\n"
        "couples samples: yes\n"
        "couples steps: no\n"
        "causal: no axis t\n"
        "state: running_mean, running_var, num_batches_tracked\n"
        "training differs from evaluation: yes\n"
        "training reads state: no\n"
        "statistic sets: 6 of 32 or 1 elements\n"
        "folds: norm on c by stored statistics into the linear map that feeds it\n"
        "folds: norm on c by stored statistics into the linear map that it feeds; "
        "no zero padding: at a padded border the shift would be wrong\n"
        "folds: bias on c into the linear map that it feeds; "
        "no zero padding: at a padded border the shift would be wrong\n"
        "caution: a set has 1 element: it is its own mean, and the output is the bias"
    )
