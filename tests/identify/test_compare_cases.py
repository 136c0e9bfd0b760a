"""Pairs that people confuse: decided right, with a counterexample that holds when it is computed anew."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

import normscope as ns
from normscope import NormSpec, families, reference
from normscope.identify.compare_result import Comparison, Counterexample, Difference

ROUNDING = 1e-9
"""two ways to compute one function in float64 on inputs of conditioning up to 1e6, relative to outputs near 1"""


def named(c: Comparison) -> dict[str, Difference]:
    return {d.field: d for d in c.differences}


def from_scratch(obj: Any, shown: Counterexample, values: Any) -> np.ndarray:
    """The output of one side on a counterexample, by nothing of the comparison."""
    if isinstance(obj, NormSpec):
        state = (
            ns.RunningState(values["running_mean"], values["running_var"])
            if "running_mean" in values
            else None
        )
        if shown.mode == "update":
            after = reference.update_running(state, shown.x, obj)
            return np.asarray({"running_mean": after.mean, "running_var": after.var}[shown.quantity])
        y = reference.forward(
            shown.x,
            obj,
            values.get("weight"),
            values.get("bias"),
            running=state,
            training=shown.mode == "train",
        )
        return np.asarray(y)
    dtype = torch.bfloat16 if shown.mode == "bfloat16" else torch.float64
    module = copy.deepcopy(obj).to(dtype).train(shown.mode in ("train", "update"))
    with torch.no_grad():
        for name, value in values.items():
            getattr(module, name).copy_(torch.tensor(value))
        y = module(torch.tensor(shown.x).to(dtype))
    return (getattr(module, shown.quantity) if shown.mode == "update" else y).double().numpy()


def holds(c: Comparison, a: Any, b: Any, exact: float = ROUNDING) -> Counterexample:
    """The counterexample of two that differ is real, and is what it says."""
    assert c.same is False
    shown = c.counterexample
    assert shown is not None
    y_a, y_b = from_scratch(a, shown, shown.values_a), from_scratch(b, shown, shown.values_b)
    assert_allclose(y_a, shown.y_a, rtol=exact, atol=exact)
    assert_allclose(y_b, shown.y_b, rtol=exact, atol=exact)
    assert math.isclose(float(np.abs(y_a - y_b).max()), shown.difference, rel_tol=1e-6)
    assert shown.difference > 1e-3
    return shown


def test_layer_norm_is_group_norm_of_one_group_without_affine() -> None:
    c = ns.compare(nn.LayerNorm((6, 5, 5), elementwise_affine=False), nn.GroupNorm(1, 6, affine=False))
    assert (c.same, c.differences, c.counterexample) == (True, (), None)
    assert c.modes == {"train": True, "eval": True, "bfloat16": True, "float16": True}
    assert c.dtypes == {"float64": True, "bfloat16": True, "float16": True}


def test_layer_norm_is_not_group_norm_of_one_group_with_affine() -> None:
    """As initialized they agree; the weight of one lives on every position, of the other on channels."""
    a, b = nn.LayerNorm((6, 3, 2)), nn.GroupNorm(1, 6)
    c = ns.compare(a, b)
    shown = holds(c, a, b)
    assert set(named(c)) == {"weight", "bias"}
    assert (named(c)["weight"].a, named(c)["weight"].b) == ("on c h w", "on (g c)")
    assert shown.values_a["weight"].shape == (6, 3, 2)
    assert shown.values_b["weight"].shape == (6,)
    assert "with the values held now they agree; with the values of the counterexample they do not" in c.notes


def test_group_norm_of_every_channel_is_instance_norm() -> None:
    assert ns.compare(nn.GroupNorm(6, 6), nn.InstanceNorm2d(6, affine=True)).same is True
    assert ns.compare(nn.GroupNorm(3, 6), nn.InstanceNorm2d(6, affine=True)).same is False


@pytest.mark.parametrize("eps", [1e-5, 1e-12])
def test_eps_inside_and_outside_the_root(eps: float) -> None:
    a, b = families.layer_norm(eps=eps), families.layer_norm(eps=eps).replace(eps_at="std")
    c = ns.compare(a, b)
    shown = holds(c, a, b)
    assert [(d.field, d.a, d.b, d.mode) for d in c.differences] == [("eps_at", "variance", "std", "both")]
    assert float(np.std(shown.x)) < 100 * math.sqrt(eps), "it shows where the spread is near eps"


def test_biased_and_unbiased() -> None:
    a = families.layer_norm(weight=False, bias=False)
    b = a.replace(correction=1)
    c = ns.compare(a, b)
    shown = holds(c, a, b)
    assert list(named(c)) == ["correction"]
    assert shown.x.shape == (2,), "the smallest set that has an unbiased variance"
    factor = shown.y_a[0] / shown.y_b[0]
    assert 1 < factor <= math.sqrt(2) + 1e-9, "n / (n - 1) = 2 under the root, less what eps takes"


def test_a_correction_that_weight_and_eps_make_up_for_is_a_convention() -> None:
    """(w, correction 1, eps 0) is (w / sqrt(c), correction 0, eps 0): one function, other numbers."""
    a = families.layer_norm(eps=0.0)
    c = ns.compare(a, a.replace(correction=1), (3, 4))
    assert c.same is True
    assert [(d.field, d.mode) for d in c.differences] == [("correction", "parameters")]
    assert c.notes == ("the same function of their weights with second's weight = first's weight * 1.1547",)


def test_rms_and_layer_norm_agree_on_centered_data_and_nowhere_else() -> None:
    a, b = nn.LayerNorm(8, bias=False), nn.RMSNorm(8, eps=1e-5)
    c = ns.compare(a, b)
    shown = holds(c, a, b)
    assert [(d.field, d.a, d.b) for d in c.differences] == [("center", "True", "False")]
    assert abs(shown.x.mean()) > 0.1
    assert "they agree where the mean of every set is 0 (confirmed on such an input)" in c.notes
    centered = torch.tensor(shown.x - shown.x.mean(-1, keepdims=True))
    assert_allclose(a.double()(centered).detach(), b.double()(centered).detach(), atol=ROUNDING)


def test_momentum_of_keras_and_of_pytorch() -> None:
    """One output, in training and in evaluation; the stored statistics move ten times as fast."""
    keras = families.keras_batch_normalization(epsilon=1e-5, channels_last=False)
    c = ns.compare(keras, families.batch_norm())
    holds(c, keras, families.batch_norm())
    assert c.modes == {"train": True, "eval": True, "update": False}
    assert [(d.field, d.a, d.b, d.mode) for d in c.differences] == [
        ("running.momentum", "0.01", "0.1", "update"),
        ("running.correction", "0", "1", "update"),
    ]


def test_momentum_of_two_modules() -> None:
    a, b = nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=0.01)
    c = ns.compare(a, b)
    shown = holds(c, a, b)
    halves = dict.fromkeys(("bfloat16", "float16", "bfloat16 in training"), True)
    assert c.modes == {"train": True, "eval": True, "update": False, **halves}
    assert [(d.field, d.a, d.b) for d in c.differences] == [("running.momentum", "0.1", "0.01")]
    assert shown.quantity in ("running_mean", "running_var")


def test_the_order_of_casts_of_llama_and_gemma_shows_in_bfloat16() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm(16)
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma").GemmaRMSNorm(16)
    c = ns.compare(llama, gemma)
    shown = holds(c, llama, gemma, exact=0.0)
    assert c.modes == {"train": True, "eval": True, "bfloat16": False, "float16": False}
    found = named(c)
    assert (found["cast.weight"].a, found["cast.weight"].b) == ("after", "before")
    assert (found["weight_offset"].mode, found["weight_offset"].b) == ("parameters", "1")
    assert shown.mode == "bfloat16"
    assert_allclose(shown.values_a["weight"], shown.values_b["weight"] + 1, rtol=1e-15)


def test_two_classes_of_one_formula_are_the_same() -> None:
    models = pytest.importorskip("transformers.models.llama.modeling_llama")
    mistral = pytest.importorskip("transformers.models.mistral.modeling_mistral")
    assert ns.compare(models.LlamaRMSNorm(8), mistral.MistralRMSNorm(8)).same is True
    assert ns.compare(models.LlamaRMSNorm(8), families.llama_rms_norm()).same is True


def test_layer_norm_per_token_and_over_the_whole_sample() -> None:
    a, b = families.layer_norm(weight=False, bias=False), families.layer_norm("l d", weight=False, bias=False)
    c = ns.compare(a, b, (4, 7, 6))
    shown = holds(c, a, b)
    assert [(d.field, d.a, d.b, d.mode) for d in c.differences] == [
        ("axes", "... d -> ...", "... l d -> ...", "both")
    ]
    assert shown.x.shape[-2] > 1, "one token is a whole sample"
    assert ns.compare(a, b, (4, 1, 6)).same is True


def test_values_that_differ_are_told_as_such() -> None:
    a, b = nn.LayerNorm(4), nn.LayerNorm(4)
    nn.init.constant_(b.weight, 2.0)
    c = ns.compare(a, b)
    holds(c, a, b)
    assert [(d.field, d.a, d.b, d.mode) for d in c.differences] == [("weight values", "1", "2", "both")]


def test_stored_statistics_that_differ_show_in_evaluation_alone() -> None:
    a, b = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    nn.init.constant_(b.running_mean, 1.0)
    c = ns.compare(a, b)
    holds(c, a, b)
    assert c.modes == {"train": True, "eval": False, "update": False}
    assert [(d.field, d.mode) for d in c.differences] == [("running_mean values", "eval")]


def test_running_state_on_one_side_only() -> None:
    a, b = families.batch_norm(), families.batch_norm(running=False)
    c = ns.compare(a, b)
    holds(c, a, b)
    assert c.modes == {"train": True, "eval": False}
    assert [(d.field, d.mode) for d in c.differences] == [("running", "eval")]


def test_no_rank_in_common() -> None:
    c = ns.compare(nn.BatchNorm1d(4), nn.BatchNorm2d(4))
    assert (c.same, c.counterexample) == (False, None)
    assert c.notes == ("no input has a number of axes that both take",)


def test_channels_last_beside_channels_first() -> None:
    first = nn.BatchNorm2d(4, momentum=0.1)
    last = families.batch_norm(layout="b ... c")
    assert ns.compare(first, last, layout="b c h w -> b h w c").same is True
    c = ns.compare(first, last.replace(eps=1e-3), (2, 4, 3, 3), layout="b c h w -> b h w c")
    assert c.same is False
    assert c.counterexample is not None
    x = c.counterexample.x  # in the order of the first
    held = c.counterexample.values_b
    assert c.counterexample.mode == "train"
    y = reference.forward(x.transpose(0, 2, 3, 1), last.replace(eps=1e-3), held["weight"], held["bias"])
    assert_allclose(y.transpose(0, 3, 1, 2), c.counterexample.y_b, rtol=ROUNDING)


def test_a_comparison_can_be_read_and_stored() -> None:
    import json

    c = ns.compare(nn.LayerNorm(4), nn.LayerNorm(4, eps=1e-3))
    text = str(c)
    assert text.startswith("LayerNorm and LayerNorm: not the same function\n")
    assert "  - eps: 1e-05 against 0.001; alone it changes the output by up to " in text
    assert "  counterexample, made small (output in training, output, off by " in text
    document = json.loads(json.dumps(c.to_json()))
    assert document["same"] is False
    assert document["differences"][0]["field"] == "eps"
    assert document["counterexample"]["x"] == c.counterexample.x.tolist()  # type: ignore[union-attr]
    assert not c
    assert str(ns.compare(nn.LayerNorm(4), nn.LayerNorm(4))).startswith(
        "LayerNorm and LayerNorm: the same function"
    )
