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
    """A spinner on standard error, on a terminal only, that says which step runs."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("loading") as status:
        yield lambda word: status.update(word.replace("_", " "))
