"""Specifications that layers build from their attributes: built once, and constants to a compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from normscope.kernels.elementary import constant
from normscope.spec import NormSpec


def remembered(build: Callable[..., NormSpec]) -> Callable[..., NormSpec]:
    """Mark a function from plain values to a specification: each is built once, which takes longer than a small layer.

    torch.compile looks into what ``lru_cache`` wraps, even where that is marked as constant; not so in here.
    """
    kept = lru_cache(maxsize=1024)(build)

    @wraps(build)
    def specification(*values: Any) -> NormSpec:
        return kept(*values)

    return constant(specification)
