"""Two sides that read one input with its axes in another order, such as channels first and channels last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.errors import BadInput
from normscope.spec.align import expand
from normscope.spec.pattern import ELLIPSIS, tokenize, untokenize

if TYPE_CHECKING:
    from normscope.spec import NormSpec


@dataclass(frozen=True)
class Layout:
    """The names of the axes for each side (None: nobody said), and the order of the second's."""

    names_a: str | None = None
    names_b: str | None = None
    order: tuple[int, ...] | None = None
    """axis of the first's input for each axis of the second's; None where it is the same"""

    def forth(self, x: Any) -> Any:
        """The first's input as the second takes it: an array, a tensor or sizes."""
        if self.order is None or x is None:
            return x
        if hasattr(x, "shape"):
            return x.transpose(self.order) if isinstance(x, np.ndarray) else x.permute(*self.order)
        return tuple(x[axis] for axis in self.order)

    def back(self, ndim: int) -> tuple[int, ...]:
        """The order that takes the second's axes to the first's."""
        return tuple(range(ndim)) if self.order is None else tuple(int(i) for i in np.argsort(self.order))


def read_layout(layout: str | None) -> Layout:
    """``"b c h w"`` names the axes; ``"b c h w -> b h w c"`` also says in which order the second takes them.

    Raises BadInput where it is no text, or the two sides do not name the same axes.

    >>> read_layout("b c h w -> b h w c").order
    (0, 2, 3, 1)
    """
    if layout is None:
        return Layout()
    if not isinstance(layout, str):
        raise BadInput(
            f"a layout is a text that names the axes; got a {type(layout).__name__}. Write 'b c h w', or "
            "'b c h w -> b h w c' where the second takes channels last."
        )
    first, arrow, second = layout.partition("->")
    names, others = first.split(), second.split()
    if not arrow:
        return Layout(" ".join(names), " ".join(names))
    if sorted(names) != sorted(others) or len(set(names)) != len(names):
        raise BadInput(
            f"a layout names the same axes on both sides of the arrow, each once; got {layout!r}. "
            "Write 'b c h w -> b h w c' where the second takes channels last."
        )
    order = tuple(names.index(name) for name in others)
    return Layout(" ".join(names), " ".join(others), None if order == tuple(range(len(names))) else order)


def as_first_reads(spec: NormSpec, layout: Layout, ndim: int) -> NormSpec:
    """The second's specification, rewritten for the axes in the first's order.

    >>> from normscope.spec import families
    >>> last = families.keras_batch_normalization()
    >>> as_first_reads(last, read_layout("b c h w -> b h w c"), 4).stats
    'b c x0 x1 -> c'
    """
    if layout.order is None:
        return spec
    if len(layout.order) != ndim:
        raise BadInput(
            f"the layout names {len(layout.order)} axes, the input has {ndim}. Name each axis once."
        )
    left = [_named(group) for group in expand(spec.pattern, ndim)]
    ordered = [left[i] for i in layout.back(ndim)]
    dots = [group for group in left if group[0].startswith("x") and group[0][1:].isdigit()]

    def written(where: str | None) -> str | None:
        if where is None:
            return None
        groups = [g for group in tokenize(where) for g in (dots if group == (ELLIPSIS,) else [group])]
        return untokenize([group for group in ordered if group in groups] or groups)

    right = [g for name in spec.pattern.kept for g in (dots if name == ELLIPSIS else [(name,)])]
    return spec.replace(
        stats=f"{untokenize(ordered)} -> {untokenize(right)}",
        ndim=None,
        weight=written(spec.weight),
        bias=written(spec.bias),
        sample_axis=None if spec.sample_axis in (None, ELLIPSIS) else spec.sample_axis,
    )


def _named(group: Sequence[str]) -> tuple[str, ...]:
    """The axes of an ellipsis with names of their own."""
    return tuple(f"x{name[len(ELLIPSIS) :]}" if name.startswith(ELLIPSIS) else name for name in group)
