"""The protocol for a user's own layer: what it is, by hand, its gradient, companions, state, and interventions.

Everything runs on a float64 copy on the CPU. Where a gain could hide something (a gain of 0 hides all), the copy's gain
is set to 1, and the statement says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from normscope import reference
from normscope.reading import UnknownNormalization, read
from normscope.spec import NormSpec
from normscope.verify.alternatives import alternatives
from normscope.verify.bounds import state_bounds
from normscope.verify.declared import Declaration
from normscope.verify.evidence import Evidence
from normscope.verify.float64 import ULP, Array, gap, jacobian, normal, numpy
from normscope.verify.subject import Subject

STEP = 1e-5
SMALL = 64  # tensors of up to so many numbers are written out


def normalizations(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module itself, or every normalization in it that can be read, by path."""
    return [(path, part) for path, part in module.named_modules() if _readable(part)]


def _readable(module: nn.Module) -> bool:
    try:
        read(module)
    except UnknownNormalization:
        return False
    return True


def checks(
    module: nn.Module, topic: str, declaration: Declaration | None = None
) -> tuple[Callable[[], Iterator[Evidence]], ...]:
    """The checks of one layer, by the specification that is read off it or by the declared one."""
    layer = Layer(module, topic, declaration)
    return (
        layer.specification,
        layer.random_tensors,
        layer.around_eps,
        layer.own_precision,
        layer.jacobian,
        layer.gradient,
        layer.companions,
        layer.state,
        layer.interventions,
    )


