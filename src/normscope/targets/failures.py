"""The user's code blamed for what it raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from normscope.errors import BadTarget, told


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
