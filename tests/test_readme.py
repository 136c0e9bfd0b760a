"""The READMEs say what the product does: real output, and two languages in step."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def shape(output: str) -> list[tuple[str, str, str]]:
    """Severity, code and site of each finding: what the numbers' last digits, which a machine may change, leave."""
    return re.findall(r"^(error|warning|info) +(NS\d{3}) \S+ +(\S+)", output, flags=re.M)


def test_the_screenful_is_real() -> None:
    command = [sys.executable, "-c", "from normscope.cli import main; main()", "check", "demo"]
    real = subprocess.run(command, capture_output=True, text=True).stdout
    (shown,) = fenced(ENGLISH, "text")
    assert shape(shown) == shape(real)
    assert len({code for _, code, _ in shape(real)}) >= 4
    assert shown.splitlines()[-1] == real.splitlines()[-1]


def test_both_languages_have_the_same_commands_examples_and_output() -> None:
    for language in ("sh", "python", "text"):
        bare = [
            [re.sub(r"\s*#.*", "", block) for block in fenced(page, language)] for page in (ENGLISH, CHINESE)
        ]
        assert bare[0] == bare[1], language
    assert re.findall(r"<!--.*?-->", ENGLISH) == re.findall(r"<!--.*?-->", CHINESE)
    assert ENGLISH.count("\n## ") + 1 == CHINESE.count("\n## "), "the same sections, and the glossary"
