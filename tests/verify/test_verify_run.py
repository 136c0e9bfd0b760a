"""The evidence for PyTorch's own layers: it passes here, holds the known numbers, and fails where a layer is wrong."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from normscope import verify
from normscope.verify import Evidence, VerifyReport
from normscope.verify.unverified import Unverified

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def report():
    return verify.run()


def find(report, words):
    (item,) = [item for item in report.evidence if words in item.claim]
    return item


def test_everything_passes_here(report):
    assert report.passed, "\n".join(str(item) for item in report.failed)
    assert report.failed == ()


def test_every_topic_is_covered(report):
    counts = {}
    for item in report.evidence:
        counts[item.topic] = counts.get(item.topic, 0) + 1
    assert set(counts) == {
        "geometry",
        "batch statistics and running state",
        "axes and special cases",
        "RMS norm",
        "the distribution that comes out",
    }
    assert counts["geometry"] >= 10


def test_claims_differ(report):
    assert len({(item.topic, item.claim) for item in report.evidence}) == len(report.evidence)


def test_every_item_says_what_it_was_checked_on(report):
    for item in report.evidence:
        assert item.input, item.claim
        assert item.because, item.claim
        assert ": " in item.convention, item.claim
        assert item.eps is not None or "eps of the dtype" in item.convention
        assert math.isfinite(item.measured)


def test_known_numbers(report):
    rows = find(report, "autograd's Jacobian is the closed formula").result["rows"]
    assert rows[0] == [0.2399383587, -0.3286112304, 0.0886728717]
    s = math.sqrt(14 / 9 + 0.1)
    zero, radial, other = find(report, "the eigenvalues of J").result["found"]
    # the eigenvalues of a 3 by 3 matrix of norm 0.8 are right to a few ulp
    assert abs(zero) < 1e-15
    assert radial == pytest.approx(0.1 / s**3, abs=1e-15)
    assert other == pytest.approx(1 / s, abs=1e-15)
    first = find(report, "batch norm of the sample 0").result["first output"]
    assert [round(value, 10) for value in first[:2]] == [-0.9950371902, 0.9950371902]
    assert find(report, "central differences").result["step"] == 1e-5


@pytest.mark.filterwarnings("ignore:var()")
@pytest.mark.parametrize(
    ("function", "wrong", "claim"),
    [
        (
            "layer_norm",
            lambda x, shape, weight, bias, eps: (
                (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + eps).sqrt()
            ),
            "autograd's Jacobian is the closed formula",
        ),
        (
            "layer_norm",
            lambda x, shape, weight, bias, eps: (
                (x - x.mean()) / (x.std(-1, correction=0, keepdim=True) + eps)
            ),
            "the eigenvalues of J are 0, eps/s^3 and 1/s",
        ),
        (
            "group_norm",
            lambda x, groups, weight, bias, eps: x,
            "group norm with G = 1 is layer norm over (C, H, W)",
        ),
        (
            "rms_norm",
            lambda x, shape, weight=None, eps=None: F.normalize(x, dim=-1),
            "y = x / sqrt(mean(x^2) + eps)",
        ),
        (
            "batch_norm",
            lambda x, mean, var, weight, bias, training, momentum, eps: x / x.std(0, correction=0),
            "training normalizes by the biased variance of the batch",
        ),
    ],
    ids=["unbiased layer norm", "eps outside", "group norm", "rms", "batch norm"],
)
def test_a_wrong_build_fails(monkeypatch, function, wrong, claim):
    monkeypatch.setattr(F, function, wrong)
    report = verify.run()
    assert not report.passed
    assert any(item.claim.startswith(claim) for item in report.failed)


def test_a_check_that_raises_is_evidence_that_failed(monkeypatch):
    def broken(*args):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(F, "group_norm", broken)
    report = verify.run()
    item = find(report, "the check one group is layer norm runs")
    assert not item.passed
    assert item.because == "RuntimeError: no kernel"
    assert find(report, "batch norm of a batch of one image").passed


def test_json_holds_everything(report):
    record = json.loads(report.to_json())
    assert (record["schema"], record["kind"], record["passed"]) == (1, "verify", True)
    assert set(record["versions"]) == {"normscope", "python", "torch", "numpy", "machine", "cpu", "threads"}
    assert record["versions"]["torch"] == torch.__version__
    assert len(record["evidence"]) == len(report.evidence)
    for item in record["evidence"]:
        assert set(item) == {
            "topic",
            "claim",
            "passed",
            "input",
            "convention",
            "eps",
            "result",
            "measured",
            "relation",
            "tolerance",
            "because",
        }


def item(**changes):
    fields = {"topic": "t", "claim": "c", "input": [1.0, 2.0], "convention": "spec", "eps": 0.1}
    fields |= {"measured": 1e-16, "tolerance": 2e-16, "because": "an ulp", "result": {"y": [0.5]}}
    return Evidence(**(fields | changes))


def test_what_passes():
    assert item().passed
    assert not item(measured=3e-16).passed
    assert item(measured=3e-16, at_least=True).passed
    assert not item(at_least=True).passed
    assert not item(measured=math.nan).passed
    assert not item(measured=math.nan, at_least=True).passed


def test_text_of_one_item():
    assert str(item()) == (
        "passed  c\n"
        "        input [1, 2]\n"
        "        spec\n"
        "        y = [0.5]\n"
        "        measured 1e-16 <= 2e-16: an ulp"
    )


def test_text_of_a_report_says_what_failed_and_repeats_no_convention():
    report = VerifyReport((item(), item(claim="d", measured=1.0)), "mine", {"torch": "2"})
    assert str(report) == (
        "normscope verify: mine\n"
        "\n"
        "t\n"
        "  passed  c\n"
        "          input [1, 2]\n"
        "          spec\n"
        "          y = [0.5]\n"
        "          measured 1e-16 <= 2e-16: an ulp\n"
        "  FAILED  d\n"
        "          input [1, 2]\n"
        "          y = [0.5]\n"
        "          measured 1 <= 2e-16: an ulp\n"
        "\n"
        "with torch 2\n"
        "1 of 2 FAILED"
    )


def test_lists_are_abbreviated_and_written_out_with_long():
    rows = [[float(i + j) for i in range(40)] for j in range(3)]
    report = VerifyReport((item(input=rows, result={}, because="many " * 40),), "mine", {"torch": "2"})
    lines = report.text().splitlines()
    assert max(map(len, lines)) <= 100
    assert "          input 3x40: [[0, 1, 2, 3, 4, 5," in report.text()
    assert str(report) == report.text()
    assert "36, 37, 38, 39, 40, 41]]" in report.text(long=True)


def test_the_evidence_is_readable_on_100_columns(report):
    assert max(map(len, report.text().splitlines())) <= 100
    assert len(report.text(long=True)) > len(report.text())
    for claim in (item.claim for item in report.evidence):
        assert claim.split()[-1] in report.text()


def test_one_norm_is_one_line_a_check_and_explains_its_first_failure():
    items = (item(measured=1.0), item(claim="d", measured=1.0), item(claim="e"))
    assert VerifyReport(items, "mine", {"torch": "2"}, by_norm=True).text() == (
        "normscope verify: mine\n"
        "\n"
        "t\n"
        "  spec\n"
        "  first input [1, 2]\n"
        "  FAILED          1 <= 2e-16  c\n"
        "          input [1, 2]\n"
        "          y = [0.5]\n"
        "          measured 1 <= 2e-16: an ulp\n"
        "  FAILED          1 <= 2e-16  d\n"
        "  passed      1e-16 <= 2e-16  e\n"
        "\n"
        "with torch 2\n"
        "2 of 3 checks of 1 norm FAILED"
    )


def test_several_norms_are_one_line_each_and_those_not_verified_are_named():
    items = (item(), item(topic="u", measured=1.0), item(topic="u"))
    missed = tuple(Unverified(f"n{i}", "my.Norm", "cannot be read") for i in range(8))
    report = VerifyReport(items, "mine", {"torch": "2"}, missed, by_norm=True)
    assert report.text() == (
        "normscope verify: mine\n"
        "\n"
        "  passed  t: 1 checks; spec\n"
        "  FAILED  u: 1 of 2 checks failed; spec\n"
        "  FAILED  c\n"
        "          input [1, 2]\n"
        "          y = [0.5]\n"
        "          measured 1 <= 2e-16: an ulp\n"
        "\n"
        "not verified\n" + "".join(f"  n{i}  my.Norm: cannot be read\n" for i in range(8)) + "\n"
        "with torch 2\n"
        "1 of 3 checks of 2 norms FAILED; 8 norms not verified: n0, n1, n2, n3, n4, n5 and 2 more"
    )
    assert report.to_dict()["not_verified"][0] == {
        "site": "n0",
        "type_name": "my.Norm",
        "why": "cannot be read",
    }


def test_json_of_numbers_that_json_cannot_hold():
    report = VerifyReport((item(measured=math.nan, tolerance=math.inf),), "mine", {})
    (record,) = json.loads(report.to_json())["evidence"]
    assert (record["measured"], record["tolerance"], record["passed"]) == ("NaN", "Infinity", False)
