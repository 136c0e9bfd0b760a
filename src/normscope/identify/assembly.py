"""From a fit to a specification: units, words for the axes, parameters; and the other ways to say the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from normscope.identify.affine import Values, place
from normscope.identify.box import Array
from normscope.identify.decimals import shortest
from normscope.identify.fit import Fit, at_fixed_eps
from normscope.identify.partition import Partition
from normscope.identify.probing import Contradiction, Prober
from normscope.identify.scan import Observation
from normscope.identify.second_size import Second
from normscope.identify.spelling import Spelling
from normscope.identify.ties import Constant, Units, by_second_size, choices, constant, roundness
from normscope.spec import NormSpec

Member = tuple[NormSpec, "Array | None", "Array | None"]


@dataclass(frozen=True)
class Assembly:
    """Everything that a specification is put together from."""

    f: Prober
    partition: Partition
    observed: Sequence[Observation]
    fit: Fit
    bias: Values
    spellings: Sequence[Spelling]

    @property
    def machine(self) -> float:
        """the machine epsilon of the dtype that the callable computes in"""
        return 2 * self.f.roundoff

    @property
    def n(self) -> int:
        return self.partition.set_size

    def choose(self, second: Second | None) -> tuple[Member, list[NormSpec]]:
        """The member that the evidence speaks for, and others that are the same function at this shape."""
        units, others = self._units(second)
        eps = constant(self.fit, units, self.n, self.machine)
        one = self._with_eps(eps, units)
        members = list(self._members(one, units, eps))
        if not members:
            raise Contradiction(self._unsaid())
        best = members[0][0]
        found = [spec for spec, _, _ in members[1:] if not best.same_function(spec)]
        found += [*self._as_gain(members[0]), *self._other_floor(best, eps)]
        for other in others:
            found.append(
                next(self._members(self.fit, other, constant(self.fit, other, self.n, self.machine)))[0]
            )
        return members[0], list(dict.fromkeys(found))

    def _unsaid(self) -> str:
        if self.partition.segments:
            runs = " and ".join(map(str, self.partition.segments))
            return (
                f"its sets are runs of {runs} along axis {self.partition.ragged}; a specification has runs of "
                "different lengths only along the samples, b, and there all but the last of one length, or by one apart"
            )
        return "its gain or bias differs along axes that no pattern with its statistic sets has a name for"

    def _with_eps(self, eps: Constant, units: Units) -> Fit:
        """The gain that goes with eps as it was recognized."""
        value = self.machine if eps.eps is None else eps.eps
        root = value if eps.eps_at in ("std", "max") else sqrt(value)
        return at_fixed_eps(self.observed, self.partition, self.fit, root / sqrt(units.ratio(self.n)))

    # Units ------------------------------------------------------------------------------------------------------

    def _units(self, second: Second | None) -> tuple[Units, list[Units]]:
        """The units, and those that nothing spoke against."""
        candidates = choices(self.fit, self.n)
        if second is not None:
            told = by_second_size(candidates, second.sizes, second.gain_ratio, second.error)
            if told is not None:
                self.f.conclude(
                    f"the spread is measured by {told.words}",
                    "a second set size, at which the same weight explains the output",
                    elements=second.sizes,
                    gain_ratio=second.gain_ratio,
                )
                self._say_eps_at(second, told)
                return told, []
            self.f.notes.append(
                f"at sets of {second.sizes[1]} elements the gain is {second.gain_ratio:.6g} times that at "
                f"{second.sizes[0]}: it depends on the size of the set in a way that no specification says"
            )
        gain = gain_values(self.fit, self.f, self.n)
        score = {
            units: roundness(units, self.n, constant(self.fit, units, self.n, self.machine), gain)
            for units in candidates
        }
        best = min(
            candidates, key=lambda units: score[units]
        )  # the first, which is the usual one, where equal
        rivals = [units for units in candidates if units != best]
        if rivals:
            tied = all(score[units] == score[best] for units in rivals)
            how = "nothing tells; the usual one is named" if tied else "its numbers are the roundest"
            self.f.conclude(
                f"the spread is taken as {best.words}: {how}",
                "one set size only",
                **{
                    f"digits_by_{units.words.removeprefix('the ').replace(' ', '_')}": score[units]
                    for units in candidates
                },
            )
        return best, rivals

    def _say_eps_at(self, second: Second, told: Units) -> None:
        """Note an eps that is another number at the second size."""
        if second.eps_ratio is None:
            return
        before, after = second.sizes
        ratio = second.eps_ratio * sqrt(told.ratio(after) / told.ratio(before))
        if abs(ratio - 1) > second.eps_error:
            power = 2 if self.fit.form == "variance" else 1
            self.f.notes.append(
                f"at sets of {after} elements eps is {ratio**power:.6g} times that at {before}: it depends on the size "
                "of the set, and is told for this size"
            )

    # Members ----------------------------------------------------------------------------------------------------

    def _members(self, one: Fit, units: Units, eps: Constant) -> Iterator[Member]:
        """One for each spelling that has words for the parameters; families with parameters in their place first."""
        gain = gain_values(one, self.f, self.n).scaled(sqrt(units.ratio(self.n)))
        found: list[tuple[int, Member]] = []
        for spelling in self.spellings:
            if found and not spelling.family:
                break  # the bare pattern says nothing that a family's does not
            weight, bias = place(gain, spelling), place(self.bias, spelling)
            if weight is None or bias is None:
                continue
            w = None if weight[0] == "" and gain.is_everywhere(1.0) else _in_few_digits(weight, gain)
            b = None if bias[0] == "" and self.bias.is_everywhere(0.0) else _in_few_digits(bias, self.bias)
            strange = sum(part is not None and part[0] not in ("", spelling.own) for part in (w, b))
            spec = spelling.spec.replace(
                weight=None if w is None else w[0],
                bias=None if b is None else b[0],
                center=one.shape.center,
                scale=units.scale,
                correction=units.correction,
                eps=eps.eps,
                eps_at=eps.eps_at,
            )
            found.append((strange, (spec, None if w is None else w[1], None if b is None else b[1])))
        yield from (member for _, member in sorted(found, key=lambda pair: pair[0]))

    @staticmethod
    def _as_gain(member: Member) -> Iterator[NormSpec]:
        """One number for all elements may also be a fixed factor."""
        spec, weight, _ = member
        if spec.weight == "" and weight is not None:
            yield spec.replace(weight=None, gain=float(weight))

    @staticmethod
    def _other_floor(spec: NormSpec, eps: Constant) -> Iterator[NormSpec]:
        """A floor may be written at the root or under it."""
        if eps.eps and eps.eps_at == "max":
            yield spec.replace(eps=eps.eps**2, eps_at="max_variance")
        elif eps.eps and eps.eps_at == "max_variance":
            yield spec.replace(eps=sqrt(eps.eps), eps_at="max")


def _in_few_digits(placed: tuple[str, Array], values: Values) -> tuple[str, Array]:
    """A single number as the shortest decimal within its error."""
    where, value = placed
    if where or value.ndim or not value:
        return placed
    return where, np.array(shortest(float(value), float(values.error.min() / abs(value))))


def gain_values(one: Fit, f: Prober, n: int) -> Values:
    """The gain, as well as it is known: a sum over a set of n rounds by some sqrt(n) units, on both sides."""
    sums = (16 + sqrt(n)) * f.roundoff * np.abs(one.gain) / np.clip(one.lever, f.roundoff, 1.0)
    return Values(one.gain, 4 * one.gain_error + sums)
