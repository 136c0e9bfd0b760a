"""The errors a user meets: what was expected, what came, the likely fix; and other people's errors in a few lines."""

from __future__ import annotations


class NormscopeError(Exception):
    """Base of the errors that a command line turns into one message and exit code 2."""


class BadTarget(NormscopeError):
    """What the user pointed at cannot be loaded."""


class BadInput(NormscopeError, ValueError):
    """Inputs, targets, masks or settings that cannot be used."""


class ModelError(NormscopeError):
    """The user's model raised; the cause is chained."""


class MissingExtra(NormscopeError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, what: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: pip install 'normscope[{extra}]'")


class FindingsError(NormscopeError, AssertionError):
    """Raised by ``Report.raise_for``."""


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
