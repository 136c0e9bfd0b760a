"""Known findings: the baseline file, ignores with reasons, and how every format tells them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from normscope.cli import settings
from normscope.cli.app import app
from normscope.doctor.baseline import Baseline, Entry, fingerprint
from normscope.doctor.report import Finding, NotRun, Report, SiteRow
from normscope.doctor.suppress import Ignore, suppress
from normscope.doctor.wording import fold
from normscope.errors import BadInput
from normscope.render.github import to_github
from normscope.render.text import to_text

ROOT = Path(__file__).parents[2]
MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.LayerNorm(8, eps=eps)

    def forward(self, x):
        return self.last(self.norm(self.conv(x)).relu().mean((2, 3)))


def model(eps=1e-5):
    torch.manual_seed(0)
    return Net(eps), torch.randn(16, 3, 12, 12)


def worse():
    return model(eps=0.0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "basemodels.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("basemodels", None)


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["check", *args])


def finding(code: str, site: str, severity: str = "warning", value: float = 1.0) -> Finding:
    return Finding(code, site, f"It is {value}.", severity, {"value": value}, name="a-rule", mode="eval")


def report(
    *findings: Finding, passed: tuple[str, ...] = ("NS101",), not_run: tuple[NotRun, ...] = ()
) -> Report:
    return Report(tuple(findings), (), passed, not_run)


# the baseline as such ------------------------------------------------------------------------------------------------


def test_numbers_words_and_order_do_not_matter() -> None:
    known = Baseline.of(report(finding("NS403", "a"), finding("NS401", "b")))
    later = suppress(
        report(finding("NS401", "b", value=7.0), finding("NS403", "a", value=3.0)), baseline=known
    )
    assert not later.findings
    assert [s.by for s in later.suppressed] == ["baseline", "baseline"]
    assert fingerprint(finding("NS403", "a")) == fingerprint(finding("NS403", "a", "error", 9.0))
    others = {fingerprint(f) for f in (finding("NS403", "a"), finding("NS403", "b"), finding("NS401", "a"))}
    assert len(others) == 3


def test_a_folded_finding_is_known_site_by_site() -> None:
    first = [finding("NS403", "a"), finding("NS403", "b")]
    known = Baseline.of(report(*fold(first)))
    assert set(known.entries) == {("NS403", "a", "eval"), ("NS403", "b", "eval")}
    # another site is at the head, and one is new
    now = [finding("NS403", "c", "error"), *first]
    (left,) = suppress(report(*fold(now)), baseline=known).findings
    assert (left.site, left.also, left.message) == ("c", (), "It is 1.0.")
    assert not suppress(report(*fold(first[::-1])), baseline=known).findings


def test_what_follows_from_a_known_finding_goes_with_it() -> None:
    head = replace(finding("NS304", "a"), also=(finding("NS304", "b"),))
    known = Baseline.of(report(head))
    assert set(known.entries) == {("NS304", "a", "eval")}
    more = replace(head, also=(finding("NS304", "b"), finding("NS304", "c")))
    assert not suppress(report(more), baseline=known).findings
    (left,) = suppress(report(finding("NS304", "b")), baseline=known).findings
    assert left.site == "b"


def test_more_of_the_same_and_graver_is_new() -> None:
    known = Baseline.of(report(finding("NS501", "a", "info")))
    twice = suppress(report(finding("NS501", "a", "info"), finding("NS501", "a", "info")), baseline=known)
    assert (len(twice.findings), len(twice.suppressed)) == (1, 1)
    graver = suppress(report(finding("NS501", "a", "error")), baseline=known)
    assert len(graver.findings) == 1
    assert graver.notes == ("the baseline: NS501 at a: graver than accepted (info)",)
    assert not suppress(report(finding("NS501", "a", "info")), baseline=known).notes


def test_stale_entries_are_told_where_the_rule_could_look() -> None:
    known = Baseline.of(report(finding("NS403", "a"), finding("NS401", "b")))
    ran = suppress(report(passed=("NS403", "NS401")), baseline=known)
    assert ran.notes == (
        "the baseline: NS401 at b, NS403 at a: no longer found; write the file anew",
    ) or ran.notes == ("the baseline: NS403 at a, NS401 at b: no longer found; write the file anew",)
    assert not suppress(report(), baseline=known).notes  # neither rule was chosen
    undecided = report(passed=("NS401",), not_run=(NotRun("NS403", "needs data"),))
    assert suppress(undecided, baseline=known).notes == (
        "the baseline: NS401 at b: no longer found; write the file anew",
    )


def test_writing_anew_keeps_reasons_and_what_was_not_looked_at() -> None:
    old = Baseline(
        {
            ("NS403", "a", "eval"): Entry("warning", 1, "measured, harmless"),
            ("NS401", "gone", "eval"): Entry("warning"),
            ("NS701", "", "eval"): Entry("error"),
        }
    )
    now = Baseline.of(report(finding("NS403", "a"), passed=("NS401",)), old)
    assert now.entries == {
        ("NS403", "a", "eval"): Entry("warning", 1, "measured, harmless"),
        ("NS701", "", "eval"): Entry("error"),
    }


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    known = Baseline(
        {("NS403", 'ä "b"', "eval"): Entry("error", 2, "why: not"), ("NS101", "", ""): Entry("info")}
    )
    file = tmp_path / "known.json"
    file.write_text(known.to_json(), encoding="utf-8")
    assert Baseline.read(file).entries == known.entries
    assert Baseline({}).to_json() == '{\n  "normscope_baseline": 1,\n  "findings": []\n}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "JSONDecodeError"),
        ('{"findings": []}', "KeyError: 'normscope_baseline'"),
        ('{"normscope_baseline": 2, "findings": []}', "version 2, this Normscope reads 1"),
        ('{"normscope_baseline": 1, "findings": [{"code": "NS101"}]}', "KeyError: 'site'"),
        (
            '{"normscope_baseline": 1, "findings": [{"code": "NS101", "site": "", "mode": "", "severity": "bad"}]}',
            "no severity",
        ),
        (
            '{"normscope_baseline": 1, "findings": '
            '[{"code": "NS101", "site": "", "mode": "", "severity": "info", "count": 0}]}',
            "a count is a whole number from 1",
        ),
    ],
)
def test_what_is_no_baseline_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "known.json"
    file.write_text(text)
    with pytest.raises(BadInput, match="is no baseline") as caught:
        Baseline.read(file)
    assert words in str(caught.value)
    assert str(caught.value).endswith(f"write it anew with --write-baseline {file}")


# ignores -------------------------------------------------------------------------------------------------------------


def test_ignores_match_names_with_stars_and_nothing_else() -> None:
    rule = Ignore("layer1.*.bn[2]", ("NS5", "NS403"), "known")
    assert rule.matches("layer1.0.x.bn[2]")
    assert not rule.matches("layer1.0.bn2")
    assert rule.covers(finding("NS501", "layer1.0.bn[2]"))
    assert rule.covers(finding("NS403", "layer1.0.bn[2]"))
    assert not rule.covers(finding("NS401", "layer1.0.bn[2]"))
    assert Ignore("*", ("NS5",), "all").matches("")
    with pytest.raises(BadInput, match="needs codes and a reason"):
        Ignore("a", ("NS5",), " ")


def test_stars_made_matching_exponential() -> None:
    """Twelve stars before a name that does not end so took longer than anyone waits."""
    assert not Ignore("*a" * 12 + "b", ("NS5",), "all").matches("a" * 2000)
    assert Ignore("*a" * 12 + "b", ("NS5",), "all").matches("a" * 2000 + "b")


def test_matching_is_that_of_the_pattern() -> None:
    """Against every text and pattern of up to four and five of a few characters, by what ``*`` means."""

    def matches(pattern: str, text: str) -> bool:
        if not pattern:
            return not text
        if pattern[0] == "*":
            return matches(pattern[1:], text) or (bool(text) and matches(pattern, text[1:]))
        return bool(text) and pattern[0] == text[0] and matches(pattern[1:], text[1:])

    texts = ["".join(t) for n in range(6) for t in product("ab", repeat=n)]
    for pattern in ("".join(p) for n in range(5) for p in product("ab*", repeat=n)):
        rule = Ignore(pattern, ("NS5",), "all")
        assert [rule.matches(text) for text in texts] == [matches(pattern, text) for text in texts], pattern


def test_a_deeply_nested_baseline_was_called_a_fault_of_normscope(tmp_path: Path) -> None:
    file = tmp_path / "known.json"
    file.write_text("[" * 200_000)
    with pytest.raises(BadInput, match="is no baseline \\(RecursionError: "):
        Baseline.read(file)


def test_half_a_surrogate_in_a_name_had_no_fingerprint(tmp_path: Path) -> None:
    one = finding("NS403", "a\udc80")
    assert fingerprint(one) != fingerprint(finding("NS403", "a"))
    json.loads(report(one).to_sarif().encode())
    json.loads(report(one).to_json().encode())
    file = tmp_path / "known.json"
    file.write_text(Baseline.of(report(one)).to_json(), encoding="utf-8")
    assert list(Baseline.read(file).entries) == [("NS403", "a\udc80", one.mode)]


def test_an_ignore_of_what_follows_from_another_finding_is_not_called_needless() -> None:
    rows = tuple(
        SiteRow(name, "module", "BatchNorm2d", None, "", "batch", "running", 1, (), ()) for name in "ab"
    )
    head = replace(finding("NS304", "a"), also=(finding("NS304", "b"),))
    done = suppress(replace(report(head), sites=rows), [Ignore("b", ("NS304",), "known")])
    assert done.notes == (
        "the ignore of NS304 at 'b' waits: what it accepts follows from NS304 at a, and is told under it",
    )
    assert done.findings == (head,)


def test_unused_ignores_are_told() -> None:
    row = SiteRow("a", "module", "LayerNorm", None, "", "input", "input", 1, (), ())
    checked = replace(report(finding("NS403", "a"), passed=("NS401",)), sites=(row,))
    ignores = [
        Ignore("a", ("NS403",), "used"),
        Ignore("a", ("NS401",), "unused"),
        Ignore("b", ("NS403",), "no such site"),
        Ignore("a", ("NS7",), "not looked at"),
    ]
    done = suppress(checked, ignores)
    assert [(s.by, s.reason) for s in done.suppressed] == [("settings", "used")]
    assert done.notes == (
        "the ignore of NS401 at 'a' was not needed: nothing was found there",
        "the ignore of NS403 at 'b' matches no normalization of this model",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('site = "a"\ncodes = ["NS501"]', "takes site ="),
        ('site = "a"\ncodes = ["NS501"]\nreason = " "', "with words for a reason"),
        ('site = "a"\ncodes = []\nreason = "x"', "codes is a list of rule codes"),
        ('site = "a"\ncodes = ["NS9"]\nreason = "x"', "names 'NS9', which begins no rule's code"),
        ('site = "a"\ncodes = ["NS501"]\nreason = "x"\nwhy = "y"', "takes site ="),
    ],
)
def test_wrong_ignores_are_named_with_their_file(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[[tool.normscope.ignore-site]]\n{text}\n")
    with pytest.raises(BadInput) as caught:
        settings.load(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path / "pyproject.toml") in str(caught.value)


# the command ---------------------------------------------------------------------------------------------------------


def test_write_then_check_then_a_new_fault(folder: Path) -> None:
    written = run("basemodels:model", "--write-baseline", "known.json", "--fail-on", "info")
    assert written.exit_code == 0, written.output
    assert "known.json accepts" in written.stderr
    entries = json.loads((folder / "known.json").read_text())["findings"]
    assert ("NS501", "norm") in {(e["code"], e["site"]) for e in entries}
    again = run("basemodels:model", "--baseline", "known.json", "--fail-on", "info")
    assert again.exit_code == 0
    assert f"nothing new found; {len(entries)} accepted" in again.stdout
    new = run("basemodels:worse", "--baseline", "known.json")
    assert new.exit_code == 1
    assert "NS104 eps-not-usable  last" in new.stdout


def test_settings_name_a_baseline_beside_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("basemodels:model", "--write-baseline", "known.json")
    (folder / "pyproject.toml").write_text('[tool.normscope]\nbaseline = "known.json"\n')
    below = folder / "below"
    below.mkdir()
    assert settings.load(below).baseline == str(folder / "known.json")
    assert run("basemodels:model", "--fail-on", "info").exit_code == 0


def test_a_missing_baseline_says_how_to_write_it(folder: Path) -> None:
    done = run("basemodels:model", "--baseline", "none.json")
    assert done.exit_code == 2
    assert "the baseline none.json does not exist; write it with --write-baseline none.json" in done.stderr
    assert not (folder / "none.json").exists()


def test_ignored_findings_show_in_every_format(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(
        '[[tool.normscope.ignore-site]]\nsite = "no*"\ncodes = ["NS501"]\nreason = "exported with its bias"\n'
    )
    text = run("basemodels:model").stdout
    assert "NS501 at norm, by the project's settings: exported with its bias" in text
    assert "redundant-bias" not in text
    document = json.loads(run("basemodels:model", "--format", "json").stdout)
    jsonschema.validate(document, json.loads((files("normscope.render") / "report-schema.json").read_text()))
    (accepted,) = document["suppressed"]
    assert (accepted["finding"]["code"], accepted["by"]) == ("NS501", "settings")
    sarif = json.loads(run("basemodels:model", "--format", "sarif").stdout)["runs"][0]
    suppressed = [r for r in sarif["results"] if "suppressions" in r]
    assert [r["ruleId"] for r in suppressed] == ["NS501"]
    assert suppressed[0]["suppressions"] == [{"kind": "external", "justification": "exported with its bias"}]
    assert "NS501" not in run("basemodels:model", "--format", "github").stdout


def test_findings_stand_beside_the_code(folder: Path) -> None:
    line = 1 + MODELS.splitlines().index("class Net(nn.Module):")
    document = json.loads(run("basemodels:model", "--format", "json").stdout)
    assert document["source"] == f"basemodels.py:{line}"
    assert {site["source"] for site in document["sites"]} == {f"basemodels.py:{line}"}
    first = run("basemodels:model", "--format", "github").stdout.splitlines()[0]
    assert first.startswith(f"::notice file=basemodels.py,line={line},title=NS")
    sarif = json.loads(run("basemodels:model", "--format", "sarif").stdout)["runs"][0]
    for result in sarif["results"]:
        place = result["locations"][0]["physicalLocation"]
        assert place == {"artifactLocation": {"uri": "basemodels.py"}, "region": {"startLine": line}}
        assert len(result["partialFingerprints"]["normscope/v1"]) == 16


def test_annotations_cannot_break_out() -> None:
    odd = Finding("NS101", "a", "100%\r\n::error::x", "error", name="n", fix="a:b,c")
    row = SiteRow("a", "module", "x", None, "", "input", "input", 1, (), (), source="a,b:c.py:7")
    (line,) = to_github(replace(report(odd), sites=(row,))).splitlines()
    assert line == ("::error file=a%2Cb%3Ac.py,line=7,title=NS101 n::a: 100%25%0D%0A::error::x Fix: a:b,c")


def test_the_summary_counts_what_is_accepted() -> None:
    known = suppress(report(finding("NS403", "a")), [Ignore("a", ("NS403",), "fine")])
    assert to_text(known).rstrip().endswith("nothing new found; 1 accepted")
    assert known.ok


def test_sarif_tools_reads_it(folder: Path, tmp_path: Path) -> None:
    if find_spec("sarif") is None:
        pytest.skip("sarif-tools is not installed")
    done = run("basemodels:worse", "--format", "sarif")
    (tmp_path / "all.sarif").write_text(done.stdout)
    told = subprocess.run(
        [sys.executable, "-m", "sarif", "summary", "all.sarif"], capture_output=True, text=True, check=True
    )
    assert "error: 1\n" in told.stdout
    assert "NS104" in told.stdout
    subprocess.run([sys.executable, "-m", "sarif", "csv", "all.sarif", "-o", "all.csv"], check=True)
    assert ",NS104," in (tmp_path / "all.csv").read_text()


def test_the_hook_runs(folder: Path, tmp_path: Path) -> None:
    if find_spec("pre_commit") is None or not shutil.which("git"):
        pytest.skip("pre-commit or git is not installed")
    from pre_commit.clientlib import load_manifest

    (hook,) = load_manifest(str(ROOT / ".pre-commit-hooks.yaml"))
    assert hook["entry"] == "normscope check"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment = clean | {
        "PRE_COMMIT_HOME": str(tmp_path / "cache"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }

    def git(*args: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(
            ["git", *identity, *args], check=True, cwd=folder, env=environment, capture_output=True
        )

    hooks = {
        "id": "normscope-check", "name": "check", "entry": hook["entry"], "language": hook["language"],
        "pass_filenames": False, "types": hook["types"], "args": ["basemodels:worse"],
    }  # fmt: skip
    (folder / ".pre-commit-config.yaml").write_text(
        json.dumps({"repos": [{"repo": "local", "hooks": [hooks]}]})
    )
    git("init", "-q")
    git("add", "basemodels.py", ".pre-commit-config.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "run", "--all-files"],
        capture_output=True, text=True, cwd=folder, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NS104" in done.stdout


# --explain and --fix -------------------------------------------------------------------------------------------------


def test_explain_and_its_exit_code(folder: Path) -> None:
    good = run("basemodels:model", "--explain")
    assert good.exit_code == 0, good.output
    assert "1. axes and broadcasting: in order" in good.stdout
    bad = run("basemodels:worse", "--explain", "--format", "json")
    assert bad.exit_code == 1
    document = json.loads(bad.stdout)
    assert [step["number"] for step in document["steps"]] == [1, 2, 3, 4, 5, 6]
    assert document["first"] == 5
    for more in (["--format", "sarif"], ["--html", "x.html"], ["--fix", "NS501", "-o", "x.safetensors"]):
        assert run("basemodels:model", "--explain", *more).exit_code == 2


def test_fix_writes_one_file(folder: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    before = set(folder.iterdir()) | {folder / "__pycache__"}
    done = run("basemodels:model", "--fix", "NS501", "-o", "fixed.safetensors")
    assert "to load it, build conv with bias=False" in done.stderr, done.output
    assert set(folder.iterdir()) - before == {folder / "fixed.safetensors"}
    assert "conv.bias" not in load_file(folder / "fixed.safetensors")
    with safe_open(folder / "fixed.safetensors", "pt") as file:
        made = json.loads(file.metadata()["normscope"])
    assert (made["command"], [site["after"] for site in made["sites"]]) == ("fix NS501", ["without bias"])
    (folder / "fixed.safetensors").unlink()
    none = run("basemodels:worse", "--fix", "NS104", "-o", "fixed.safetensors")
    assert 'in your code: model.get_submodule("last").eps = 1e-05' in none.stderr
    assert not (folder / "fixed.safetensors").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--fix", "NS501"], "--fix and -o FILE belong together"),
        (["-o", "x.safetensors"], "--fix and -o FILE belong together"),
        (["--fix", "NS501", "-o", "x.pt"], "name a .safetensors file"),
        (
            ["--fix", "NS101", "-o", "x.safetensors"],
            "NS101 cannot be fixed mechanically; those that can: NS104",
        ),
    ],
)
def test_wrong_fixes_are_refused(args: list[str], words: str, folder: Path) -> None:
    done = run("basemodels:model", *args)
    assert done.exit_code == 2
    assert words in done.stderr
    assert not list(folder.glob("x.*"))


def test_what_is_ignored_too_leaves_its_entry_of_the_baseline_in_peace() -> None:
    """It was found, no graver than accepted: nothing is told of the entry."""
    known = Baseline.of(report(finding("NS501", "a", "info"), finding("NS501", "b", "info")))
    ignore = Ignore("a", ("NS501",), "exported with its bias")
    both = replace(report(finding("NS501", "a", "info"), finding("NS501", "b", "info")), passed=("NS403",))
    left = suppress(both, [ignore], known)
    assert [(s.by, s.finding.site) for s in left.suppressed] == [("settings", "a"), ("baseline", "b")]
    assert (left.findings, left.notes) == ((), report().notes)
