"""Ratios, means and JSON, on measurements written by hand."""

import json

import pytest

from normscope.bench import ModelRow, Report, Row, Timing
from normscope.bench.machine import Machine
from normscope.bench.report import geometric_mean
from normscope.bench.table import WIDTH, to_text

MACHINE = Machine(
    "Linux x86_64",
    "A processor",
    2,
    32 * 2**20,
    8 * 2**30,
    2,
    "3.11",
    "2.13",
    "0.1",
    "kernels: avx2",
    "tuned",
)


def row(op="rms_norm", eager=4.0, ours=2.0, *, shape=(64, 768), group="small", layout="contiguous", **others):
    forward = Timing({"eager": eager, "compiled": 3.0, "ours": ours, "copy": 1.0}, 10, 9)
    with_backward = Timing({"eager": 8.0, "ours": 5.0, "copy": 1.0}, 10, 4)
    saved = {"eager": 400, "ours": 216}
    found = {
        "dtype": "float32",
        "sets": 64,
        "input_bytes": 200,
        "passes": (2, 5),
        "saved": saved,
        "difference": 1e-7,
        "failures": {},
    }
    return Row(op, shape, group, layout, forward=forward, with_backward=with_backward, **{**found, **others})


def report(*rows):
    models = (
        ModelRow("a network", 5, Timing({"before": 3.0, "after": 2.0, "copy": 1.0}, 7, 7), 1e-6),
        ModelRow("another", note="needs transformers: pip install transformers"),
    )
    return Report(MACHINE, rows, models, ("torch.compile was left out",))


def test_ratios():
    one = row()
    assert one.against("eager", "forward") == 2.0
    assert one.against("compiled", "forward") == 1.5
    assert one.against("compiled", "with_backward") is None
    # A copy is two passes: forward is two as well, with backward five.
    assert one.of_copy_limit("forward") == 0.5
    assert one.of_copy_limit("with_backward") == pytest.approx(2.5 / 5)
    assert one.of_copy_limit("with_backward", "eager") == pytest.approx(2.5 / 8)


def test_each_operation_and_layout_weighs_the_same():
    # rms_norm 4 and 4 over two sizes, layer_norm 1: sqrt(4 * 1), where the mean over lines would be 4^(2/3).
    rows = [row(eager=8.0), row(eager=8.0, shape=(1, 768)), row("layer_norm", eager=2.0, ours=2.0)]
    means = report(*rows).summary()["geometric_means"]["float32"]
    assert means["small"]["forward_against_eager"] == pytest.approx(2.0)
    assert means["all"]["forward_against_eager"] == pytest.approx(2.0)
    assert means["all"]["with_backward_against_compiled"] is None
    assert geometric_mean([]) is None


def test_the_worst_is_named():
    rows = [row(), row("layer_norm", eager=1.0, layout="channels-last")]
    assert report(*rows).worst() == {
        "against_eager": 0.5,
        "where": "layer_norm 64x768 channels-last float32",
        "pass": "forward",
    }
    assert report().worst() is None


def test_json_round_trip():
    first = report(row(), row("layer_norm", failures={"compiled": "OSError: no compiler"}, difference=None))
    text = first.to_json()
    assert Report.from_json(text) == first
    assert Report.from_json(text).to_json() == text
    found = json.loads(text)
    assert found["rows"][0]["forward"]["against"] == {"eager": 2.0, "compiled": 1.5}
    assert found["rows"][0]["with_backward"]["of_copy_limit"]["ours"] == 0.5
    assert found["models"][0]["faster"] == 1.5


def test_another_schema_is_refused():
    with pytest.raises(ValueError, match=r"^a report of schema 1 was expected, got schema 2$"):
        Report.from_json('{"schema": 2}')


def test_table_is_narrow_and_complete():
    text = to_text(report(row(), row("batch_norm_train", shape=(32, 64, 56, 56), layout="channels-last")))
    assert max(map(len, text.splitlines())) <= WIDTH
    for expected in (
        "A processor, 2 cores, Linux x86_64",
        "last-level cache 32 MiB, memory 8.0 GiB, threads 2",
        "allocator: tuned",
        "kernels: avx2",
        "rms_norm",
        "  channels-last",
        "2.00x",
        "9/10",
        "4/10 !",
        "2.00 / 1.08",
        "a network",
        "another: needs transformers: pip install transformers",
        "worst against eager: 1.60x on rms_norm 64x768 contiguous float32, with backward",
        "note: torch.compile was left out",
    ):
        assert expected in text, text
