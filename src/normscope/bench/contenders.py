"""Who runs against whom: PyTorch eager, PyTorch compiled, this package, and a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from normscope.bench.memory import saved_bytes
from normscope.bench.operations import Case, Tensors
from normscope.bench.timing import COPY
from normscope.errors import told

EAGER, COMPILED, OURS = "eager", "compiled", "ours"
Function = Callable[..., Any]


@dataclass
class Compiler:
    """torch.compile, until its first compilation fails: then there is no compiler here, and none is tried again."""

    wanted: bool = True
    failure: str = ""
    worked: bool = field(default=False, init=False)

    @property
    def usable(self) -> bool:
        return self.wanted and (self.worked or not self.failure)

    def compiled(self, function: Function) -> Function:
        torch.compiler.reset()  # each shape is compiled for itself, and what earlier ones hold is let go

        def target(*arguments: Any) -> Any:
            return function(*arguments)

        compiled: Function = torch.compile(target, dynamic=False)
        return compiled

    def failed(self, error: Exception) -> None:
        self.failure = self.failure or told(error)


@dataclass(frozen=True)
class Runs:
    """The calls to time; ``failures`` says of a contender that is missing why."""

    forward: dict[str, Callable[[], object]]
    with_backward: dict[str, Callable[[], object]]
    failures: dict[str, str]
    saved: dict[str, int]
    difference: float | None
    """of ours to eager, in outputs and gradients: largest error divided by largest value"""


def runs(case: Case, compiler: Compiler) -> Runs:
    """All contenders that can run the case, each called once."""
    functions: dict[str, Function] = {EAGER: case.op.eager}
    failures: dict[str, str] = {}
    try:
        functions[OURS] = case.op.ours
    except Exception as error:
        failures[OURS] = told(error)
    if compiler.usable:
        functions[COMPILED] = compiler.compiled(case.op.eager)
    tensors = case.tensors()
    found = Runs({}, {}, failures, {}, None)
    results: dict[str, list[Tensor]] = {}
    for name, function in functions.items():
        try:
            inference, training = _forward(case, tensors, function), _with_backward(case, tensors, function)
            with torch.no_grad():
                inference()
            results[name] = training()
            if name != COMPILED:  # a compiled one is one graph: what it keeps is not seen by hooks
                found.saved[name] = _saved(case, tensors, function)
        except Exception as error:
            failures[name] = told(error)
            if name == COMPILED:
                compiler.failed(error)
            continue
        compiler.worked |= name == COMPILED
        found.forward[name], found.with_backward[name] = inference, training
    copy = _copy(tensors)
    found.forward[COPY] = found.with_backward[COPY] = copy
    if EAGER in results and OURS in results:
        difference = max(map(_difference, results[OURS], results[EAGER]))
        return Runs(found.forward, found.with_backward, failures, found.saved, difference)
    return found


def _forward(case: Case, tensors: Tensors, function: Function) -> Callable[[], object]:
    """To be called without grad mode, on an input that does not ask for gradients either."""
    x, residual = tensors.x.detach(), tensors.residual.detach()
    arguments = case.op.arguments(replace(tensors, x=x, residual=residual))
    return lambda: function(*arguments)


def _with_backward(case: Case, tensors: Tensors, function: Function) -> Callable[[], list[Tensor]]:
    """Forward and backward, from given gradients of all outputs to all inputs."""
    inputs = [getattr(tensors, name) for name in case.op.inputs]
    arguments = case.op.arguments(tensors)
    gradients = tensors.gradients

    def step() -> list[Tensor]:
        outputs = function(*arguments)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        return [*outputs, *torch.autograd.grad(outputs, inputs, gradients)]

    return step


def _copy(tensors: Tensors) -> Callable[[], object]:
    source = tensors.x.detach()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _saved(case: Case, tensors: Tensors, function: Function) -> int:
    alive = [tensors.weight, tensors.bias, *tensors.state]
    return saved_bytes(lambda: function(*case.op.arguments(tensors)), alive)


def _difference(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach(), wanted.detach()
    scale = wanted.abs().max().double()
    error = (got - wanted).abs().max().double()
    return float(error / scale) if scale > 0 else float(error)
