"""Which normalization a callable really is, found by probing it as a black box.

The package is itself the function: ``normscope.identify(fn, example)``. It imports neither torch nor NumPy when loaded.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normscope.identify.box import Box as Box
    from normscope.identify.box import box_of as box_of
    from normscope.identify.identification import identify as identify
    from normscope.identify.result import Evidence as Evidence
    from normscope.identify.result import FixedAffine as FixedAffine
    from normscope.identify.result import Identification as Identification

_HOME = {
    "Box": "box",
    "box_of": "box",
    "identify": "identification",
    "Evidence": "result",
    "FixedAffine": "result",
    "Identification": "result",
}

__all__ = ["Box", "Evidence", "FixedAffine", "Identification", "box_of", "identify"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'normscope.identify' has no attribute {name!r}")
    value = getattr(import_module(f"normscope.identify.{_HOME[name]}"), name)
    globals()[name] = value
    return value


class _Callable(ModuleType):
    """A package that is called as its function of the same name: ``normscope.identify`` has to be both."""

    def __call__(
        self, fn: Any, example: Any, *, layout: str | None = None, training: bool | None = None
    ) -> Identification:
        """See `normscope.identify.identification.identify`."""
        function = import_module("normscope.identify.identification").identify
        answer: Identification = function(fn, example, layout=layout, training=training)
        return answer


sys.modules[__name__].__class__ = _Callable
