"""Residual addition and norm in one call, as the two calls that it stands for.

What the norm normalizes is then a tensor that can be followed; the values are the same up to rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

Parts = tuple[
    tuple[Callable[..., Any], tuple[Any, ...]], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
]


def taken_apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Parts | None:
    """(add, its arguments) and (norm, its arguments after the sum, its keywords); None where ``func`` is another call.

    >>> from normscope import functional
    >>> x, y = torch.ones(2, 3), torch.ones(2, 3)
    >>> add, norm = taken_apart(functional.add_rms_norm, (x, y, (3,)), {"eps": 1e-6})
    >>> add[0].__name__, norm[0].__name__, norm[1:]
    ('add', 'rms_norm', (((3,),), {'eps': 1e-06}))
    """
    functional = sys.modules.get("normscope.functional")
    if functional is None or func not in (functional.add_layer_norm, functional.add_rms_norm):
        return None
    norm = functional.layer_norm if func is functional.add_layer_norm else functional.rms_norm
    return (torch.add, args[:2]), (norm, args[2:], kwargs)
