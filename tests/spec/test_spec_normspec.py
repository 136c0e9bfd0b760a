"""NormSpec, Running and Cast: round trips, equality, and every validation error in full."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from spec_strategies import parsed, specs

from normscope.spec import Cast, NormSpec, Running, RunningState, Sizes, SpecError, families


@parsed
@given(specs())
def test_the_line_reads_back(spec: NormSpec) -> None:
    assert NormSpec.parse(str(spec)) == spec


@parsed
@given(specs())
def test_json_reads_back(spec: NormSpec) -> None:
    text = json.dumps(spec.to_json(), allow_nan=False)
    assert NormSpec.from_json(text) == spec
    assert NormSpec.from_json(json.loads(text)) == spec


@parsed
@given(specs())
def test_the_repr_is_the_call(spec: NormSpec) -> None:
    names = {"NormSpec": NormSpec, "Running": Running, "Cast": Cast, "inf": math.inf}
    assert eval(repr(spec), names) == spec


@parsed
@given(specs())
def test_copies_are_equal_and_hash_alike(spec: NormSpec) -> None:
    for other in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), spec.replace()):
        assert other == spec
        assert hash(other) == hash(spec)


@parsed
@given(specs(), specs())
def test_different_specs_have_different_lines(a: NormSpec, b: NormSpec) -> None:
    assert (a == b) == (str(a) == str(b))


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (
            families.batch_norm(),
            "b c ... -> c; centered; std, biased; eps 1e-05 inside the root; weight c; bias c; "
            "running momentum 0.1, unbiased",
        ),
        (
            families.instance_norm(momentum=None, running=True),
            "b c ... -> b c; rank 3 or more; centered; std, biased; eps 1e-05 inside the root; no weight; no bias; "
            "running cumulative, unbiased",
        ),
        (
            families.gemma_rms_norm(),
            "... d -> ...; not centered; rms; eps 1e-06 inside the root; weight d; no bias; 1.0 added to the weight; "
            "computed in float32",
        ),
        (
            families.scale_norm(),
            "... d -> ...; not centered; l2; eps 1e-05 as the least root; scalar weight; no bias",
        ),
        (
            families.ghost_batch_norm(size=32, remainder="short"),
            "(v b) c ... -> v c, b=32; short remainder; centered; std, biased; eps 1e-05 inside the root; weight c; "
            "bias c; running momentum 0.1, unbiased",
        ),
        (
            families.batch_whitening(4, method="iternorm", iterations=7, state="whitening", eps_at="trace"),
            "b (g c) ... -> g c, c=4; centered; iternorm over c, biased, 7 iterations; "
            "eps 1e-05 of the mean eigenvalue; weight (g c); bias (g c); running momentum 0.1, biased, over (g c); "
            "stored whitening matrix",
        ),
        (
            NormSpec(
                "n c ... -> c",
                ndim=(2, 4),
                sample_axis="n",
                weight="c",
                source="input",
                correction=1.5,
                eps=None,
                eps_at="std",
                gain=-0.5,
                running=Running(momentum=0.0, over="", renorm=(3, math.inf)),
                cast=Cast("input", "after"),
            ),
            "n c ... -> c; rank 2 to 4; samples on n; centered; std, correction 1.5; eps of the dtype "
            "outside the root; weight c; no bias; weight and bias from an input; gain -0.5; "
            "running momentum 0.0, unbiased, over nothing, renorm 3 inf; computed in the dtype of the input; "
            "weight applied after casting back",
        ),
    ],
)
def test_the_line_is_for_people(spec: NormSpec, line: str) -> None:
    assert str(spec) == line
    assert NormSpec.parse(line) == spec


def test_equal_meanings_are_equal() -> None:
    assert NormSpec("b   c ...->c", weight=" c ") == NormSpec("b c ... -> c", weight="c")
    assert NormSpec("b c h w -> c b") == NormSpec("b c h w -> b c")
    assert NormSpec("b c -> c", sample_axis="b") == NormSpec("b c -> c")
    assert NormSpec("b c -> c", running=Running(over="c")) == NormSpec("b c -> c", running=Running())
    assert NormSpec("b c -> c", sizes={"c": 3}) == NormSpec("b c -> c", sizes=Sizes({"c": 3}))
    assert Running(momentum=None) == Running(momentum=0.3, average="cumulative")
    assert NormSpec("b c -> c", weight=None) != NormSpec("b c -> c", weight="")


def test_sizes_are_a_frozen_dict() -> None:
    sizes = Sizes({"g": 2, "a": 3})
    assert sizes == {"a": 3, "g": 2}
    assert {sizes: 1}[Sizes({"a": 3, "g": 2})] == 1
    assert dict(sizes) == {"a": 3, "g": 2}
    with pytest.raises(TypeError):
        sizes["g"] = 4  # type: ignore[index]


@pytest.mark.parametrize("eps", [None, 0, 0.0, -1e-5, 1e-300])
def test_an_odd_eps_can_be_written_down(eps: float | None) -> None:
    assert NormSpec("b c -> c", eps=eps).eps == eps


@pytest.mark.parametrize("momentum", [0, 0.0, 1, 1.5, -1.2, 0.99])
def test_an_odd_momentum_can_be_written_down(momentum: float) -> None:
    assert Running(momentum=momentum).momentum == momentum


def test_running_state_is_a_plain_record() -> None:
    state = RunningState([0.0], [1.0])
    state.batches += 1
    assert (state.mean, state.var, state.batches) == ([0.0], [1.0], 1)


GROUPED = "b (g c) ... -> b g"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"stats": GROUPED},
            "at most one size of a factored axis is free, to be inferred; '(g c)' leaves g and c free; got {}. "
            "Add one, such as sizes={'g': 4}.",
        ),
        (
            {"stats": "b c -> c", "sizes": {"g": 2}},
            "sizes name axes of 'b c -> c'; got 'g'. Its axes are b, c.",
        ),
        (
            {"stats": "b c -> c", "sizes": {"c": 0}},
            "the size of axis c is a positive integer; got 0. Leave out an axis whose size the input decides.",
        ),
        (
            {"stats": "b c -> c", "sizes": {"c": True}},
            "the size of axis c is a positive integer; got True. Leave out an axis whose size the input decides.",
        ),
        (
            {"stats": "b c ... -> c", "ndim": (4, 3)},
            "ndim is (low, high) with 0 <= low <= high, high None for no bound; got (4, 3). "
            "Write (4, 4) or 4 for exactly four axes.",
        ),
        (
            {"stats": "b c h w -> c", "ndim": (2, 3)},
            "ndim allows a rank that 'b c h w -> c' can have; got (2, 3). The pattern has 4 axes.",
        ),
        (
            {"stats": "b c ... -> c", "ndim": (0, 1)},
            "ndim allows a rank that 'b c ... -> c' can have; got (0, 1). The pattern has at least 2 axes.",
        ),
        (
            {"stats": "b c -> c", "sample_axis": "n"},
            "sample_axis is an axis of 'b c -> c', '' or None; got 'n'. "
            "Its axes are b, c; '' says that there are no samples.",
        ),
        (
            {"stats": "b c -> c", "remainder": "drop"},
            "remainder is 'error', 'short' or 'balanced'; got 'drop'. "
            "'short' leaves a short last virtual batch, 'balanced' evens them out.",
        ),
        (
            {"stats": "b c -> c", "remainder": "short"},
            "a remainder needs a sample axis of two factors, the outer kept and the inner erased; got 'b c -> c'. "
            "Write it like '(v b) c ... -> v c', or leave remainder at 'error'.",
        ),
        (
            {"stats": "(v b) c -> v c", "remainder": "short"},
            "with a remainder exactly one of v and b has a size; got {}. "
            "{'b': 32} fixes the size of a virtual batch, {'v': 4} their number.",
        ),
        (
            {"stats": "b c -> c", "weight": "d"},
            "weight lives on axes of 'b c -> c'; got 'd'. Its axes are b, c.",
        ),
        (
            {"stats": "b c -> c", "bias": "c c"},
            "bias names each axis once; got 'c c'. Drop the second one.",
        ),
        (
            {"stats": "b c h -> c", "weight": "(c h)"},
            "weight composes axes as the input does; '(c h)' is no part of an axis of 'b c h -> c'; got '(c h)'. "
            "Without parentheses each axis is one of its own: 'c h w' has shape (C, H, W).",
        ),
        (
            {"stats": "b c -> c", "source": "buffer"},
            "source is 'parameter' or 'input'; got 'buffer'. Adaptive and conditional norms are 'input'.",
        ),
        (
            {"stats": "b c -> c", "gain": math.inf},
            "gain is a finite number; got inf. Leave it at 1.0 for none.",
        ),
        (
            {"stats": "b c -> c", "weight": "c", "weight_offset": math.nan},
            "weight_offset is a finite number; got nan. "
            "It is 1.0 where the stored weight is the distance from one, else 0.0.",
        ),
        (
            {"stats": "b c -> c", "weight_offset": 1.0},
            "weight_offset is added to a weight, and there is none; got 1.0. "
            "Name the weight's axes, or use gain for a fixed factor.",
        ),
        (
            {"stats": "b c -> c", "center": 1},
            "center is True or False; got 1. RMS norms do not center.",
        ),
        (
            {"stats": "b c -> c", "scale": "var"},
            "scale is one of std, rms, l2, zca, cholesky, iternorm; got 'var'. "
            "A variance is 'std', a mean square 'rms', a sum of squares 'l2'.",
        ),
        (
            {"stats": "b c -> c", "eps": "1e-5"},
            "eps is a finite number, or None for the machine epsilon of the computing dtype; got '1e-5'. "
            "Usual values are 1e-5 and 1e-6.",
        ),
        (
            {"stats": "b c -> c", "eps": math.nan},
            "eps is a finite number, or None for the machine epsilon of the computing dtype; got nan. "
            "Usual values are 1e-5 and 1e-6.",
        ),
        (
            {"stats": "b c -> c", "eps_at": "trace"},
            "with scale 'std', eps_at is one of variance, std, max, max_variance; got 'trace'. "
            "'variance' is sqrt(v + eps), 'std' is sqrt(v) + eps.",
        ),
        (
            {"stats": "b c -> c", "scale": "zca", "whiten": "c", "eps_at": "std"},
            "with scale 'zca', eps_at is one of variance, trace; got 'std'. "
            "'variance' is sqrt(v + eps), 'std' is sqrt(v) + eps.",
        ),
        (
            {"stats": "b c -> c", "correction": -1},
            "correction is a number from 0 up; got -1. 0 divides by n, 1 by n - 1.",
        ),
        (
            {"stats": "b c -> c", "scale": "rms", "correction": 1},
            "a correction belongs to a variance, and scale is 'rms'; got 1. Leave correction at 0.",
        ),
        (
            {"stats": "b c -> c", "scale": "zca"},
            "whiten names axes exactly where scale is a whitening; got ('zca', ''). "
            "Write scale='zca', whiten='c', or leave whiten empty.",
        ),
        (
            {"stats": "b c -> c", "whiten": "c"},
            "whiten names axes exactly where scale is a whitening; got ('std', 'c'). "
            "Write scale='zca', whiten='c', or leave whiten empty.",
        ),
        (
            {"stats": "b c -> c", "scale": "zca", "whiten": "b"},
            "whitened axes are kept and named in 'b c -> c'; got 'b'. Kept axes are c.",
        ),
        (
            {"stats": "b c -> c", "iterations": 0},
            "iterations is a positive integer; got 0. The usual number is 5.",
        ),
        (
            {"stats": "b c -> c", "whiten_state": "matrix"},
            "whiten_state is 'covariance' or 'whitening'; got 'matrix'. It says which matrix running state holds.",
        ),
        (
            {"stats": "b c -> c", "cast": "float32"},
            "cast is a Cast; got 'float32'. Write Cast(compute='float32').",
        ),
        (
            {"stats": "b c -> c", "running": 0.1},
            "running is a Running or None; got 0.1. Write Running() for the usual one.",
        ),
        (
            {"stats": "b c -> c", "running": Running(over="b")},
            "running state lives on kept axes of 'b c -> c'; got 'b'. Kept axes are c.",
        ),
        (
            {"stats": "b c -> c", "running": Running(over="d")},
            "running state lives on axes of 'b c -> c'; got 'd'. Its axes are b, c.",
        ),
        (
            {"stats": "... d -> ...", "running": Running()},
            "running state cannot live on samples, and the first of '...' in '... d -> ...' holds them; got '...'. "
            "Name the sample axis b, or say running.over.",
        ),
    ],
)
def test_a_contradiction_says_what_is_wrong(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        NormSpec(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"momentum": "0.1"},
            "momentum is a finite number, the update fraction; got '0.1'. A decay of 0.99 (Keras, Flax) is "
            "momentum 0.01; for a plain mean over batches pass None.",
        ),
        (
            {"average": "mean"},
            "average is 'ema' or 'cumulative'; got 'mean'. An exponential moving average is 'ema'.",
        ),
        (
            {"correction": -1},
            "the correction of the running variance is a number from 0 up; got -1. "
            "1 stores the unbiased variance, 0 the biased one.",
        ),
        (
            {"renorm": (0.5, 1)},
            "renorm is (r_max, d_max) with r_max >= 1 and d_max >= 0; got (0.5, 1). "
            "(1, 0) is plain batch norm, (3, 5) the limits of the paper, math.inf clips nothing.",
        ),
    ],
)
def test_a_bad_running_says_what_is_wrong(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        Running(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"compute": "torch.float32"},
            "compute is one of float16, bfloat16, float32, float64, input or None; got 'torch.float32'. "
            "Write the dtype without 'torch.'.",
        ),
        (
            {"weight": "never"},
            "the weight is applied 'before' or 'after' casting back; got 'never'. "
            "PyTorch's own layers apply it before.",
        ),
    ],
)
def test_a_bad_cast_says_what_is_wrong(fields: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        Cast(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "b c -> c; centred",
            "every clause is one that a specification prints; got 'centred'. The line was 'b c -> c; centred'.",
        ),
        (
            "b (g c) -> b g, g=two",
            "a size is written like g=32; got 'g=two'. The line was 'b (g c) -> b g, g=two'.",
        ),
    ],
)
def test_a_bad_line_says_what_is_wrong(line: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        NormSpec.parse(line)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"stats": "b c -> c"},
            'a specification in JSON has "normspec": 1; got None. Write it anew.',
        ),
        (
            {"normspec": 2, "stats": "b c -> c"},
            'a specification in JSON has "normspec": 1; got 2. Write it anew.',
        ),
        (
            {"normspec": 1, "stats": "b c -> c", "affine": True},
            "a specification in JSON has the fields of NormSpec; got 'affine'. Remove it.",
        ),
    ],
)
def test_bad_json_says_what_is_wrong(data: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        NormSpec.from_json(data)
    assert str(caught.value) == message


def test_importing_spec_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, normscope.spec as s; s.families.batch_norm().properties((8, 3, 4)); "
        "s.families.group_norm(1).same_function(s.families.layer_norm('c h w')); "
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
