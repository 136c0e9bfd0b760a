"""What is measured: choices, shapes, and that ours computes what eager computes."""

import math
import re

import pytest
import torch

from normscope import bench
from normscope.bench import machine
from normscope.bench.contenders import Compiler, runs
from normscope.bench.operations import BEYOND, SHARE, cases
from normscope.errors import BadInput


def test_the_whole_table():
    found = cases()
    assert len({str(case) for case in found}) == len(found)
    assert {case.op.name for case in found} == set(bench.OPS)
    for op in bench.OPS:
        assert {c.group for c in found if c.op.name == op} == {"small", "middle", "large"}
    sizes = {case.size for case in found}
    assert {"1x768", "64x768", "8x1024x768", "2x1024x4096", "32x64x56x56"} <= sizes


def test_choices():
    found = cases(["batch-norm-train"], ["float64"], ["32x64x56x56"])
    assert [str(case) for case in found] == [
        "batch_norm_train 32x64x56x56 contiguous float64",
        "batch_norm_train 32x64x56x56 channels-last float64",
    ]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            {"ops": ["norm"]},
            "there is no operation 'norm' to measure; known: layer_norm, rms_norm, add_rms_norm, add_layer_norm, "
            "batch_norm_train, batch_norm_eval, group_norm, instance_norm, masked_batch_norm, td_batch_norm, "
            "batch_whitening, iter_norm",
        ),
        (
            {"dtypes": ["int8"]},
            "there is no dtype 'int8' to measure; known: float32, bfloat16, float16, float64",
        ),
        (
            {"ops": ["rms_norm"], "sizes": ["3x4"]},
            "there is no size '3x4' to measure; known: small, middle, large, 1x768, 64x768, 8x1024x768, "
            "2x1024x4096",
        ),
    ],
)
def test_unknown_names(choice, message):
    with pytest.raises(BadInput, match=f"^{re.escape(message)}$"):
        cases(**choice)


@pytest.mark.parametrize(("cache", "free"), [(2**20, 2**40), (2**30, 2**28)])
def test_large_is_beyond_the_cache_and_within_memory(monkeypatch, cache, free):
    monkeypatch.setattr(machine, "last_level_cache", lambda: cache)
    monkeypatch.setattr(machine, "memory", lambda: (free, free))
    for case in cases(sizes=["large"]):
        wanted = min(BEYOND * cache, free / SHARE)
        rest = math.prod(case.shape[1:]) * (4 if case.dtype == "float32" else 2)
        assert wanted <= case.bytes < wanted + 16 * rest  # leading entries come in sixteens
        assert case.bytes == math.prod(case.shape) * (4 if case.dtype == "float32" else 2)


def test_cache_sizes_are_read(tmp_path):
    for index, size in enumerate(["48K", "2048K", "36M"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert machine.last_level_cache(tmp_path) == 36 * 2**20
    assert machine.last_level_cache(tmp_path / "nothing") == machine.UNKNOWN_CACHE


@pytest.mark.parametrize("case", cases(dtypes=["float64"], sizes=["small"]), ids=str)
def test_ours_computes_what_eager_computes(case):
    found = runs(case, Compiler(wanted=False))
    assert found.failures == {}
    assert set(found.forward) == set(found.with_backward) == {"eager", "ours", "copy"}
    # Two float64 implementations: sums of at most 64 * 768 terms, a relative 2^-53 a term.
    assert found.difference < 64 * 768 * 2**-53
    assert set(found.saved) == {"eager", "ours"}


def test_inputs_are_as_the_case_says():
    (case,) = cases(["group_norm"], ["bfloat16"], ["2x64x14x14"])[1:]
    tensors = case.tensors()
    assert case.layout == "channels-last"
    assert tensors.x.is_contiguous(memory_format=torch.channels_last)
    assert tensors.gradients[0].is_contiguous(memory_format=torch.channels_last)
    assert tensors.x.dtype == tensors.weight.dtype == torch.bfloat16
    assert torch.equal(tensors.x, case.tensors().x)


def test_a_contender_that_fails_is_named_and_the_others_go_on(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    from normscope import functional

    monkeypatch.setattr(functional, "rms_norm", broken)
    report = bench.run(cases(["rms_norm"], ["float32"], ["small"]), seconds=1e-6, compiled=False)
    row = report.rows[0]
    assert row.failures == {"ours": "RuntimeError: no such kernel"}
    assert set(row.forward.seconds) == {"eager", "copy"}
    assert row.against("eager", "forward") is None
    assert report.notes == (
        "torch.compile was left out",
        "not measured on rms_norm 1x768 contiguous float32 and 1 more: ours: RuntimeError: no such kernel",
    )


def test_without_a_compiler_nothing_is_compiled_twice(monkeypatch):
    tried = []

    def no_compiler(function, **_):
        def compiled(*_):
            tried.append(1)
            raise OSError("no compiler")

        return compiled

    monkeypatch.setattr(torch, "compile", no_compiler)
    report = bench.run(cases(["rms_norm"], ["float32"], ["small"]), seconds=1e-6, compiled=True)
    assert len(tried) == 1
    assert report.notes == (
        "torch.compile was tried once and failed: OSError: no compiler",
        "not measured on rms_norm 1x768 contiguous float32: compiled: OSError: no compiler",
    )
    assert set(report.rows[1].forward.seconds) == {"eager", "ours", "copy"}
