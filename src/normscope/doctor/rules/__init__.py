"""Rules, one a file. A rule reads what probes measured and yields findings; it never runs the model.

A new rule is one new file ``nsXXX_name.py`` here: its docstring is its page (the sections of ``SECTIONS``), and one
function decorated with ``@rule`` yields findings. Docs, SARIF metadata and ``normscope rule`` are made from it.
Rule files import neither torch nor a probe, so that pages can be read without either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normscope.doctor.report import Finding, NotRun
    from normscope.doctor.subject import Subject

SECTIONS = ("What it does", "Why it matters", "Known problems", "Example", "Fix", "References")
KINDS = {
    "S": "from modules",
    "C": "from a checkpoint",
    "D": "on a batch",
    "T": "in training",
    "G": "from the graph",
}


@dataclass(frozen=True)
class Rule:
    code: str
    name: str
    kinds: str
    """letters of KINDS"""
    needs: tuple[str, ...]
    """names of the probes it reads; ``"data"`` where it only needs a forward on data (calls, neighbours)"""
    page: str
    """Markdown"""
    check: Callable[[Subject], Iterable[Finding | NotRun]]
    uses: tuple[str, ...] = ()
    """names of the probes it reads where they ran; it decides what it can without them"""
    stateful: bool = False
    """about running statistics, so a model without any has nothing to decide"""
    real_data: bool = False
    """says something about the user's data, so random inputs cannot decide it"""

    @property
    def summary(self) -> str:
        """The page's first line without the name."""
        return self.page.splitlines()[0].split(": ", 1)[-1]


_RULES: dict[str, Rule] = {}


def rule(
    code: str,
    name: str,
    *,
    kinds: str,
    needs: tuple[str, ...] = (),
    uses: tuple[str, ...] = (),
    stateful: bool = False,
    real_data: bool = False,
) -> Callable[
    [Callable[[Subject], Iterable[Finding | NotRun]]], Callable[[Subject], Iterable[Finding | NotRun]]
]:
    """Register the decorated function as rule ``code``; its module's docstring is the rule's page."""
    if not re.fullmatch(r"NS\d{3}", code):
        raise ValueError(f"a rule code is NS and three digits, got {code!r}")

    def register(
        check: Callable[[Subject], Iterable[Finding | NotRun]],
    ) -> Callable[[Subject], Iterable[Finding | NotRun]]:
        page = (import_module(check.__module__).__doc__ or "").strip()
        missing = [s for s in SECTIONS if f"## {s}" not in page]
        if missing:
            raise ValueError(f"rule {code}: its docstring lacks the sections {missing}")
        if code in _RULES and _RULES[code].check.__module__ != check.__module__:
            raise ValueError(f"rule {code} is defined twice")
        _RULES[code] = Rule(code, name, kinds, needs, page, check, uses, stateful, real_data)
        return check

    return register


@cache
def all_rules() -> dict[str, Rule]:
    """Every rule by code, from the files of this package."""
    for info in iter_modules(__path__):
        import_module(f"{__name__}.{info.name}")
    return dict(sorted(_RULES.items()))
