"""The small parts of a specification: sizes, running statistics, casts, and the state that a norm carries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

DTYPES = ("float16", "bfloat16", "float32", "float64")


class SpecError(ValueError):
    """A specification that contradicts itself. The text names the rule, what came and the likely fix."""


def require(holds: bool, rule: str, came: Any, fix: str) -> None:
    """Raise SpecError unless ``holds``."""
    if not holds:
        raise SpecError(f"{rule}; got {came!r}. {fix}")


def is_number(value: Any) -> bool:
    """A finite real number (a bool is none)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class Sizes(Mapping[str, int]):
    """An immutable, hashable mapping from axis names to sizes; equal to a dict with the same items.

    >>> Sizes({"g": 2}) == {"g": 2}, Sizes({"g": 2})
    (True, {'g': 2})
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, int] | None = None) -> None:
        for name, size in (items or {}).items():
            require(
                isinstance(size, int) and not isinstance(size, bool) and size > 0,
                f"the size of axis {name} is a positive integer",
                size,
                "Leave out an axis whose size the input decides.",
            )
        self._items: dict[str, int] = dict(sorted((items or {}).items()))

    def __getitem__(self, name: str) -> int:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class Running:
    """How stored statistics follow the batches.

    ``run <- (1 - momentum) * run + momentum * batch`` for ``average="ema"``; for ``"cumulative"`` the update
    fraction is 1 / (number of batches), and ``momentum`` is None. The stored variance is sum((x - mean)^2) /
    (M - correction) over the M elements of a set, and needs M > correction.

    Arguments:
        momentum: the update fraction, as in PyTorch; Keras, Flax and ONNX write 1 - momentum. Any finite
            number can be written down, since models carry 0 and worse. None means ``average="cumulative"``.
        correction: 1 stores the unbiased variance (PyTorch), 0 the biased one (Keras, Flax, ONNX).
        average: ``"ema"`` or ``"cumulative"``.
        over: the axes the state lives on, composed as in the input (``"c"``, ``"(g c)"``). None: the kept
            axes without the samples ``b`` and the virtual batches ``v``.
        renorm: ``(r_max, d_max)`` of batch renormalization: in training y = r (x - mean) / denominator + d
            with r = denominator / running denominator clipped to [1 / r_max, r_max] and d = (mean - running
            mean) / running denominator clipped to [-d_max, d_max] (Ioffe 2017, eq. 3 to 5). ``math.inf``
            clips nothing.
        averages: ``"variance"``, or ``"denominator"``: sqrt(var + eps) follows those of the batches, and what is
            stored is its square less eps, so that it reads as any other variance (Ioffe 2017, algorithm 1, averages
            standard deviations).

    Raises SpecError where a value is none of these.

    >>> Running(momentum=None)
    Running(momentum=None, correction=1, average='cumulative', over=None, renorm=None, averages='variance')
    """

    momentum: float | None = 0.1
    correction: float = 1
    average: str = "ema"
    over: str | None = None
    renorm: tuple[float, float] | None = None
    averages: str = "variance"

    def __post_init__(self) -> None:
        require(
            self.average in ("ema", "cumulative"),
            "average is 'ema' or 'cumulative'",
            self.average,
            "An exponential moving average is 'ema'.",
        )
        if self.average == "cumulative" or self.momentum is None:
            object.__setattr__(self, "average", "cumulative")
            object.__setattr__(self, "momentum", None)
        else:
            require(
                is_number(self.momentum),
                "momentum is a finite number, the update fraction",
                self.momentum,
                "A decay of 0.99 (Keras, Flax) is momentum 0.01; for a plain mean over batches pass None.",
            )
        require(
            is_number(self.correction) and self.correction >= 0,
            "the correction of the running variance is a number from 0 up",
            self.correction,
            "1 stores the unbiased variance, 0 the biased one.",
        )
        if self.renorm is not None:
            limits = tuple(self.renorm)
            require(
                len(limits) == 2
                and all(isinstance(x, int | float) and not math.isnan(x) for x in limits)
                and limits[0] >= 1
                and limits[1] >= 0,
                "renorm is (r_max, d_max) with r_max >= 1 and d_max >= 0",
                self.renorm,
                "(1, 0) is plain batch norm, (3, 5) the limits of the paper, math.inf clips nothing.",
            )
            object.__setattr__(self, "renorm", limits)
        require(
            self.averages in ("variance", "denominator"),
            "averages is 'variance' or 'denominator'",
            self.averages,
            "Batch renormalization as published averages denominators; PyTorch, Keras and Flax average variances.",
        )


@dataclass(frozen=True)
class Cast:
    """Which dtype the arithmetic runs in, and where the weight is applied.

    Arguments:
        compute: ``"float16"``, ``"bfloat16"``, ``"float32"``, ``"float64"``, or ``"input"`` (the input's own
            dtype, whatever it is). None is the rule of PyTorch's own layers: half types compute in float32,
            others in theirs.
        weight: ``"before"`` or ``"after"`` casting the normalized value back to the input's dtype.

    >>> Cast(compute="float32", weight="after")
    Cast(compute='float32', weight='after')
    """

    compute: str | None = None
    weight: str = "before"

    def __post_init__(self) -> None:
        require(
            self.compute is None or self.compute in (*DTYPES, "input"),
            f"compute is one of {', '.join(DTYPES)}, input or None",
            self.compute,
            "Write the dtype without 'torch.'.",
        )
        require(
            self.weight in ("before", "after"),
            "the weight is applied 'before' or 'after' casting back",
            self.weight,
            "PyTorch's own layers apply it before.",
        )


@dataclass
class RunningState:
    """The stored statistics of one site: torch tensors or NumPy arrays of shape `BoundSpec.running_shape`.

    Mutable, since a training step updates it. ``batches`` counts the updates. Compared by identity of its
    arrays: use your array library to compare values. Where the norm whitens, ``var`` holds the covariance, or
    the whitening matrix, with the whitened axes twice at its end.

    >>> RunningState(mean=[0.0], var=[1.0])
    RunningState(mean=[0.0], var=[1.0], batches=0)
    """

    mean: Any
    var: Any
    batches: int = 0
