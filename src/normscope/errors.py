"""The errors a user meets. Each message gives what was expected, what came, and the likely fix."""

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
