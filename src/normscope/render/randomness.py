"""Printing draws no number that the user's program was about to draw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Python's random state stays as it is: rich draws from it, when it is imported or when it styles links."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
