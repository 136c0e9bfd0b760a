"""A torch module as a function on arrays: every call starts from the same tensors and the same random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from normscope.errors import BadInput, ModelError, told
from normscope.identify.box import is_shape
from normscope.identify.by_itself import AsksOtherRanks, by_itself
from normscope.identify.float64_copy import Float32AsFloat64, copied, plain_tensors
from normscope.identify.hooks_that_act import with_hooks_that_act
from normscope.identify.owners_hooks import copy_of
from normscope.identify.patched_forward import uncompiled
from normscope.identify.probing import said_size

Array = NDArray[np.float64]
SEED = 0
REPARAMETRIZED = ("_orig", "_g")
"""what torch adds to the name of a parameter of which its hooks make the tensor of that name before each call: pruning
and spectral norm, weight norm"""


@dataclass(frozen=True)
class Call:
    """How the module is called: the place of the one array that is varied, and what else is passed."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | str

    @property
    def example(self) -> torch.Tensor:
        value = self.args[self.place] if isinstance(self.place, int) else self.kwargs[self.place]
        assert isinstance(value, torch.Tensor)
        return value

    def with_input(self, x: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self.place, int):
            return (*self.args[: self.place], x, *self.args[self.place + 1 :]), self.kwargs
        return self.args, {**self.kwargs, self.place: x}