class Layer(Subject):
    """The protocol, check by check."""

    def specification(self) -> Iterator[Evidence]:
        x = self._integers()
        for train in (True, False):
            y, expected = self.run(self.layer, x, train), self.expected(numpy(x), train)
            mean, v, count = reference.statistics(numpy(x), self.spec)
            result: dict[str, Any] = {
                "mode": self.mode(train),
                "elements a set": int(count.max()),
            }
            compared = self.within(y, expected, self.magnitudes(x, train).forward(self.unit))
            if not compared["measured"] <= compared["tolerance"]:
                result["it would pass with"] = self._instead(self.layer, train)
            if x.numel() <= SMALL:
                result |= {"mean": mean.tolist(), "v": v.tolist(), "output": y.tolist()}
            yield self.evidence(
                f"in {_word(train)} it computes its specification, on small integers",
                x.tolist() if x.numel() <= SMALL else f"i^2 modulo 7, shape {self.shape}",
                **compared,
                result=result,
            )

    def random_tensors(self) -> Iterator[Evidence]:
        if not self.reading.tensors:
            return
        layer, x = self.with_random_tensors(), self.x()
        for train in (True, False):
            y, expected = self.run(layer, x, train), self.expected(numpy(x), train, layer)
            compared = self.within(y, expected, self.magnitudes(x, train, layer).forward(self.unit))
            failed = not compared["measured"] <= compared["tolerance"]
            yield self.evidence(
                f"in {_word(train)} it does so with another gain, bias and state",
                f"{self.input}; gain, bias and mean 0.5 + standard normal, variance 0.5 + its size, seeds 10 to 13",
                **compared,
                result={"it would pass with": self._instead(layer, train)} if failed else {},
            )

    def around_eps(self) -> Iterator[Evidence]:
        if self.eps <= 0:
            return
        x = self._around_eps()
        for train in (True, False):
            y, expected = self.run(self.layer, x, train), self.expected(numpy(x), train)
            yield self.evidence(
                f"in {_word(train)} it does so on numbers so small that eps rules",
                f"shape {self.shape}, {self._level():.3g} * standard normal, seed 5",
                **self.within(y, expected, self.magnitudes(x, train).forward(self.unit)),
            )

    def _integers(self) -> torch.Tensor:
        return ((torch.arange(int(np.prod(self.shape)), dtype=torch.float64) ** 2) % 7).reshape(self.shape)

    def _level(self) -> float:
        return float(self.eps if self.spec.eps_at in ("std", "max") else self.eps**0.5)

    def _around_eps(self) -> torch.Tensor:
        return self._level() * normal(*self.shape, seed=5)

    def _instead(self, layer: nn.Module, train: bool) -> str:
        """Which specifications near the declared one explain all that the layer gives."""
        inputs = (self._integers(), self.x(), self._around_eps() if self.eps > 0 else 1e-3 * self.x())
        outputs = [(x, self.run(layer, x, train)) for x in inputs]

        def computes(spec: NormSpec) -> bool:
            unit = torch.finfo(torch.float32).eps if spec.cast.compute == "float32" else self.unit
            return all(
                bool(np.all(np.abs(y - self.expected(numpy(x), train, layer, spec)) <= bound.forward(unit)))
                for x, y in outputs
                for bound in (self.magnitudes(x, train, layer, spec),)
            )

        return " or ".join(alternatives(self.spec, computes)) or "no specification near this one"

    def own_precision(self) -> Iterator[Evidence]:
        tensors = self.reading.tensors.values()
        dtype = next(
            (t.dtype for t in self.read(self.original).tensors.values() if t.is_floating_point()),
            torch.float32,
        )
        if dtype == torch.float64 or not tensors:
            dtype = torch.float32
        x, spec = self.x().to(dtype), self._in(dtype)
        numbers = torch.finfo(dtype)
        unit = max(numbers.eps, self.unit)
        for train in (True, False):
            layer = copy.deepcopy(self.original).to(dtype)
            bound = self.magnitudes(x, train, spec=spec).forward(unit, numbers.tiny * numbers.eps)
            y, expected = (  # what is beyond the largest number is as good as it
                np.clip(values, numbers.min, numbers.max)
                for values in (self.run(layer, x, train), self.expected(numpy(x), train, spec=spec))
            )
            yield self.evidence(
                f"in {_word(train)} on {_name(dtype)} it loses no more than rounding explains",
                f"{self.input}, rounded to {_name(dtype)}",
                **self.within(y, expected, bound, unit),
            )

    def _in(self, dtype: torch.dtype) -> NormSpec:
        """The specification with the eps that it has on inputs of ``dtype``: None is an epsilon of some dtype."""
        compute = self.spec.cast.compute
        if self.spec.eps is not None:
            return self.spec
        own = dtype if compute == "input" else getattr(torch, compute or "float32")
        return self.spec.replace(eps=torch.finfo(own).eps)

    def jacobian(self) -> Iterator[Evidence]:
        x = self.x()
        if x.numel() > SMALL:
            return
        for train in (True, False):
            layer = copy.deepcopy(self.layer).train(train)
            closed = reference.jacobian(numpy(x), self.spec, *self.affine(), **self.by(train))
            yield self.evidence(
                f"in {_word(train)} its Jacobian is the closed formula, entry by entry",
                self.input,
                **self.within(jacobian(layer, x), closed, self.magnitudes(x, train).jacobian(self.unit)),
            )

    def gradient(self) -> Iterator[Evidence]:
        x, cotangent = self.x(), normal(*self.shape, seed=1)
        move = normal(*self.shape, seed=2)
        move = move / move.norm()
        for train in (True, False):
            layer = copy.deepcopy(self.layer).train(train)
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            (automatic,) = torch.autograd.grad(y, leaf, cotangent)
            closed, _, _ = reference.vjp(
                numpy(cotangent), numpy(x), self.spec, *self.affine(), **self.by(train)
            )
            sizes = self.magnitudes(x, train)
            yield self.evidence(
                f"in {_word(train)} its gradient is the closed formula",
                f"{self.input}, cotangent standard normal, seed 1",
                **self.within(
                    numpy(automatic), closed, sizes.gradient(numpy(cotangent), self.unit), self.unit
                ),
            )
            if self.unit > ULP:  # a difference of 1e-5 drowns in the rounding of its arithmetic
                continue
            if train and self.spec.properties().training_reads_state:  # r and d move, and have no gradient
                continue
            step = STEP * min(1.0, 1 / float(sizes.rate.max()))
            ahead, behind = (self.run(self.layer, x + sign * step * move, train) for sign in (1, -1))
            slope = float(np.sum(numpy(cotangent) * (ahead - behind))) / (2 * step)
            exact = float((automatic * move).sum())
            rounded = float(np.sum(np.abs(numpy(cotangent)) * sizes.forward()))
            yield self.evidence(
                f"in {_word(train)} its gradient is what central differences say",
                f"{self.input}, along a random unit direction, seed 2",
                measured=abs(slope - exact),
                tolerance=2 * rounded / step + sizes.truncation(numpy(cotangent), numpy(move), step),
                because=f"step {step:.3g}: rounding of y over the step, and step^2 / 6 times a bound on the third "
                "derivative",
                result={"by differences": slope, "by autograd": exact, "step": step},
            )

    def companions(self) -> Iterator[Evidence]:
        bound = self.bound
        if bound.sample_dim is None:
            return
        coupled_axes = any(not axis.kept and axis.dim == bound.sample_dim for axis in bound.axes)
        layer = self.with_plain_gain()
        one = self.x()
        other = one.clone()
        others = other.narrow(bound.sample_dim, 1, self.shape[bound.sample_dim] - 1)
        others.copy_(5 + 3 * normal(*others.shape, seed=3))
        for train in (True, False):
            alone, beside, slack = (
                values.take([0], axis=bound.sample_dim)
                for values in (
                    self.run(layer, one, train),
                    self.run(layer, other, train),
                    self._slack(layer, train, one, other),
                )
            )
            coupled = coupled_axes and self.mode(train) == "batch"
            told = "changes" if coupled else "stays"
            yield self.evidence(
                f"in {_word(train)} beside other companions a sample's output {told} (gain 1)",
                f"{self.input}; then all samples but the first 5 + 3 * standard normal, seed 3",
                **(_shows(alone, beside, slack) if coupled else self.within(alone, beside, slack)),
            )

    def state(self) -> Iterator[Evidence]:
        stored = self.state_of(self.layer)
        if stored is None:
            return
        for train in (True, False):
            layer = copy.deepcopy(self.layer)
            x = self.x()
            self.run(layer, x, train, copied=False)
            after = self.state_of(layer)
            assert after is not None
            moves = _word(train) in self.reading.updates
            expected = reference.update_running(stored, numpy(x), self.spec) if moves else stored
            compared: dict[str, Any] = {
                "measured": max(gap(after.mean, stored.mean), gap(after.var, stored.var)),
                "tolerance": 0.0,
                "because": "nothing is written",
            }
            if moves:
                moved, wanted, slack = (
                    np.concatenate([mean.ravel(), var.ravel()])
                    for mean, var in (
                        (after.mean, after.var),
                        (expected.mean, expected.var),
                        state_bounds(stored, numpy(x), self.bound.set_size, self.unit),
                    )
                )
                compared = self.within(moved, wanted, slack)
            told = f"moves its state {_rule(self.spec)}" if moves else "leaves its state alone"
            yield self.evidence(
                f"in {_word(train)} a forward {told}",
                self.input,
                **compared,
                result={
                    "mode": self.mode(train),
                    "counter before": stored.batches,
                    "counter after": after.batches,
                },
            )

    def interventions(self) -> Iterator[Evidence]:
        layer = self.with_plain_gain()
        for train in (True, False):
            if self.mode(train) in ("running", "frozen"):
                yield self._affine_in_x(layer, train)
            elif self.spec.running is None or self.spec.running.renorm is None:
                yield from self._own_statistics(layer, train)

    def _affine_in_x(self, layer: nn.Module, train: bool) -> Evidence:
        one, other = self.x(), 5 + normal(*self.shape, seed=4)
        middle = (one + other) / 2
        between = self.run(layer, middle, train)
        ends = (self.run(layer, one, train) + self.run(layer, other, train)) / 2
        return self.evidence(
            f"in {_word(train)} it is affine: f((x + z) / 2) = (f(x) + f(z)) / 2 (gain 1)",
            f"{self.input}; z is 5 + standard normal, seed 4",
            **self.within(between, ends, self._slack(layer, train, one, other, middle)),
        )

    def _own_statistics(self, layer: nn.Module, train: bool) -> Iterator[Evidence]:
        x = self.x()
        y = self.run(layer, x, train)
        centers = self.spec.center
        if centers or self.bound.set_size > 1:
            shifted, slack = self.run(layer, x + 8, train), self._slack(layer, train, x, x + 8)
            yield self.evidence(
                f"in {_word(train)} a shift by 8 {'is removed' if centers else 'shows'} (gain 1)",
                self.input,
                **(self.within(shifted, y, slack) if centers else _shows(shifted, y, slack)),
            )
        _, v, _ = reference.statistics(numpy(x), self.spec)
        least = float(v.min())
        if least > 0:
            yield self.evidence(
                f"in {_word(train)} a scale of 1024 shows through eps alone (gain 1, bias 0)",
                self.input,
                measured=gap(self.run(layer, 1024 * x, train), y),
                tolerance=abs(self._shrinks(least)) * float(np.abs(y).max())
                + float(self._slack(layer, train, x, 1024 * x).max()),
                because="the denominator is at most so much above the root of v, and rounding of what the largest "
                "bound is made of: (x - mean) / s and max|x| / s",
            )
        yield self.evidence(
            f"in {_word(train)} a scale of -1 flips the sign (gain 1, bias 0)",
            self.input,
            **self.within(self.run(layer, -x, train), -y, self._slack(layer, train, x, -x)),
        )
        if centers and self.eps > 0:
            yield self.evidence(
                f"in {_word(train)} a constant gives exactly 0 (gain 1, bias 0)",
                f"2 everywhere, shape {self.shape}",
                measured=gap(self.run(layer, torch.full(self.shape, 2.0, dtype=torch.float64), train), 0),
                tolerance=0.0,
                because="sums of 2 are exact, so x - mean is exactly 0",
            )

    def _slack(self, layer: nn.Module, train: bool, *inputs: torch.Tensor) -> Array:
        """How far rounding may bring the outputs on some inputs apart."""
        slack: Array = np.sum([self.magnitudes(x, train, layer).forward(self.unit) for x in inputs], axis=0)
        return slack

    def _shrinks(self, v: float) -> float:
        """How much larger the denominator is than sqrt(v), relative to it: all that a larger scale can undo."""
        root, eps = v**0.5, self.eps
        denominators = {
            "variance": max(v + eps, 0.0) ** 0.5,
            "std": root + eps,
            "max": max(root, eps),
            "max_variance": max(v, eps) ** 0.5,
        }
        return float(denominators[self.spec.eps_at] / root - 1)


def _shows(one: Array, other: Array, slack: Array) -> dict[str, Any]:
    return {
        "measured": gap(one, other),
        "tolerance": 1000 * float(slack.max()),
        "because": "a thousand times what rounding explains",
        "at_least": True,
    }


def _rule(spec: NormSpec) -> str:
    momentum = spec.running.momentum if spec.running else None
    return "to the mean of all batches" if momentum is None else f"by {momentum:g} of the way to the batch"


def _word(train: bool) -> str:
    return "train" if train else "eval"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
