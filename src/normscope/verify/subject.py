"""One layer under the protocol: its float64 copy, specification and input shape, and runs that leave it alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from normscope import reference
from normscope.reading import Reading, read
from normscope.spec import NormSpec, RunningState
from normscope.verify.bounds import Magnitudes, magnitudes
from normscope.verify.declared import Declaration
from normscope.verify.evidence import Evidence
from normscope.verify.float64 import ULP, Array, normal, numpy


class Subject:
    """A layer, read or declared, with what its checks share."""

    def __init__(self, module: nn.Module, topic: str, declaration: Declaration | None = None) -> None:
        self.topic = topic
        self.declaration = declaration
        self.original = copy.deepcopy(module).cpu()
        self.layer = copy.deepcopy(self.original).double()
        self.shape = example_shape(self.layer) if declaration is None else declaration.shape
        self.reading = self.read(self.layer)
        self.spec: NormSpec = self.reading.spec
        compute = self.spec.cast.compute
        low = compute not in (None, "input", "float64")
        self.unit = torch.finfo(getattr(torch, compute)).eps if low and compute else ULP
        self.eps = self.unit if self.spec.eps is None else self.spec.eps
        self.bound = self.spec.bind(self.shape)

    def read(self, layer: nn.Module) -> Reading:
        if self.declaration is not None:
            return self.declaration.read(layer)
        return read(layer, input_ndim=len(self.shape))

    def x(self) -> torch.Tensor:
        return 2 + normal(*self.shape, seed=0)

    @property
    def input(self) -> str:
        return f"shape {self.shape}, 2 + standard normal, seed 0"

    def mode(self, train: bool) -> str:
        return self.reading.mode_train if train else self.reading.mode_eval

    def run(self, layer: nn.Module, x: torch.Tensor, train: bool, *, copied: bool = True) -> Array:
        layer = copy.deepcopy(layer) if copied else layer
        with torch.no_grad():
            return numpy(layer.train(train)(x))

    def affine(self, layer: nn.Module | None = None) -> tuple[Array | None, Array | None]:
        """Weight and bias as the specification shapes them: (1, C, 1, 1) in the layer may be (C,)."""
        tensors = self.read(layer or self.layer).tensors
        weight, bias = (
            numpy(tensors[name]).reshape(shape) if name in tensors and shape is not None else None
            for name, shape in (("weight", self.bound.weight_shape), ("bias", self.bound.bias_shape))
        )
        return weight, bias

    def state_of(self, layer: nn.Module) -> RunningState | None:
        tensors, shape = self.read(layer).tensors, self.bound.running_shape
        if "running_mean" not in tensors or shape is None:
            return None
        mean, var = (numpy(tensors[name]).reshape(shape).copy() for name in ("running_mean", "running_var"))
        return RunningState(mean, var, int(tensors.get("num_batches_tracked", 0)))

    def by(self, train: bool, layer: nn.Module | None = None) -> dict[str, Any]:
        """The statistics that the reference normalizes by."""
        running = self.state_of(layer or self.layer)
        return {"running": running, "training": self.mode(train) in ("batch", "input")}

    def expected(
        self, x: Array, train: bool, layer: nn.Module | None = None, spec: NormSpec | None = None
    ) -> Array:
        return reference.forward(x, spec or self.spec, *self.affine(layer), **self.by(train, layer))

    def magnitudes(
        self, x: torch.Tensor, train: bool, layer: nn.Module | None = None, spec: NormSpec | None = None
    ) -> Magnitudes:
        by = self.by(train, layer)
        return magnitudes(numpy(x), spec or self.spec, *self.affine(layer), **by)

    def within(self, y: Array, expected: Array, bound: Array, unit: float | None = None) -> dict[str, Any]:
        """The element that is furthest off, measured by the bound on it; 0 / 0 without eps is NaN on either side."""
        with np.errstate(all="ignore"):
            both = np.isnan(y) & np.isnan(expected)
            off = np.where(both, 0.0, np.abs(y - expected))
            share = np.where(both, -1.0, np.where(off == 0, 0.0, off / bound))
        worst = np.unravel_index(int(np.argmax(share)), off.shape)  # the first NaN, where there is one
        unit = unit or self.unit
        return {
            "measured": float(off[worst]),
            "tolerance": float(bound[worst]),
            "because": f"rounding by a unit of {unit:.3g}, in sums of {self.bound.set_size} terms or fewer and "
            "16 operations, of what this element is made of: gain, bias, (x - mean) / s and max|x| / s",
        }

    def with_plain_gain(self) -> nn.Module:
        """A copy that multiplies by 1 (and the specification's fixed gain) and adds 0."""
        tensors = self.reading.tensors
        plain = {"weight": 1 - self.spec.weight_offset, "bias": 0.0}
        return self._with({n: torch.full_like(tensors[n], v) for n, v in plain.items() if n in tensors})

    def with_random_tensors(self) -> nn.Module:
        """A copy with a gain, bias and state that hide nothing; a fresh layer's ones and zeros hide themselves."""
        values: dict[str, torch.Tensor] = {}
        for seed, name in enumerate(("weight", "bias", "running_mean", "running_var")):
            if name in self.reading.tensors:
                noise = normal(*self.reading.tensors[name].shape, seed=10 + seed)
                values[name] = 0.5 + noise.abs() if name == "running_var" else 0.5 + noise
        return self._with(values)

    def _with(self, values: dict[str, torch.Tensor]) -> nn.Module:
        layer = copy.deepcopy(self.layer)
        tensors = self.read(layer).tensors
        for name, value in values.items():
            holder, attribute = self._holder(layer, name)
            if parametrize.is_parametrized(holder, attribute):
                lists: Any = holder.parametrizations
                lists[attribute][-1] = _Constant(value.detach())
            else:
                with torch.no_grad():
                    tensors[name].copy_(value)
        return layer

    def _holder(self, layer: nn.Module, name: str) -> tuple[nn.Module, str]:
        """The module that holds a tensor of the reading, and its name there."""
        path = name if self.declaration is None else self.declaration.places[name]
        parent, _, attribute = path.rpartition(".")
        return layer.get_submodule(parent), attribute

    def evidence(self, claim: str, given: Any, **rest: Any) -> Evidence:
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
        if value is not None and value.dim():  # one scalar says nothing about the input
            return tuple(value.shape)
    shape: Any = getattr(module, "normalized_shape", None)
    if shape is not None:
        return tuple(shape)
    counts = (getattr(module, name, None) for name in ("num_channels", "num_features", "features"))
    return (next((int(count) for count in counts if isinstance(count, int) and count), 3),)


class _Constant(nn.Module):
    """A parametrization that gives one tensor, whatever lies under it."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, *originals: torch.Tensor) -> torch.Tensor:
        return self.value
