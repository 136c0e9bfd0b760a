"""What stands where a norm would, and is none: a report says so, so that its silence there is not mistaken."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn

from normscope.doctor.wording import listed

HOME = "normscope.nn.dynamic_tanh"


def norm_free(modules: Mapping[str, nn.Module]) -> list[str]:
    """A note on the `DynamicTanh` layers among ``modules``; none where there is none.

    >>> from normscope.nn import DynamicTanh
    >>> norm_free({"head": nn.Linear(4, 4), "norm": DynamicTanh(4)})
    ['norm is norm-free (Dynamic Tanh, which takes no statistics): no rule looks at it']
    """
    home = sys.modules.get(HOME)  # no object of it exists before
    paths = [path or "the model" for path, m in modules.items() if home and isinstance(m, home.DynamicTanh)]
    if not paths:
        return []
    verb, them = ("is", "it") if len(paths) == 1 else ("are", "them")
    return [
        f"{listed(paths)} {verb} norm-free (Dynamic Tanh, which takes no statistics): no rule looks at {them}"
    ]