def call_of(example: Any) -> Call:
    """Read an example: an array, a tensor or a shape, a tuple of arguments or a dict of keywords.

    The first floating tensor of at least one axis is varied, all else is passed as it is.

    Raises:
        BadInput: where there is none, or an empty one.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example, Mapping):
        kwargs = {str(name): _tensor(value) for name, value in example.items()}
    elif is_shape(example):
        if min(example, default=1) < 0:
            raise BadInput(
                f"a shape has no negative sizes; got {tuple(example)}. Pass the sizes of one input"
            )
        args = (torch.zeros(tuple(example), dtype=torch.float64),)
    else:
        args = tuple(_tensor(value) for value in (example if isinstance(example, tuple) else (example,)))
    passed: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in passed:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim:
            if not value.numel():
                raise BadInput(
                    f"an example shows the shape of an input with elements; got {tuple(value.shape)}. Pass at least "
                    "one sample"
                )
            return Call(args, kwargs, place)
    came = ", ".join(
        str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__ for _, value in passed
    )
    raise BadInput(
        f"an example holds one floating array to vary; got {came or 'nothing'}. Pass a tensor like those that the "
        "module normalizes"
    )


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise BadInput(
                f"an example is an array of numbers; got one of {value.dtype}. Pass it as float32 or float64"
            )
        value = torch.from_numpy(value.copy())
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Outcome:
    """What one call gave: its output, and the tensors of the module afterwards."""

    output: Array
    tensors: dict[str, Array]


@dataclass(frozen=True)
class ModuleBox:
    """One function on float64 arrays. `settings` stand in for the module's own tensors.

    Each call runs in a fork of the module, which owns everything that the call may write.
    """

    module: nn.Module
    """a copy that is ours"""
    call: Call
    name: str
    dtype: torch.dtype = torch.float64
    roundoff: float = 2.0**-53
    redirect: bool = True
    """casts to float32 inside give float64"""
    settings: Mapping[str, Array] = field(default_factory=dict)
    seed: int = SEED
    note: str = ""
    """what became of its owner's hooks"""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.call.example.shape)

    def __call__(self, x: Array) -> Array:
        return self.output_of(self.fork(), x)

    def set(self, settings: Mapping[str, Array]) -> ModuleBox:
        """The same function with other values in some tensors."""
        return replace(self, settings={**self.settings, **settings})

    def run(self, x: Array) -> Outcome:
        """One call.

        Raises:
            ModelError: what the module raises is its cause.
        """
        return self.run_on(self.fork(), x)

    def run_on(self, fork: nn.Module, x: Array) -> Outcome:
        """One call of a fork, which keeps what the call writes into it."""
        y = self.output_of(fork, x)
        return Outcome(y, {name: as_array(tensor) for name, tensor in tensors_of(fork).items()})

    def output_of(self, fork: nn.Module, x: Array) -> Array:
        """The output of one call of a fork."""
        with torch.no_grad():
            y = self.apply(fork, torch.from_numpy(np.array(x, dtype=np.float64)).to(self.dtype))
        return as_array(y)

    def tensors(self) -> dict[str, Array]:
        """The module's own floating tensors."""
        return {n: as_array(t) for n, t in tensors_of(self.module).items() if t.is_floating_point()}

    def moved(self, x: Array) -> tuple[Array, tuple[str, ...]]:
        """The output, and the names of the tensors that the call changed."""
        fork = self.fork()
        before = {name: as_array(tensor) for name, tensor in tensors_of(fork).items()}
        outcome = self.run_on(fork, x)
        names = tuple(
            n for n, value in outcome.tensors.items() if not np.array_equal(value, before[n], equal_nan=True)
        )
        return outcome.output, names

    def apply(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Call ``module`` on a tensor, with the random numbers of the seed; autograd as the caller has it."""
        args, kwargs = self.call.with_input(x)
        args = tuple(self._in_dtype(value) for value in args)
        kwargs = {name: self._in_dtype(value) for name, value in kwargs.items()}
        chance = torch.get_rng_state()
        torch.default_generator.manual_seed(self.seed)
        try:
            with by_itself(module), Float32AsFloat64() if self.redirect else nullcontext():
                result = module(*args, **kwargs)
        except AsksOtherRanks:
            raise
        except (Exception, SystemExit) as error:
            size, fix = said_size(as_array(x)), "Pass an example of a shape that it takes"
            if size:
                fix = (
                    "Identification calls it with small and with large inputs: pass a module that takes them"
                )
            raise ModelError(
                f"{self.name} raised on a {self.dtype} input of shape {tuple(x.shape)}{size} ({told(error)}). {fix}"
            ) from error
        finally:
            torch.set_rng_state(chance)
        result = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(result, torch.Tensor):
            raise ModelError(
                f"{self.name} returned a {type(result).__name__}; identification reads one tensor. Wrap it in a "
                "module that returns the normalized tensor"
            )
        if result.is_complex():
            raise ModelError(
                f"{self.name} returned a tensor of {result.dtype}; identification reads real numbers. Wrap it in a "
                "module that returns the real part, or the two parts stacked"
            )
        return result

    def _in_dtype(self, value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.dtype) if floats else value

    def fork(self) -> nn.Module:
        """A module that shares nothing with this one: a forward may write into its parameters too."""
        memo: dict[int, Any] = {}
        for name, tensor in tensors_of(self.module).items():
            if name in self.settings:
                # not in place: tensors that share the memory of this one are the module's own affair
                value = torch.from_numpy(np.array(self.settings[name])).to(tensor.dtype).reshape(tensor.shape)
                parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(value, requires_grad=False) if parameter else value
        return copy_of(self.module, memo, owners=True)

    def with_shape(self, shape: tuple[int, ...]) -> ModuleBox:
        """The same with an example of another shape."""
        args, kwargs = self.call.with_input(torch.zeros(shape, dtype=self.dtype))
        return replace(self, call=replace(self.call, args=args, kwargs=kwargs))

    def in_mode(self, training: bool) -> ModuleBox:
        """The same after ``.train()`` or ``.eval()``, as the module itself defines them."""
        module = self.fork()
        return replace(self, module=module.train(training))


def box_of_module(module: nn.Module, call: Call, dtype: torch.dtype = torch.float64) -> ModuleBox:
    """A box of a copy of ``module`` in ``dtype``, in the mode that the module is in, with its owner's forward hooks
    where they act on the output.

    Raises:
        BadInput: where it cannot be copied, or whether its hooks act cannot be told.
    """
    double = dtype is torch.float64
    roundoff = 2.0**-53 if double else torch.finfo(dtype).eps / 2
    name = type(uncompiled(module)).__name__
    plain = ModuleBox(copied(module, dtype), call, name, dtype, roundoff, redirect=double)
    return with_hooks_that_act(plain, module)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and other tensors that a module holds, by path; one that is held twice once."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters())
    found |= dict(module.named_buffers())
    paths = {id(part): path for path, part in module.named_modules()}
    for owner, name, tensor in plain_tensors(module):
        if any(f"{name}{end}" in owner._parameters for end in REPARAMETRIZED):
            continue
        path = paths[id(owner)]
        found[f"{path}.{name}" if path else name] = tensor
    return found


def as_array(tensor: torch.Tensor) -> Array:
    """The values of a tensor, as an array of its own."""
    values: Array = tensor.detach().to(torch.float64).numpy().copy()
    return values
