"""What all commands share: one clear message for an error, exit codes, the console."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import typer

from normscope.errors import WIDTH, NormscopeError, printable, shortened, told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

FINDINGS, WRONG, INTERRUPTED = 1, 2, 130
"""exit codes: findings at or above --fail-on; the command or the target is wrong; Ctrl-C"""
STEPS = 8
"""of a check without a mask: sites, five runs of the model, rules, and loading before them"""


def guarded(command: Callable[..., int | None]) -> Callable[..., None]:
    """The command with what it returns as the exit code, and errors as one message and exit code 2.

    A command never exits by itself: a ``SystemExit`` can only be the user's code, and must not pass for a verdict.
    ``--traceback`` shows where an error came from.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        stdout = sys.stdout
        try:
            code = command(*args, **kwargs)
            sys.stdout.flush()
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            _say("interrupted; the model and your files are as they were")
            code = INTERRUPTED
        except BaseException as error:
            if kwargs.get("traceback"):
                lines = "".join(traceback.format_exception(error)).splitlines()
                print("\n".join(map(printable, lines)), file=sys.stderr)
            else:
                _say(_explained(error))
            code = WRONG
        finally:
            sys.stdout = stdout  # which a command may have claimed for its report
        raise typer.Exit(code or 0)

    return run


def note(text: str) -> None:
    """What the user should know beside the report."""
    _say(f"note: {text}")


def written(path: object, out: TextIO) -> None:
    """Beside a report: a file that was made."""
    print(printable(f"written: {path}"), file=out)


def _say(text: str) -> None:
    print(printable(f"normscope: {text}"), file=sys.stderr)


def _explained(error: BaseException) -> str:
    if isinstance(error, (NormscopeError, OSError)):
        return shortened(str(error), width=4 * WIDTH)  # our own messages hold lists of what is known
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"stopped by {told(error)}\n"
        f"    raised in {last.filename}, line {last.lineno}. If that is not your own code's doing, it is a fault of\n"
        "    Normscope: please report it with what --traceback prints"
    )


def console(file: TextIO | None = None) -> Console:
    """Standard output (or ``file``) through rich: as wide as the terminal, 100 columns where there is none."""
    from rich.console import Console

    file = file or sys.stdout
    return Console(file=file, width=None if file.isatty() else 100, highlight=False)


@contextmanager
def progress(steps: int = STEPS) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error, on a terminal only; called with a word before each step."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=steps)
        yield lambda word: bar.update(task, description=printable(word.replace("_", " ")), advance=1)
