"""``compare``: are two normalizations one function, in what do they differ, and on which input does it show."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.errors import BadInput, NormscopeError
from normscope.identify.compare_gap import Gap, gap
from normscope.identify.compare_half import (
    HalfGap,
    arithmetic_difference,
    as_defined,
    changes,
    differ,
    dtype_difference,
    half_modes,
    on_the_grid,
    rounded,
)
from normscope.identify.compare_inputs import CENTERED, inputs_for
from normscope.identify.compare_layout import Layout, as_first_reads, read_layout
from normscope.identify.compare_pair import two_sides
from normscope.identify.compare_precision import in_one_precision, precision
from normscope.identify.compare_result import HALVES, WORDS, Comparison, Counterexample, Difference
from normscope.identify.compare_search import shrunk
from normscope.identify.compare_sides import Both, Side
from normscope.identify.compare_values import carried, free_values
from normscope.identify.compare_verdict import beyond, by_field, decided, proven
from normscope.identify.repeats import global_generators_kept, on_this_rank
from normscope.spec import NormSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Values = Mapping[str, Array]
    Pair = tuple[Values | None, Values | None]
    Trial = Callable[[tuple[int, ...], str], Pair]
    """shape, mode -> values for both"""

KEEP = 0.5
"""of the largest difference that a smaller counterexample must show"""
BY_WEIGHT = (("train", "eval"), ("update",), *((mode,) for mode in HALVES))
"""modes in the order in which a counterexample is looked for"""


def compare(a: Any, b: Any, example: Any = None, *, layout: str | None = None) -> Comparison:
    """Whether two normalizations are the same function, every difference by field, and an input that shows it.

    Decided from the specifications (read, given, or identified) and confirmed on real evaluations of both, in training
    and in evaluation apart: with the values they hold, and where both can take other values, with other values too, as
    layers are functions of their parameters. The update of stored statistics is compared as well, and, of modules and
    of functions of tensors, the output in bfloat16 and float16, where it shows which arithmetic rounds on its way. (Two
    specifications are run there only where their casts differ.) Nothing handed in is changed.

    Arguments:
        a, b: a `NormSpec`, a torch module, or any callable that `identify` takes (a function of one array or tensor, a
            Keras or Flax layer, an ONNX Runtime session); the two may be of different kinds.
        example: an input of both: array, tensor or sizes. Its kind decides what a callable receives: a function called
            with a tensor gets tensors, whose ``.var`` and ``.std`` are unbiased, unlike NumPy's. Without one a shape is
            chosen that fits both, which takes specifications or modules that can be read.
        layout: names of the input's axes, ``"b c h w"``; ``"b c h w -> b h w c"`` where the second takes the same data
            in another order. The example, and a counterexample, are in the first's order.

    Inputs are finite: what the two make of NaN and infinities is not compared.

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
    if any(isinstance(each, (str, PurePath, Mapping)) for each in (a, b)):
        raise BadInput(
            "compare takes specifications, modules and callables; of files and state dicts, "
            "normscope.compare_norms(a, b) compares what they hold"
        )
    order = read_layout(layout)
    with global_generators_kept(), on_this_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sets of one element and the like are tried on purpose
        found = two_sides(a, b, example, order)
        return found if isinstance(found, Comparison) else _Comparing(*found, order).result()


