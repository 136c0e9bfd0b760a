"""``compare``: are two normalizations one function, in what do they differ, and on which input does it show."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.errors import NormscopeError
from normscope.identify.compare_fields import differences, value_differences
from normscope.identify.compare_gap import Gap, gap
from normscope.identify.compare_inputs import CENTERED, inputs_for
from normscope.identify.compare_layout import Layout, as_first_reads, read_layout
from normscope.identify.compare_pair import two_sides
from normscope.identify.compare_precision import both_fixed, in_one_precision, precision_notes
from normscope.identify.compare_result import WORDS, Comparison, Counterexample, Difference
from normscope.identify.compare_search import shrunk
from normscope.identify.compare_sides import Side
from normscope.identify.compare_values import carried, free_values
from normscope.identify.repeats import global_generators_kept
from normscope.spec import NormSpec, Sameness

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Values = Mapping[str, Array]
    Pair = tuple[Values | None, Values | None]

KEEP = 0.5
"""of the largest difference that a smaller counterexample must show"""


def compare(a: Any, b: Any, example: Any = None, *, layout: str | None = None) -> Comparison:
    """Whether two normalizations are the same function, every difference by field, and an input that shows it.

    Decided from the specifications (read, given, or identified) and confirmed on real evaluations of both, in training
    and in evaluation apart: with the values they hold, and where both can take other values, with other values too, as
    layers are functions of their parameters. The update of stored statistics and, for modules and specifications,
    the output in bfloat16 (where the order of casts shows) are compared as well. Nothing handed in is changed.

    Arguments:
        a, b: a `NormSpec`, a torch module, or any callable that `identify` takes (a function of one array or tensor, a
            Keras or Flax layer, an ONNX Runtime session); the two may be of different kinds.
        example: an input of both: array, tensor or sizes. Its kind decides what a callable receives: a function called
            with a tensor gets tensors, whose ``.var`` and ``.std`` are unbiased, unlike NumPy's. Without one a shape is
            chosen that fits both, which takes specifications or modules that can be read.
        layout: names of the input's axes, ``"b c h w"``; ``"b c h w -> b h w c"`` where the second takes the same data
            in another order. The example, and a counterexample, are in the first's order.

    Raises:
        BadInput: no example where one is needed, an example that one of them does not take, a layout that does not fit.

    >>> import torch
    >>> from normscope.identify.compare import compare
    >>> c = compare(torch.nn.GroupNorm(1, 6, affine=False), torch.nn.LayerNorm((6, 5, 5), elementwise_affine=False))
    >>> c.same
    True
    >>> c = compare(torch.nn.LayerNorm(4), torch.nn.LayerNorm(4, eps=1e-3))
    >>> c.same, [(d.field, d.a, d.b) for d in c.differences]
    (False, [('eps', '1e-05', '0.001')])
    """
    order = read_layout(layout)
    with global_generators_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sets of one element and the like are tried on purpose
        found = two_sides(a, b, example, order)
        return found if isinstance(found, Comparison) else _Comparing(*found, order).result()


@dataclass(frozen=True, eq=False)
class _Seen:
    """One real gap, and how it came about."""

    mode: str
    input: str
    x: Array
    trial: Callable[[tuple[int, ...]], Pair]
    gap: Gap


class _Comparing:
    """Two sides on one shape: evaluate, search, decide."""

    def __init__(self, a: Side, b: Side, shape: tuple[int, ...], order: Layout) -> None:
        self.a, self.b = a, b = in_one_precision(a, b)
        self.shape, self.order = shape, order
        self.spec_a = a.spec
        self.spec_b = None if b.spec is None else as_first_reads(b.spec, order, len(shape))
        """both as the first reads its input"""
        self.notes: list[str] = [f"{side.name}: {side.note}" for side in (a, b) if side.note]
        self.tried: dict[str, int] = {}
        """evaluations that both sides made, by mode"""

    def result(self) -> Comparison:
        tried = self._modes()
        seen = [*self._seen(tried)]
        modes: dict[str, bool | None] = {}
        for mode in tried:
            modes[mode] = not any(found.mode == mode for found in seen) if self.tried.get(mode) else None
            if modes[mode] is None:
                self.notes.append(f"the {WORDS[mode]} was not compared: one of them raises")
        if not all(modes.get(mode, True) for mode in ("train", "eval")):
            modes.pop("bfloat16", None)
            seen = [found for found in seen if found.mode != "bfloat16"]
        named = self._differences(tried)
        same = self._decided(modes, named)
        shown = self._counterexample(seen)
        largest = {m: max(f.gap.size for f in seen if f.mode == m) for m in modes if modes[m] is False}
        if shown is not None:  # a small input may show more than those that it was made of
            largest[shown.mode] = max(largest[shown.mode], shown.difference)
        return Comparison(
            self.a.name,
            self.b.name,
            same,
            differences=tuple(sorted(named, key=lambda d: (d.mode == "parameters", -_number(d.size)))),
            counterexample=shown,
            modes=modes,
            largest=largest,
            spec_a=self.a.spec,
            spec_b=self.b.spec,
            notes=tuple(self.notes),
        )

    # -- evaluations -----------------------------------------------------------------------------------------------

    def _modes(self) -> list[str]:
        if self.a.fixed or self.b.fixed:
            self.notes.append("one is a fixed map, as a norm in evaluation is: only evaluation is compared")
            return ["eval"]
        modes = ["train", "eval"]
        if self._has_state(self.a) and self._has_state(self.b):
            modes.append("update")
        if self._in_half():
            modes.append("bfloat16")
        return modes

    @staticmethod
    def _has_state(side: Side) -> bool:
        return (
            side.spec is not None and side.spec.running is not None and not side.spec.whiten and side.settable
        )

    def _in_half(self) -> bool:
        """Where the specifications say that casts differ: kernels of one convention round differently in half types
        too, which makes them no other function."""
        if self.spec_a is None or self.spec_b is None or _casts(self.spec_a) == _casts(self.spec_b):
            return False
        x = np.random.default_rng(0).standard_normal(self.shape)
        values = next(iter(self._trials()))(self.shape)
        try:
            one, two = self.a.half(x, values[0]), self.b.half(self.order.forth(x), values[1])
        except (NormscopeError, ValueError, RuntimeError, ArithmeticError):
            one = two = None
        if one is None or two is None:
            self.notes.append("their casts differ, and one of them was not run in bfloat16, where that shows")
        return one is not None and two is not None

    def _trials(self) -> Iterator[Callable[[tuple[int, ...]], Pair]]:
        """With the values that they hold; then, where both take others, with others, put into each first."""
        a, b = self.a, self.b
        if a.held is not None or b.held is not None or not (a.settable and b.settable):
            yield self._held
        if a.settable and b.settable and self.spec_a is not None and self.spec_b is not None:
            one, two = self.spec_a, self.spec_b
            yield lambda shape: (mine := free_values(one, shape), carried(mine, one, two, shape))
            yield lambda shape: (carried(theirs := free_values(two, shape), two, one, shape), theirs)

    def _held(self, shape: tuple[int, ...]) -> Pair:
        """As they are; a specification takes over what the other holds."""
        mine: Values | None = None
        theirs: Values | None = None
        if self.spec_a is not None and self.a.held is None and self.a.settable:
            held, spec = self.b.held or {}, self.spec_b or self.spec_a
            mine = carried(held, spec, self.spec_a, shape)
        if self.spec_b is not None and self.b.held is None and self.b.settable:
            held, spec = self.a.held or {}, self.spec_a or self.spec_b
            theirs = carried(held, spec, self.spec_b, shape)
        return mine, theirs

    def _seen(self, modes: list[str]) -> Iterator[_Seen]:
        """Every real gap, the trials in order: those with other values only where the held ones show nothing."""
        known = (self.spec_a, self.spec_b)
        for mode in modes:
            for trial in self._trials():
                found = []
                for name, x in inputs_for(mode, self.shape, known):
                    apart = self._gap(mode, x, trial)
                    if apart is None:
                        continue
                    self.tried[mode] = self.tried.get(mode, 0) + 1
                    if apart.real:
                        found.append(_Seen(mode, name, x, trial, apart))
                yield from found
                if found:
                    self._remark(mode, trial, found)
                    break

    def _remark(self, mode: str, trial: Callable[[tuple[int, ...]], Pair], found: list[_Seen]) -> None:
        """Where they agree although they differ."""
        if mode != "eval":
            return
        if trial != self._held and (self.a.held is not None or self.b.held is not None):
            self.notes.append(
                "with the values held now they agree; with the values of the counterexample they do not"
            )
        center = {spec.center for spec in (self.spec_a, self.spec_b) if spec is not None}
        if len(center) == 2 and not any(f.input == CENTERED for f in found):
            self.notes.append("they agree where the mean of every set is 0 (confirmed on such an input)")

    def _gap(self, mode: str, x: Array, trial: Callable[[tuple[int, ...]], Pair]) -> Gap | None:
        try:
            return gap(self.a, self.b, x, self.order.forth(x), self.order.back(x.ndim), mode, trial(x.shape))
        except (NormscopeError, ValueError, RuntimeError, ArithmeticError):
            return None

    # -- verdict ---------------------------------------------------------------------------------------------------

    def _differences(self, modes: list[str]) -> list[Difference]:
        if self.spec_a is None or self.spec_b is None:
            return []
        found = differences(self.spec_a, self.spec_b, self.shape)
        if "bfloat16" not in modes:
            found = [d for d in found if d.mode != "bfloat16"]
        if not (self.a.settable and self.b.settable):
            self.notes.append(
                "one takes no other parameters: they are compared with the values that they hold"
            )
            found = [d for d in found if d.field not in ("weight", "bias")]
        if self.a.held is not None and self.b.held is not None:
            held, roundoff = (self.a.held, self.b.held), max(self.a.roundoff, self.b.roundoff)
            found += value_differences(self.spec_a, self.spec_b, *held, self.shape, roundoff)
        return found

    def _decided(self, modes: Mapping[str, bool | None], named: list[Difference]) -> bool | None:
        for side in (self.a, self.b):
            if side.spec is None:
                self.notes.append(f"{side.name} is not known as a normalization: {side.reason}")
        verdict = None
        if self.spec_a is not None and self.spec_b is not None:
            verdict = self._verdict(self.spec_a, self.spec_b)
            if verdict.conditions:
                self.notes.append(f"by their specifications {verdict}")
            elif verdict.weight:
                self.notes.append(f"the same function of their weights with {verdict.weight}")
        if any(same is False for same in modes.values()):
            return False
        if None in modes.values():
            return None
        if both_fixed(self.a, self.b):
            self.notes.append(
                "both are fixed affine maps of each element there, which the evaluations they agree on determine"
            )
            self.notes += precision_notes(self.a, self.b)
            return True
        if verdict is None:
            self.notes.append(
                f"they agree on all {sum(self.tried.values())} evaluations, which proves nothing about other inputs"
            )
            return None
        if verdict.same and all(d.mode == "parameters" for d in named):
            self._for_this_shape()
            self.notes += precision_notes(self.a, self.b)
            return True
        why = verdict.reason
        if verdict.same:
            apart = ", ".join(d.field for d in named if d.mode != "parameters")
            why = f"{apart} differ by more than rounding, by less than shows beside the largest output"
        self.notes.append(f"undecided: {why}, and no input that was tried shows it")
        return None

    def _for_this_shape(self) -> None:
        """Said where inputs of another shape would tell them apart."""
        assert self.spec_a is not None
        assert self.spec_b is not None
        always = self.spec_a.same_function(self.spec_b)
        if not always.same and self.a.settable and self.b.settable:
            self.notes.append(f"on inputs of shape {self.shape}; for others {always}")

    def _verdict(self, a: NormSpec, b: NormSpec) -> Sameness:
        """By the specifications; of the factors alone where a side's values are what they are, and were compared."""
        if self.a.settable and self.b.settable:
            return a.same_function(b, shape=self.shape)
        return _any_weight(a).same_function(_any_weight(b), shape=self.shape)

    def _counterexample(self, seen: list[_Seen]) -> Counterexample | None:
        """Of the inputs that show nearly the largest difference the plainest, made small."""
        if not seen:
            return None
        seen = [f for f in seen if f.mode in ("train", "eval")] or seen
        largest = max(f.gap.size for f in seen)
        worst = next(f for f in seen if f.gap.size >= KEEP * largest)

        def stays(x: Array) -> bool:
            if self.order.order is not None and x.ndim != len(self.shape):
                return False
            apart = self._gap(worst.mode, x, worst.trial)
            if apart is None or not apart.real:
                return False
            return apart.size == inf if largest == inf else KEEP * largest <= apart.size < inf

        x = shrunk(worst.x, stays)
        apart = self._gap(worst.mode, x, worst.trial)
        assert apart is not None
        values = worst.trial(x.shape)
        return Counterexample(
            x, apart.y_a, apart.y_b, worst.mode, apart.quantity, dict(values[0] or {}), dict(values[1] or {})
        )


def _any_weight(spec: NormSpec) -> NormSpec:
    """With one number as its weight, which makes up for every convention of the scale."""
    return spec.replace(weight="", bias=None, weight_offset=0.0)


def _casts(spec: NormSpec) -> tuple[str, str]:
    """What the casts do to a bfloat16 input: without a weight their order is none."""
    return spec.cast.compute or "float32", spec.cast.weight if spec.weight is not None else "before"


def _number(size: float) -> float:
    return -1.0 if np.isnan(size) else size
