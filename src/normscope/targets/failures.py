"""Failures of other people's code and files, told in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from normscope.errors import BadTarget

LINES, WIDTH = 6, 400
"""of a message that comes from elsewhere: more is no longer read"""


def told(error: BaseException) -> str:
    """Type and message, shortened; an exception may be so broken that it cannot say what it is.

    >>> told(KeyError("config"))
    "KeyError: 'config'"
    >>> told(SystemExit())
    'SystemExit'
    """
    name = type(error).__name__
    try:
        text = str(error).strip()
    except Exception as failure:
        return f"{name} (its message cannot be shown: {type(failure).__name__} in __str__)"
    return f"{name}: {shortened(text)}" if text else name


def shortened(text: str, lines: int = LINES, width: int = WIDTH) -> str:
    """The first lines, each at most ``width`` long, the others indented under the first.

    >>> print(shortened("one\\n\\ttwo\\nthree", lines=2))
    one
        two
        ... (1 more line)
    """
    found = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line if len(line) <= width else f"{line[:width]}..." for line in found[:lines]]
    rest = len(found) - len(kept)
    if rest:
        kept.append(f"... ({rest} more line{'s' if rest > 1 else ''})")
    return "\n    ".join(kept)


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Whatever the user's code raises inside is a :class:`~normscope.errors.BadTarget` that says ``what`` raised it.

    Also ``SystemExit``, which would end the check as if all were well; Ctrl-C stays itself.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BadTarget(f"{what} raised {told(error)}") from error
