"""The errors a user meets: what was expected, what came, the likely fix; and other people's errors in a few lines."""

from __future__ import annotations

import re


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
    """Type and message, shortened and `visible`; an exception may be so broken that it cannot say what it is.

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
    return f"{name}: {visible(shortened(text))}" if text else name


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


CONTROL = re.compile(
    r"\n(?!    )|[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""control characters, line ends, changes of direction, halves of surrogate pairs; not the line ends of `shortened`"""
COMMAND = re.compile(r"^(\s*):(?=:)|#(?=#(?:\[|vso\[))", re.MULTILINE)
"""where a line begins that the log of a CI service would carry out"""


def visible(text: str) -> str:
    r"""Text with escapes for what would steer a terminal, end a line or turn the direction of what follows.

    >>> print(visible("bn\x1b[31m\n"), visible("naïve\n    second line"))
    bn\x1b[31m\n naïve
        second line
    """
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def printable(text: str) -> str:
    r"""One line, or a message of `shortened`, as a terminal and a CI log can have it: nothing in it is carried out.

    Names come from files, and may hold anything: escape sequences of a terminal, line ends, workflow commands.

    >>> print(printable("\x1b[31mbn\n::error::"), printable("::error::bn"), printable("aten::norm, naïve"))
    \x1b[31mbn\n::error:: \x3a:error::bn aten::norm, naïve
    """
    return COMMAND.sub(lambda found: (found[1] or "") + f"\\x{ord(found[0][-1]):02x}", visible(text))
