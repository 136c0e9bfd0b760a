"""The steps of ``explain`` as text: what was done, what was seen, what follows."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from normscope.errors import printable
from normscope.render.grouping import counted
from normscope.render.randomness import kept_random_state

with kept_random_state():
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

if TYPE_CHECKING:
    from normscope.doctor.explain import Explanation

VERDICTS = {
    True: ("in order", "bold green"),
    False: ("FAILED", "bold red"),
    None: ("not decided", "bold yellow"),
}


def to_text(explanation: Explanation, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    print_explanation(explanation, console)
    assert isinstance(console.file, StringIO)
    return "\n".join(printable(line.rstrip()) for line in console.file.getvalue().splitlines()) + "\n"


@kept_random_state()
def print_explanation(explanation: Explanation, console: Console) -> None:
    sites = counted(len(explanation.report.sites), "normalization")
    console.print(Text(printable(f"{explanation.target or 'model'}: {sites}"), style="bold"))
    for step in explanation.steps:
        word, style = VERDICTS[step.ok]
        console.print()
        head = Text(f"{step.number}. {step.title}: ", style="bold")
        head.append(word, style=style)
        console.print(head)
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=11, no_wrap=True)
        grid.add_column()
        grid.add_row(Text("   done", style="dim"), Text(printable(step.done)))
        for index, line in enumerate(step.seen):
            grid.add_row(Text("   seen" if index == 0 else "", style="dim"), Text(printable(line)))
        grid.add_row(Text("   follows", style="dim"), Text(printable(step.follows)))
        console.print(grid)
    console.print()
    first = explanation.first
    if first is None:
        undecided = [step.number for step in explanation.steps if step.ok is None]
        word = "step" if len(undecided) == 1 else "steps"
        rest = f"; not decided: {word} {', '.join(map(str, undecided))}" if undecided else ""
        console.print(Text(f"No step failed{rest}.", style="bold"))
        return
    where = f" at {first.site}" if first.site else ""
    console.print(
        Text(
            printable(f"Begin with step {first.number}, {first.title}{where}: {first.todo or first.follows}"),
            style="bold",
        )
    )
