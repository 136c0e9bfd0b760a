"""A site by itself: a float64 copy of its module, on inputs small enough to follow by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from normscope.doctor.identified import tensor_at
from normscope.errors import told

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Site
    from normscope.spec import NormSpec

SMALL, SAMPLES = 3, 4
"""sizes that axes of space and of samples are cut to"""
LARGEST = 1 << 20
"""elements of an input that is not cut"""


@dataclass(eq=False)
class Alone:
    site: Site
    spec: NormSpec | None
    module: nn.Module
    """a copy in float64, in the mode that training gives it"""
    shape: tuple[int, ...]
    """of the small input"""
    stored: bool
    """stored statistics normalize in training too"""
    state: Mapping[str, str] = field(default_factory=dict)
    """in evaluation: "running_mean" and "running_var" -> path of the tensor in the module"""

    @property
    def evaluating(self) -> bool:
        return bool(self.state)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The output, in float64. Buffers are written as copies, so the next call starts from the same state."""
        parts = list(self.module.modules())
        before = [dict(part._buffers) for part in parts]
        for part in parts:
            part._buffers.update({n: None if b is None else b.clone() for n, b in part._buffers.items()})
        try:
            out: torch.Tensor = self.module(x)
        finally:
            for part, buffers in zip(parts, before, strict=True):
                part._buffers.update(buffers)
        return out

    def store(self, mean: float, variance: float) -> None:
        """The stored statistics become those of input with this mean and this variance everywhere."""
        with torch.no_grad():
            for name, value in (("running_mean", mean), ("running_var", variance)):
                if name in self.state:
                    tensor_at(self.module, self.state[name]).fill_(value)

    def array(self, name: str) -> NDArray[np.float64] | None:
        return self.site.array(name)


def alone(site: Site, spec: NormSpec | None) -> Alone | str:
    """The site's module by itself, or why it does not run so.

    Args:
        site: a site that a forward has found.
        spec: what it is, where that is known.
    """
    if site.module is None or site.kind not in ("module", "hand-written"):
        return f"it is no module of its own ({site.kind})"
    if not site.calls:
        return "it was not called"
    try:
        module = copy.deepcopy(site.module).cpu().double()
    except (Exception, SystemExit) as error:
        return f"its module cannot be copied: {told(error)}"
    for part in module.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
        part._backward_hooks.clear()
    stored = site.mode_train in ("running", "frozen")
    module.train(not stored)
    call = site.calls[0]
    reason = ""
    for shape in dict.fromkeys((_small(call.shape, call.spec or spec), call.shape)):
        if int(np.prod(shape)) > LARGEST:
            continue
        found = Alone(site, spec, module, shape, stored)
        try:
            with torch.no_grad():
                out = found(
                    torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
                )
            if isinstance(out, torch.Tensor) and out.shape == shape:
                return found
            reason = "its output is not one tensor of its input's shape"
        except (Exception, SystemExit) as error:
            reason = f"it does not run alone: {told(error)}"
    return reason or f"its input of shape {call.shape} is too large"


def in_evaluation(found: Alone) -> Alone | str | None:
    """The same in evaluation, stored statistics settable; why that cannot be; None where none normalize there."""
    site = found.site
    if site.module is None or site.mode_eval not in ("running", "frozen"):
        return None
    state = {name: _path(site.module, site.tensors.get(name)) for name in ("running_mean", "running_var")}
    paths = {name: path for name, path in state.items() if path}
    if "running_var" not in paths:
        return "its stored variance is under no name that is known"
    return replace(found, module=copy.deepcopy(found.module).eval(), state=paths)


def _path(module: nn.Module, tensor: torch.Tensor | None) -> str:
    """Where in the module this very tensor is; "" where it is not."""
    for path, part in module.named_modules():
        for name, held in (*part._buffers.items(), *part._parameters.items(), *vars(part).items()):
            if held is not None and held is tensor:
                return f"{path}.{name}" if path else name
    return ""


def _small(shape: tuple[int, ...], spec: NormSpec | None) -> tuple[int, ...]:
    """The shape with few samples and little space; axes that have a name of their own stay."""
    sizes = list(shape)
    if spec is None:
        return (min(sizes[0], SAMPLES), *sizes[1:]) if sizes else shape
    bound = spec.bind(shape)
    parts = [axis.dim for axis in bound.axes]
    held = (spec.weight or "").split()
    for axis in bound.axes:
        if parts.count(axis.dim) > 1:
            continue
        if axis.dim == bound.sample_dim:
            sizes[axis.dim] = min(axis.size, SAMPLES)
        elif axis.name.startswith("...") and "..." not in held:
            sizes[axis.dim] = min(axis.size, SMALL)
    return tuple(sizes)
