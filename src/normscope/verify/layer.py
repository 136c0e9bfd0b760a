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
from torch.nn.utils import parametrize

from normscope import reference
from normscope.reading import Reading, UnknownNormalization, read
from normscope.spec import NormSpec, RunningState
from normscope.verify.evidence import Evidence
from normscope.verify.float64 import ULP, Array, gap, normal, numpy

STEP = 1e-5
SMALL = 64  # tensors of up to so many numbers are written out


def normalizations(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module itself, or every normalization in it that can be read, by path.

    Raises UnknownNormalization with the reason for the module itself where there is none.
    """
    found = [(path, part) for path, part in module.named_modules() if _readable(part)]
    if not found:
        read(module)
    return found


def _readable(module: nn.Module) -> bool:
    try:
        read(module)
    except UnknownNormalization:
        return False
    return True


def checks(module: nn.Module, topic: str) -> tuple[Callable[[], Iterator[Evidence]], ...]:
    """The checks of one layer."""
    subject = Subject(module, topic)
    return (
        subject.specification,
        subject.own_precision,
        subject.gradient,
        subject.companions,
        subject.state,
        subject.interventions,
    )


class Subject:
    """One layer under the protocol."""

    def __init__(self, module: nn.Module, topic: str) -> None:
        self.topic = topic
        self.original = copy.deepcopy(module).cpu()
        self.layer = copy.deepcopy(self.original).double()
        self.shape = example_shape(self.layer)
        self.reading = read(self.layer, input_ndim=len(self.shape))
        self.spec: NormSpec = self.reading.spec
        self.eps = torch.finfo(torch.float64).eps if self.spec.eps is None else self.spec.eps
        self.set_size = self.spec.bind(self.shape).set_size

    def specification(self) -> Iterator[Evidence]:
        x = ((torch.arange(int(np.prod(self.shape)), dtype=torch.float64) ** 2) % 7).reshape(self.shape)
        for train in (True, False):
            y, expected = self._run(self.layer, x, train), self._expected(numpy(x), train)
            mean, v, count = reference.statistics(numpy(x), self.spec)
            result: dict[str, Any] = {
                "mode": self._mode(train),
                "elements a set": int(count.max()),
            }
            if x.numel() <= SMALL:
                result |= {"mean": mean.tolist(), "v": v.tolist(), "output": y.tolist()}
            yield self._evidence(
                f"in {_word(train)} it computes its specification, on small integers",
                x.tolist() if x.numel() <= SMALL else f"i^2 modulo 7, shape {self.shape}",
                measured=gap(y, expected),
                **self._rounding(expected, ULP),
                result=result,
            )

    def own_precision(self) -> Iterator[Evidence]:
        tensors = self.reading.tensors.values()
        dtype = next(
            (t.dtype for t in read(self.original).tensors.values() if t.is_floating_point()), torch.float32
        )
        if dtype == torch.float64 or not tensors:
            dtype = torch.float32
        x = self._x().to(dtype)
        for train in (True, False):
            layer = copy.deepcopy(self.original).to(dtype)
            y, expected = self._run(layer, x, train), self._expected(numpy(x), train)
            yield self._evidence(
                f"in {_word(train)} on {_name(dtype)} it loses no more than rounding explains",
                f"{self._input()}, rounded to {_name(dtype)}",
                measured=gap(y, expected),
                **self._rounding(expected, torch.finfo(dtype).eps),
            )

    def gradient(self) -> Iterator[Evidence]:
        x, cotangent = self._x(), normal(*self.shape, seed=1)
        move = normal(*self.shape, seed=2)
        move = move / move.norm()
        for train in (True, False):
            layer = copy.deepcopy(self.layer).train(train)
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            (automatic,) = torch.autograd.grad(y, leaf, cotangent)
            closed, _, _ = reference.vjp(
                numpy(cotangent), numpy(x), self.spec, *self._affine(), **self._by(train)
            )
            scale = 1 + float(y.detach().abs().max())
            yield self._evidence(
                f"in {_word(train)} its gradient is the closed formula",
                f"{self._input()}, cotangent standard normal, seed 1",
                measured=gap(automatic, closed),
                **self._rounding(closed, ULP),
            )
            ahead, behind = (self._run(self.layer, x + sign * STEP * move, train) for sign in (1, -1))
            slope = float(np.sum(numpy(cotangent) * (ahead - behind))) / (2 * STEP)
            exact = float((automatic * move).sum())
            yield self._evidence(
                f"in {_word(train)} its gradient is what differences say, away from zero variance",
                f"{self._input()}, along a random unit direction, seed 2",
                measured=abs(slope - exact),
                tolerance=1e-8 * scale * float(cotangent.norm()),
                because=f"step {STEP:g}: step^2 times a third derivative, and ulp / step, are below 1e-9 of the output",
                result={"by differences": slope, "by autograd": exact, "step": STEP},
            )

    def companions(self) -> Iterator[Evidence]:
        bound = self.spec.bind(self.shape)
        if bound.sample_dim is None:
            return
        coupled_axes = any(not axis.kept and axis.dim == bound.sample_dim for axis in bound.axes)
        layer = self._with_plain_gain()
        one = self._x()
        other = one.clone()
        others = other.narrow(bound.sample_dim, 1, self.shape[bound.sample_dim] - 1)
        others.copy_(5 + 3 * normal(*others.shape, seed=3))
        for train in (True, False):
            outputs = [self._run(layer, x, train).take(0, axis=bound.sample_dim) for x in (one, other)]
            coupled = coupled_axes and self._mode(train) == "batch"
            told = "its output changes" if coupled else "its output stays"
            rounding = self._rounding(outputs[0], ULP)
            yield self._evidence(
                f"in {_word(train)} one sample beside other companions: {told} (gain set to 1)",
                f"{self._input()}; then all samples but the first 5 + 3 * standard normal, seed 3",
                measured=gap(*outputs),
                **({"tolerance": 1e-3, "because": "a change that is no rounding"} if coupled else rounding),
                at_least=coupled,
            )

    def state(self) -> Iterator[Evidence]:
        stored = _state(self.reading)
        if stored is None:
            return
        for train in (True, False):
            layer = copy.deepcopy(self.layer)
            x = self._x()
            self._run(layer, x, train, copied=False)
            after = _state(read(layer, input_ndim=len(self.shape)))
            assert after is not None
            moves = _word(train) in self.reading.updates
            expected = reference.update_running(stored, numpy(x), self.spec) if moves else stored
            told = f"moves its state {_rule(self.spec)}" if moves else "leaves its state alone"
            yield self._evidence(
                f"in {_word(train)} a forward {told}",
                self._input(),
                measured=max(gap(after.mean, expected.mean), gap(after.var, expected.var)),
                **(
                    self._rounding(expected.var, ULP)
                    if moves
                    else {"tolerance": 0.0, "because": "nothing is written"}
                ),
                result={
                    "mode": self._mode(train),
                    "counter before": stored.batches,
                    "counter after": after.batches,
                },
            )

    def interventions(self) -> Iterator[Evidence]:
        layer = self._with_plain_gain()
        for train in (True, False):
            if self._mode(train) in ("running", "frozen"):
                yield self._affine_in_x(layer, train)
            else:
                yield from self._own_statistics(layer, train)

    def _affine_in_x(self, layer: nn.Module, train: bool) -> Evidence:
        one, other = self._x(), 5 + normal(*self.shape, seed=4)
        between = self._run(layer, (one + other) / 2, train)
        ends = (self._run(layer, one, train) + self._run(layer, other, train)) / 2
        return self._evidence(
            f"in {_word(train)}, by stored statistics, f((x + z) / 2) = (f(x) + f(z)) / 2 (gain set to 1)",
            f"{self._input()}; z is 5 + standard normal, seed 4",
            measured=gap(between, ends),
            **self._rounding(ends, ULP),
        )

    def _own_statistics(self, layer: nn.Module, train: bool) -> Iterator[Evidence]:
        x = self._x()
        y = self._run(layer, x, train)
        rounding = self._rounding(y, ULP)
        shifted = gap(self._run(layer, x + 8, train), y)
        centers = self.spec.center
        yield self._evidence(
            f"in {_word(train)} a shift by 8 {'is removed' if centers else 'shows'} (gain set to 1)",
            self._input(),
            measured=shifted,
            **(
                {
                    "tolerance": 8 * rounding["tolerance"],
                    "because": f"{rounding['because']}, at a level of 10",
                }
                if centers
                else {"tolerance": 1e-3, "because": "a change that is no rounding", "at_least": True}
            ),
        )
        _, v, _ = reference.statistics(numpy(x), self.spec)
        least = float(v.min())
        if least > 0:
            yield self._evidence(
                f"in {_word(train)} a scale of 1024 shows through eps alone (gain set to 1, bias to 0)",
                self._input(),
                measured=gap(self._run(layer, 1024 * x, train), y),
                tolerance=abs(self.eps) / (2 * least) * float(np.abs(y).max()) + rounding["tolerance"],
                because=f"1 - sqrt(v / (v + eps)) is at most eps / 2v, and {rounding['because']}",
            )
        yield self._evidence(
            f"in {_word(train)} a scale of -1 flips the sign (gain set to 1, bias to 0)",
            self._input(),
            measured=gap(self._run(layer, -x, train), -y),
            tolerance=rounding["tolerance"],
            because=rounding["because"],
        )
        if centers and self.eps > 0:
            yield self._evidence(
                f"in {_word(train)} a constant gives exactly 0 (gain set to 1, bias to 0)",
                f"2 everywhere, shape {self.shape}",
                measured=gap(self._run(layer, torch.full(self.shape, 2.0, dtype=torch.float64), train), 0),
                tolerance=0.0,
                because="sums of 2 are exact, so x - mean is exactly 0",
            )

    # What the checks share ---------------------------------------------------------------------------------------

    def _x(self) -> torch.Tensor:
        return 2 + normal(*self.shape, seed=0)

    def _input(self) -> str:
        return f"shape {self.shape}, 2 + standard normal, seed 0"

    def _mode(self, train: bool) -> str:
        return self.reading.mode_train if train else self.reading.mode_eval

    def _run(self, layer: nn.Module, x: torch.Tensor, train: bool, *, copied: bool = True) -> Array:
        layer = copy.deepcopy(layer) if copied else layer
        with torch.no_grad():
            return numpy(layer.train(train)(x))

    def _affine(self) -> tuple[Array | None, Array | None]:
        tensors = self.reading.tensors
        weight, bias = (numpy(tensors[name]) if name in tensors else None for name in ("weight", "bias"))
        return weight, bias

    def _by(self, train: bool) -> dict[str, Any]:
        return {"running": _state(self.reading), "training": self._mode(train) in ("batch", "input")}

    def _expected(self, x: Array, train: bool) -> Array:
        return reference.forward(x, self.spec, *self._affine(), **self._by(train))

    def _rounding(self, values: Any, unit: float) -> dict[str, Any]:
        largest = max(1.0, float(np.abs(values).max()))
        n = self.set_size
        return {
            "tolerance": (16 + n) * unit * largest,
            "because": f"sums of {n} terms and 16 operations, a unit of {unit:.3g} each, times {largest:.3g}",
        }

    def _with_plain_gain(self) -> nn.Module:
        layer = copy.deepcopy(self.layer)
        tensors = read(layer, input_ndim=len(self.shape)).tensors
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            if name not in tensors:
                continue
            plain = torch.full_like(tensors[name], value, requires_grad=False)
            if parametrize.is_parametrized(layer, name):
                lists: Any = layer.parametrizations
                lists[name][-1] = _Constant(plain)
            else:
                tensors[name].data = plain
        return layer

    def _evidence(self, claim: str, given: Any, **rest: Any) -> Evidence:
        words = f"{self.reading.type_name}: {self.spec}"
        return Evidence(
            topic=self.topic, claim=claim, input=given, convention=words, eps=self.spec.eps, **rest
        )


def example_shape(module: nn.Module) -> tuple[int, ...]:
    """A small input shape that the layer takes."""
    spec = read(module).spec
    features = _features(module)
    if spec.pattern.left[0] == ("...",):
        return (3, *features)
    rank = spec.ndim[0] if spec.ndim else 3 if spec.sizes else 2
    rank = max(rank, 3) if isinstance(module, nn.SyncBatchNorm) else rank
    return (8 if rank == 2 else 4, *features, 3, 2, 2)[:rank]


def _features(module: nn.Module) -> tuple[int, ...]:
    for name in ("weight", "running_mean"):
        value = getattr(module, name, None)
        if value is not None:
            return tuple(value.shape)
    shape: Any = getattr(module, "normalized_shape", None)
    if shape is not None:
        return tuple(shape)
    count: Any = getattr(module, "num_channels", None) or getattr(module, "num_features", 0)
    return (int(count) or 3,)


class _Constant(nn.Module):
    """A parametrization that gives one tensor, whatever lies under it."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, *originals: torch.Tensor) -> torch.Tensor:
        return self.value


def _state(reading: Reading) -> RunningState | None:
    tensors = reading.tensors
    if "running_mean" not in tensors:
        return None
    batches = int(tensors["num_batches_tracked"]) if "num_batches_tracked" in tensors else 0
    return RunningState(numpy(tensors["running_mean"]).copy(), numpy(tensors["running_var"]).copy(), batches)


def _rule(spec: NormSpec) -> str:
    momentum = spec.running.momentum if spec.running else None
    return "to the mean of all batches" if momentum is None else f"by {momentum:g} of the way to the batch"


def _word(train: bool) -> str:
    return "train" if train else "eval"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
