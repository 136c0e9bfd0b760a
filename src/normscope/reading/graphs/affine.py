"""The gain and the bias behind a normalization that is written as many nodes, and the axes they live on."""

from __future__ import annotations

from dataclasses import dataclass

from normscope.reading.graphs.graph import Graph
from normscope.spec.axes import last_axes

LETTERS = {2: "b c", 3: "b c l", 4: "b c h w", 5: "b c d h w"}

Axes = tuple[int, ...]
"""counted from the end"""


Gain = tuple[str, Axes]
"""the name of a constant and its axes"""


@dataclass(frozen=True)
class Affine:
    """Names of the constants, "" where there is none, their axes, and the value behind them."""

    output: str
    weight: str
    bias: str
    on_weight: Axes | None
    on_bias: Axes | None
    cast: bool
    """the result is cast before the gain is applied"""


def gain_before(graph: Graph, value: str, ndim: int | None, axes: Axes) -> tuple[Gain | None, str]:
    """Of g * x / root, which Python multiplies first: g and x; else nothing and the value itself."""
    node = graph.maker(value)
    if node is None or node.op_type != "Mul" or graph.consumers(value) != 1:
        return None, value
    for constant, other in ((0, 1), (1, 0)):
        on = _axes_of(graph, node.input[constant], ndim)
        if on and on in (axes, _channel(ndim)):
            return (str(node.input[constant]), on), str(node.input[other])
    return None, value


def affine_after(
    graph: Graph, output: str, axes: Axes, ndim: int | None, *, scalar: bool, gain: Gain | None = None
) -> Affine:
    """What is multiplied and added right behind ``output``.

    Only constants on the erased axes or on axis 1 are taken: what else is added, such as the code of a position, is
    none of the norm's. ``scalar``: one number is a gain too, that of a scale norm. ``gain``: one that came before.
    """
    weight = bias = ""
    on_weight: Axes | None = None
    on_bias: Axes | None = None
    cast = False
    found = _constant_after(graph, output, "Mul", ndim)
    if gain is not None:
        weight, on_weight = gain
    elif found is not None and found[1] in (axes, _channel(ndim)):
        weight, on_weight, output, cast = found
    elif scalar and (one := _scalar_after(graph, output)) is not None:
        (weight, output), on_weight = one, ()
    following = _constant_after(graph, output, "Add", ndim)
    own = (on_weight,) if weight else (axes, _channel(ndim))
    if following is not None and following[1] in own:
        bias, on_bias, output = following[:3]
    return Affine(output, weight, bias, on_weight, on_bias, cast)


def _channel(ndim: int | None) -> tuple[int, ...]:
    """Axis 1, counted from the end."""
    return () if ndim is None else (1 - ndim,)


def _constant_after(
    graph: Graph, value: str, operator: str, ndim: int | None
) -> tuple[str, tuple[int, ...], str, bool] | None:
    """Name and axes of the constant that is multiplied or added next, the result, and whether a cast lies between."""
    cast = False
    while len(graph.readers(value)) == 1 and graph.readers(value)[0].op_type in ("Cast", "Identity"):
        cast |= graph.readers(value)[0].op_type == "Cast"
        value = graph.readers(value)[0].output[0]
    if graph.consumers(value) != 1 or not graph.readers(value) or graph.readers(value)[0].op_type != operator:
        return None
    node = graph.readers(value)[0]
    other = node.input[1] if node.input[0] == value else node.input[0]
    axes = _axes_of(graph, other, ndim)
    return (other, axes, node.output[0], cast) if axes else None


def _axes_of(graph: Graph, constant: str, ndim: int | None) -> Axes | None:
    """Those along which it is more than one number; None of what is no constant, or has more axes than the input."""
    sizes = graph.constant_shape(constant)
    if sizes is None or (ndim is not None and len(sizes) > ndim):
        return None
    return tuple(i - len(sizes) for i, size in enumerate(sizes) if size != 1)


def _scalar_after(graph: Graph, value: str) -> tuple[str, str] | None:
    """The one gain of a scale norm."""
    readers = graph.readers(value)
    if graph.consumers(value) != 1 or not readers or readers[0].op_type != "Mul":
        return None
    other = readers[0].input[1] if readers[0].input[0] == value else readers[0].input[0]
    return (other, readers[0].output[0]) if graph.scalar(other) is not None else None


def names_of(
    axes: tuple[int, ...],
    ndim: int | None,
    weight: tuple[int, ...] | None,
    bias: tuple[int, ...] | None,
) -> tuple[str, str | None, str | None] | None:
    """The pattern, and the axes of gain and bias by name; None where the rank decides and is unknown."""

    def on(names: dict[int, str], where: tuple[int, ...] | None) -> str | None:
        return None if where is None else " ".join(names[axis] for axis in where)

    trailing = axes == tuple(range(-len(axes), 0))
    if trailing and set((weight or ()) + (bias or ())) <= set(axes):
        names = dict(zip(axes, last_axes(len(axes)).split(), strict=True))
        return f"... {' '.join(names.values())} -> ...", on(names, weight), on(names, bias)
    if ndim is None:
        return None
    letters = (LETTERS.get(ndim) or " ".join(["b", "c", *(f"p{i}" for i in range(ndim - 2))])).split()
    names = dict(zip(range(-ndim, 0), letters, strict=True))
    kept = [names[axis] for axis in names if axis not in axes]
    positions = set(letters[2:])
    named = {names[axis] for axis in (weight or ()) + (bias or ())}
    if ndim > 2 and not named & positions and (positions <= set(kept) or not positions & set(kept)):
        letters = ["b", "c", "..."]
        kept = [k for k in kept if k not in positions] + (["..."] if positions <= set(kept) else [])
    return f"{' '.join(letters)} -> {' '.join(kept)}".rstrip(), on(names, weight), on(names, bias)
