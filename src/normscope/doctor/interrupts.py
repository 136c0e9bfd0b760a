"""Ctrl-C put off while something must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts off Ctrl-C until the block is done: half a restoration would be worse than none."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    before = signal.getsignal(signal.SIGINT)
    if before is None:
        yield  # not installed from Python: it could not be put back
        return
    pending: list[Any] = []
    signal.signal(signal.SIGINT, lambda *received: pending.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pending and callable(before):
            before(*pending[0])
