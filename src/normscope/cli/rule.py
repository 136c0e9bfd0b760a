"""``normscope rule``: the page of a rule, or the list of them."""

from __future__ import annotations

import typer

from normscope.cli.frame import console
from normscope.errors import BadInput


def command(
    code: str | None = typer.Argument(None, metavar="CODE", help="Such as NS304; without it, the list."),
    traceback: bool = typer.Option(False, "--traceback", help="Show where an error came from."),
) -> int:
    """Print what a rule does, why it matters, and what to do about it."""
    from rich.markdown import Markdown
    from rich.table import Table
    from rich.text import Text

    from normscope.doctor.rules import KINDS, all_rules

    rules = all_rules()
    out = console()
    if code is None:
        table = Table("code", "name", "fires when", box=None, padding=(0, 2, 0, 0))
        for rule in rules.values():
            table.add_row(rule.code, rule.name, Text(rule.summary))
        out.print(table)
        return 0
    matches = [rule for rule in rules.values() if code.upper() == rule.code or code.lower() == rule.name]
    if not matches:
        raise BadInput(f"there is no rule {code!r}; known: {', '.join(rules)}")
    rule = matches[0]
    kinds = ", ".join(KINDS[letter] for letter in rule.kinds)
    out.print(Text(f"{rule.code} {rule.name} ({kinds})", style="bold"))
    page = rule.page.split(": ", 1)[1]
    # as it is where it goes on to a file or another program: examples are copied from it
    out.print(Markdown(page) if out.is_terminal else Text(page), soft_wrap=not out.is_terminal)
    return 0
