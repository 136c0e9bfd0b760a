"""Which tensors of an identified module are its weight, its bias and its stored statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from normscope.identify.tensor_roles import roles

if TYPE_CHECKING:
    from normscope.identify.module_box import ModuleBox
    from normscope.spec import BoundSpec, NormSpec

NAMES = {"gain": "weight", "bias": "bias", "mean": "running_mean", "nonlinear": "running_var"}


def tensor_paths(box: ModuleBox, spec: NormSpec) -> dict[str, str]:
    """Usual name -> path, of what one tensor alone is. ``box``: the module in evaluation, where stored statistics act.

    >>> import torch
    >>> from normscope.identify.module_box import box_of_module, call_of
    >>> norm = torch.nn.LayerNorm(4)
    >>> from normscope.reading import spec_of
    >>> tensor_paths(box_of_module(norm, call_of(torch.zeros(2, 4))), spec_of(norm))
    {'weight': 'weight', 'bias': 'bias'}
    """
    random = np.random.default_rng(4)
    shape = tuple(box.call.example.shape)
    found = roles(box, (random.standard_normal(shape), random.standard_normal(shape)))
    paths = {}
    for kind, name in NAMES.items():
        named = [role.name for role in found.values() if role.kind == kind]
        there = getattr(spec, name) is not None if name in ("weight", "bias") else spec.running is not None
        if len(named) == 1 and there:
            paths[name] = named[0]
    return paths


def value_shapes(bound: BoundSpec) -> dict[str, tuple[int, ...]]:
    """Usual name -> shape that the specification says, of everything that it holds."""
    shapes = {
        "weight": bound.weight_shape,
        "bias": bound.bias_shape,
        "running_mean": bound.running_shape,
        "running_var": bound.running_shape,
    }
    return {name: shape for name, shape in shapes.items() if shape is not None}
