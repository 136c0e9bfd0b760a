"""``port``: a normalization, or all of a state, from one framework to another."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normscope.errors import BadInput

if TYPE_CHECKING:
    from normscope.porting.report import PortReport

FRAMEWORKS = ("torch", "keras", "flax", "linen")


def port(
    obj: Any,
    *,
    source: str | None = None,
    target: str = "torch",
    input_shape: Sequence[int] | None = None,
    channels_first: bool = False,
    layers: str = "normscope",
    weight_offset: float = 0.0,
    rename: Mapping[str, str] | None = None,
) -> tuple[Any, PortReport]:
    """A layer, or the normalizations of a state, carried from one framework to another with every convention.

    What is converted: names; momentum (a decay in Keras and Flax, 1 - momentum of torch); where channels stand; which
    variance is stored (biased in Keras and Flax: ``normscope.nn.BatchNorm2d(..., running_correction=0)`` goes on so).
    What is stored is carried as it is, value by value. The report states each conversion in its ``notes``.

    Arguments:
        obj: a layer of Keras 3, flax.nnx, flax.linen (bound to its variables), torch.nn or normscope.nn; or a state:
            ``{v.path: v for v in model.variables}`` of Keras, an nnx state, linen variables, a torch state dict.
        source, target: ``"torch"``, ``"keras"``, ``"flax"`` (nnx) or ``"linen"``. The source of a layer is seen.
        input_shape: the sizes of an input of the source's layer. Needed where its number of axes is not known: for a
            batch, group or instance norm of Flax.
        channels_first: a layer norm too is to take its channels, last in the source, on axis 1.
        layers: ``"normscope"`` or ``"torch"``, the home of the layer that is made.
        weight_offset: for a state, what the source adds to its weights: 1.0 where it multiplies with 1 + weight.
        rename: for a state, path of a layer in the source -> its path in the target.

    Returns the torch layer (checked against the source in float64, in evaluation and training, before it is returned),
    or arrays under the target's names; and a `PortReport`, for a torch layer with the ``settings`` of the target's.

    Raises BadInput for what is no layer or state, has no values yet, or contradicts itself; UnknownNormalization where
    the source cannot be read exactly or the target has no such layer; Deviation where the outputs disagree.

    >>> import numpy as np
    >>> names = ("gamma", "beta", "moving_mean", "moving_variance")
    >>> state, report = port({f"stem/bn/{name}": np.ones(3) for name in names}, source="keras")
    >>> list(state)
    ['stem.bn.weight', 'stem.bn.bias', 'stem.bn.running_mean', 'stem.bn.running_var', 'stem.bn.num_batches_tracked']
    """
    _known(source, "source", optional=True)
    _known(target, "target")
    if layers not in ("normscope", "torch"):
        raise BadInput(f"layers is 'normscope' or 'torch'; got {layers!r}.")
    if isinstance(obj, Mapping):
        from normscope.porting.states import port_state

        if source is None:
            raise BadInput(
                f"a state does not say where it comes from. Pass source=, one of {', '.join(FRAMEWORKS)}."
            )
        _apart(source, target)
        return port_state(obj, source, target, float(weight_offset), dict(rename or {}))
    seen = framework_of(obj)
    if seen is None:
        raise BadInput(
            f"port takes a layer of Keras, Flax or PyTorch, or a state, a mapping of names to arrays; got a "
            f"{type(obj).__name__}. Of Keras weights pass {{v.path: v for v in model.variables}}."
        )
    if source is not None and source != seen:
        raise BadInput(f"source is {source!r}, and {type(obj).__name__} is a layer of {seen}. Leave it out.")
    _apart(seen, target)
    if weight_offset or rename:
        raise BadInput("weight_offset and rename are for a state: a layer says itself what it computes.")
    from normscope.porting.layers import from_torch, to_torch

    if seen == "torch":
        return from_torch(obj, target)
    if target != "torch":
        raise BadInput(
            f"a layer of {seen} is ported to torch; for {target} port its state, with source={seen!r}, "
            f"target={target!r}."
        )
    return to_torch(obj, seen, input_shape, channels_first=channels_first, layers=layers)


def framework_of(obj: Any) -> str | None:
    """Whose layer an object is by its class, by its base classes; None for anything else."""
    homes = {("keras", "Layer"): "keras", ("flax", "Module"): ""}
    for cls in type(obj).__mro__:
        package = cls.__module__.partition(".")[0]
        if (package, cls.__qualname__) in homes:
            found = homes[package, cls.__qualname__]
            return found or ("linen" if cls.__module__.startswith("flax.linen") else "flax")
    torch = sys.modules.get("torch")
    return "torch" if torch is not None and isinstance(obj, torch.nn.Module) else None


def _known(name: str | None, which: str, *, optional: bool = False) -> None:
    if name not in FRAMEWORKS and not (optional and name is None):
        raise BadInput(f"{which} is one of {', '.join(FRAMEWORKS)}; got {name!r}. Of nnx say 'flax'.")


def _apart(source: str, target: str) -> None:
    if source == target:
        raise BadInput(f"source and target are both {source}: there is nothing to port.")
