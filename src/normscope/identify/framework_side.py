"""A layer of Keras or Flax as a side of a comparison: by its specification, in training and evaluation, in float64.

Both modes are compared, whichever it is in: ``use_running_average`` of an nnx batch norm is a mode as ``training`` of a
torch module is, set by ``train()``, ``eval()`` and each call. What no call can change belongs to the function: a linen
batch norm that says ``use_running_average=True`` itself, or a Keras one that is not trainable, normalizes by its stored
statistics in training too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.errors import ModelError, told
from normscope.identify.box import shape_of
from normscope.identify.compare_sides import Side
from normscope.identify.framework_layers import FrameworkLayer, framework_layer
from normscope.reading import UnknownNormalization

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Values = Mapping[str, Array]


@dataclass(frozen=True)
class FrameworkSide(Side):
    """A layer by copies of it."""

    layer: FrameworkLayer | None = None

    def output(self, x: Array, mode: str, values: Values | None = None) -> Array:
        return self._run(x, mode != "eval", values)[0]

    def stored(self, x: Array, values: Values | None = None) -> dict[str, Array]:
        return self._run(x, True, values)[1]

    def _run(self, x: Array, training: bool, values: Values | None) -> tuple[Array, dict[str, Array]]:
        assert self.layer is not None
        try:
            return self.layer.run(x, training, values or {})
        except Exception as error:
            raise ModelError(f"{self.name} raised on an input of shape {x.shape}: {told(error)}") from error


def framework_side(obj: Any, example: Any) -> FrameworkSide | None:
    """A side of a layer that can be read; None for anything else, which is then a callable as any other."""
    try:
        layer = framework_layer(obj, shape_of(example))
    except (UnknownNormalization, ValueError):
        return None
    if layer is None:
        return None
    spec = layer.reading.spec
    needed = [name for name in ("weight", "bias") if getattr(spec, name) is not None]
    needed += ["running_mean", "running_var"] if spec.running is not None else []
    settable = all(name in layer.held for name in needed)
    return FrameworkSide(
        layer.name,
        spec,
        held=layer.held,
        settable=settable,
        note="; ".join(layer.notes),
        frozen=layer.frozen,
        layer=layer,
    )
