"""What all commands share: one clear message for an error, exit codes, the console."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

FINDINGS, WRONG = 1, 2
"""exit codes: findings at or above --fail-on; the command or the target is wrong"""
STEPS = 8
"""of a check without a mask: sites, five runs of the model, rules, and loading before them"""


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with errors as one message and exit code 2; ``--traceback`` shows where they came from."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (NormscopeError, OSError) as error:
            if kwargs.get("traceback"):
                raise
            print(f"normscope: {error}", file=sys.stderr)
            sys.exit(WRONG)
        except KeyboardInterrupt:
            print("normscope: interrupted; the model and your files are as they were", file=sys.stderr)
            sys.exit(130)

    return run


def console() -> Console:
    """Standard output through rich: as wide as the terminal, 100 columns where there is none."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 100
    return Console(width=width, highlight=False)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error, on a terminal only; called with a word before each step."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=STEPS)
        yield lambda word: bar.update(task, description=word.replace("_", " "), advance=1)