@dataclass(frozen=True, eq=False)
class _Seen:
    """One real gap, and how it came about."""

    mode: str
    input: str
    x: Array
    trial: Trial
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
        seen = [*self._seen(modes := self._modes())]
        if not any(found.mode in ("train", "eval") for found in seen):
            x = np.random.default_rng(0).standard_normal(self.shape)
            values = next(iter(self._trials()))(self.shape, "bfloat16")
            given = x, self.order.forth(x)
            unlike = [
                side.name for side, one in zip((self.a, self.b), given, strict=True) if changes(side, one)
            ]
            said = [
                f"not compared in half precision, as {name} gives one input two outputs" for name in unlike
            ]
            halves: list[str] = []
            if not unlike:
                halves, said = half_modes(self._both, given, values, "train" in modes)
            self.notes += said
            seen += self._seen(halves)
            modes += halves
        answers: dict[str, bool | None] = {}
        for mode in modes:
            answers[mode] = not any(found.mode == mode for found in seen) if self.tried.get(mode) else None
            if answers[mode] is None:
                self.notes.append(f"the {WORDS[mode]} was not compared: one of them raises, or is random")
        named = self._differences(answers, seen)
        same, why = decided(self._both, answers, named, sum(self.tried.values()))
        self.notes += why
        if not proven(self._both, answers, same):  # to agree on what was tried proves nothing of the rest
            answers = {mode: alike and None for mode, alike in answers.items()}
        shown = self._counterexample(seen)
        largest = {m: max(f.gap.size for f in seen if f.mode == m) for m in modes if answers[m] is False}
        if shown is not None:  # a small input may show more than those that it was made of
            largest[shown.mode] = max(largest[shown.mode], shown.difference)
        if same is False and all(d.mode == "parameters" for d in named):
            named.append(beyond(self._both, largest))
        return Comparison(
            self.a.name,
            self.b.name,
            same,
            differences=tuple(sorted(named, key=lambda d: (d.mode == "parameters", -_number(d.size)))),
            counterexample=shown,
            modes=answers,
            largest=largest,
            spec_a=self.a.spec,
            spec_b=self.b.spec,
            notes=tuple(self.notes),
            precision=precision(self.a, self.b),
        )

    @property
    def _both(self) -> Both:
        return Both(self.a, self.b, self.spec_a, self.spec_b, self.shape)

    # -- evaluations -----------------------------------------------------------------------------------------------

    def _modes(self) -> list[str]:
        if any(side.fixed and not side.trains for side in (self.a, self.b)):
            self.notes.append("one is a fixed map, as a norm in evaluation is: only evaluation is compared")
            return ["eval"]
        modes = ["train", "eval"]
        if self._has_state(self.a) and self._has_state(self.b):
            modes.append("update")
        return modes

    @staticmethod
    def _has_state(side: Side) -> bool:
        return (
            side.spec is not None and side.spec.running is not None and not side.spec.whiten and side.settable
        )

    def _trials(self) -> Iterator[Trial]:
        """With the values that they hold; then, where both take others, with others, put into each first."""
        a, b = self.a, self.b
        if a.held is not None or b.held is not None or not (a.settable and b.settable):
            yield self._held
        if a.settable and b.settable and self.spec_a is not None and self.spec_b is not None:
            one, two = self.spec_a, self.spec_b
            yield lambda shape, mode: (mine := _free(one, shape, mode), carried(mine, one, two, shape))
            yield lambda shape, mode: (carried(theirs := _free(two, shape, mode), two, one, shape), theirs)

    def _held(self, shape: tuple[int, ...], mode: str) -> Pair:
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
        for mode in modes:
            trials = [*self._trials()]
            for trial in (
                trials[1:2] or trials if mode in HALVES else trials
            ):  # once, with values that tell most
                ran = self._ran(mode, trial, self.a, self.b)
                self.tried[mode] = self.tried.get(mode, 0) + len(ran)
                found = [seen for seen in ran if seen.gap.real]
                if mode in HALVES:
                    found = self._in_half(mode, trial, ran)
                yield from found
                if found:
                    self._remark(mode, trial, found)
                    break

    def _ran(self, mode: str, trial: Trial, a: Side, b: Side) -> list[_Seen]:
        """All inputs of a mode that both sides take."""
        gaps = (
            (name, x, self._gap(mode, x, trial, a, b))
            for name, x in inputs_for(mode, self.shape, (self.spec_a, self.spec_b))
        )
        return [_Seen(mode, name, x, trial, apart) for name, x, apart in gaps if apart is not None]

    def _in_half(self, mode: str, trial: Trial, ran: list[_Seen]) -> list[_Seen]:
        """What tells the two apart in a half type: all inputs together, as a few near ties prove nothing."""
        if not differ(_halves(ran)):
            return []
        a, b = as_defined(self.a, mode), as_defined(self.b, mode)
        kernels = " and of ".join(side.name for side, own in ((self.a, a), (self.b, b)) if side is not own)
        if kernels and not differ(_halves(self._ran(mode, trial, a, b))):
            size = max(seen.gap.size for seen in ran)
            self.notes.append(
                f"the {WORDS[mode]} is the same by their definitions; here the CPU kernel of {kernels} rounds its "
                f"statistics to {HALVES[mode].dtype}, which changes it by up to {size:.3g}"
            )
            return []
        return [seen for seen in ran if (half := seen.gap.half) and (half.other_dtype or half.off.any())]

    def _remark(self, mode: str, trial: Trial, found: list[_Seen]) -> None:
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

    def _gap(self, mode: str, x: Array, trial: Trial, a: Side, b: Side) -> Gap | None:
        try:
            return gap(a, b, x, self.order.forth(x), self.order.back(x.ndim), mode, trial(x.shape, mode))
        except (NormscopeError, ValueError, RuntimeError, ArithmeticError):
            return None

    # -- what is told ------------------------------------------------------------------------------------------

    def _differences(self, answers: Mapping[str, bool | None], seen: list[_Seen]) -> list[Difference]:
        found: list[Difference] = []
        if self.spec_a is not None and self.spec_b is not None:
            found, said = by_field(self._both)
            self.notes += said
        if answers.get("bfloat16") is not False:
            found = [d for d in found if d.mode != "bfloat16"]
        for mode in HALVES:
            if answers.get(mode) is not False:
                continue
            halves, told = _halves(s for s in seen if s.mode == mode), any(d.mode == mode for d in found)
            found += dtype_difference(halves, mode)
            found += [] if told else arithmetic_difference(halves, mode)
        if any(answers.get(mode) is False for mode in HALVES):
            sides = [side for side in (self.a, self.b) if side.half_words]
            self.notes += [f"{side.name} in half precision: {side.half_words}" for side in sides]
        return found

    def _counterexample(self, seen: list[_Seen]) -> Counterexample | None:
        """Of the inputs that show nearly the largest difference the plainest, made small."""
        if not seen:
            return None
        first = next(modes for modes in BY_WEIGHT if any(f.mode in modes for f in seen))
        seen = [f for f in seen if f.mode in first]
        largest = max(f.gap.size for f in seen)
        worst = next(f for f in seen if f.gap.size >= KEEP * largest)

        def again(x: Array) -> Gap | None:
            return self._gap(worst.mode, x, worst.trial, self.a, self.b)

        def stays(x: Array) -> bool:
            if self.order.order is not None and x.ndim != len(self.shape):
                return False
            apart = again(x)
            if apart is None or not apart.real:
                return False
            return apart.size == inf if largest == inf else KEEP * largest <= apart.size < inf

        x = shrunk(worst.x, stays)
        values = [dict(held or {}) for held in worst.trial(x.shape, worst.mode)]
        if worst.mode in HALVES:
            x = rounded(x, worst.mode)
            values = [{n: rounded(value, worst.mode) for n, value in held.items()} for held in values]
        apart = again(x)
        assert apart is not None
        return Counterexample(x, apart.y_a, apart.y_b, worst.mode, apart.quantity, *values)


def _free(spec: NormSpec, shape: tuple[int, ...], mode: str) -> Values:
    values = free_values(spec, shape)
    return on_the_grid(values) if mode in HALVES else values


def _halves(seen: Iterable[_Seen]) -> list[HalfGap]:
    return [each.gap.half for each in seen if each.gap.half is not None]


def _number(size: float) -> float:
    return -1.0 if np.isnan(size) else size
