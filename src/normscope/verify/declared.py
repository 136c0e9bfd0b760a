"""A layer with the specification that its author declares: which tensors are its gain, bias and state, on which input.

A hand-written layer cannot be read; but what it is said to compute can be checked, once its parts are found.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from operator import attrgetter

import torch
from torch import nn

from normscope.errors import BadInput, told
from normscope.reading import Reading
from normscope.reading.base import qualified_name
from normscope.spec import NormSpec
from normscope.spec.pattern import ELLIPSIS, Group, PatternError, tokenize

NAMES = {
    "weight": ("weight", "gamma", "scale", "gain", "g", "w"),
    "bias": ("bias", "beta", "shift", "offset", "b"),
    "running_mean": ("running_mean", "moving_mean", "mean"),
    "running_var": ("running_var", "moving_var", "moving_variance", "var"),
}
SIZES = (3, 2)
"""of axes that nothing fixes, in turn"""
COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class Declaration:
    """What a layer is said to compute, where its tensors are, and an input shape that it takes."""

    spec: NormSpec
    places: dict[str, str]
    """attribute path of weight, bias, running_mean, running_var: of those that the specification names"""
    shape: tuple[int, ...]

    def read(self, module: nn.Module) -> Reading:
        """As `normscope.reading.read` would say it, of the layer or of a copy of it."""
        tensors = {role: attrgetter(path)(module) for role, path in self.places.items()}
        spec = self.spec
        if spec.running is not None:
            train, eval_ = "batch", "running"
        else:
            bound = spec.bind(self.shape)
            coupled = any(not axis.kept and axis.dim == bound.sample_dim for axis in bound.axes)
            train = eval_ = "batch" if coupled else "input"
        return Reading(
            spec,
            f"{qualified_name(type(module))}, declared",
            tensors,
            train if module.training else eval_,
            train,
            eval_,
            ("train",) if spec.running is not None else (),
        )


def declare(module: nn.Module, spec: NormSpec, shape: Sequence[int] | None = None) -> Declaration:
    """Find the tensors of the specification in the layer, and an input that it takes.

    A tensor is found by its name (`NAMES`), else by its shape where only one fits.

    Raises BadInput: what cannot be verified, a tensor that is missing, ambiguous, of the wrong shape, or left over.
    """
    name = qualified_name(type(module))
    if spec.whiten:
        raise BadInput(f"{name} is declared to whiten, and verify checks scalar denominators only: {spec}")
    if spec.source == "input":
        raise BadInput(
            f"{name} is declared to compute its gain and bias from a second input, and verify calls layer(x). "
            "Verify the normalization before them: a layer of one argument, declared without weight and bias"
        )
    if shape is not None and not all(isinstance(size, int) and size > 0 for size in shape):
        raise BadInput(f"the shape of an input of {name} is a tuple of positive integers; got {shape!r}")
    places = _places(module, spec, name)
    found = _example(module, spec, places, name) if shape is None else tuple(shape)
    try:
        bound = spec.bind(found)
    except PatternError as error:
        raise BadInput(f"the input shape of {name} does not fit its specification: {error}") from error
    if bound.sample_dim is not None and found[bound.sample_dim] < 2:
        raise BadInput(
            f"an input of two samples or more is needed to see companions; {name} has shape {found}"
        )
    wanted = {"weight": bound.weight_shape, "bias": bound.bias_shape}
    for role, path in places.items():
        tensor, expected = attrgetter(path)(module), wanted.get(role, bound.running_shape)
        if role != COUNTER and _bare(tensor.shape) != _bare(expected or ()):
            raise BadInput(
                f"{name}.{path} is the {role} and has shape {tuple(tensor.shape)}; on an input of shape {found} the "
                f"specification says {expected}: {spec}"
            )
    return Declaration(spec, places, found)


def _bare(shape: Sequence[int]) -> tuple[int, ...]:
    """Without axes of size 1: (1, C, 1, 1) is a vector of C that broadcasts."""
    return tuple(size for size in shape if size != 1)


# Its tensors ---------------------------------------------------------------------------------------------------------


def _axes(spec: NormSpec) -> dict[str, str]:
    """The tensors that a specification names, with the axes of each."""
    axes = {"weight": spec.weight, "bias": spec.bias}
    if spec.running is not None:
        axes |= dict.fromkeys(("running_mean", "running_var"), spec.running_axes)
    return {role: names for role, names in axes.items() if names is not None}


def _places(module: nn.Module, spec: NormSpec, name: str) -> dict[str, str]:
    axes = _axes(spec)
    places: dict[str, str] = {}
    for role, groups in axes.items():
        paths = (path for name in NAMES[role] for path in _named(module, name))
        path = next((p for p in paths if _fits(attrgetter(p)(module).shape, tokenize(groups))), None)
        if path is not None:
            places[role] = path
    parameters = dict(_own(module.named_parameters()))
    buffers = dict(_own(module.named_buffers()))
    for roles, tensors in ((("weight", "bias"), parameters), (tuple(NAMES)[2:], buffers)):
        missing = {role: tokenize(axes[role]) for role in roles if role in axes and role not in places}
        if missing:
            places |= _by_shape(missing, _unclaimed(module, places, tensors), spec, name)
    left_over = _unclaimed(module, places, parameters)
    if left_over:
        raise BadInput(
            f"{name} holds {_listed(left_over)}, which its specification does not name, so what it does is not "
            f"declared: {spec}. Say weight= or bias= with the axes that it lives on"
        )
    if spec.running is not None:
        places.update((COUNTER, path) for path in _named(module, COUNTER))
    return places


def _named(module: nn.Module, name: str) -> list[str]:
    """The layer's own attribute of that name, else the one that a part of it holds; none where several do."""
    if isinstance(getattr(module, name, None), torch.Tensor):
        return [name]
    holders = [
        path for path, part in module.named_modules() if isinstance(getattr(part, name, None), torch.Tensor)
    ]
    return [f"{path}.{name}" for path in holders] if len(holders) == 1 else []


def _own(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Without what lies under a parametrization: the attribute that it computes is found by name."""
    return ((path, tensor) for path, tensor in tensors if "parametrizations" not in path.split("."))


def _fits(shape: Sequence[int], groups: tuple[Group, ...]) -> bool:
    return len(shape) == len(groups) or len(_bare(shape)) == len(groups) or (math.prod(shape) == 1)


def _unclaimed(
    module: nn.Module, places: dict[str, str], tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Those that share no memory with a tensor that was found: a property may give a view."""
    taken = {attrgetter(path)(module).untyped_storage().data_ptr() for path in places.values()}
    return {
        path: tensor
        for path, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in taken
    }


def _by_shape(
    missing: dict[str, tuple[Group, ...]], tensors: dict[str, torch.Tensor], spec: NormSpec, name: str
) -> dict[str, str]:
    fitting = [
        dict(zip(missing, paths, strict=True))
        for paths in permutations(tensors, len(missing))
        if all(_fits(tensors[p].shape, groups) for p, groups in zip(paths, missing.values(), strict=True))
    ]
    if len(fitting) == 1:
        return fitting[0]
    roles = " and ".join(missing)
    wanted = " and ".join(" or ".join(NAMES[role][:4]) for role in missing)
    which = f"cannot be told from {_listed(tensors)}" if fitting else f"not found; it has {_listed(tensors)}"
    raise BadInput(
        f"{name}: {roles} of the specification {which}: {spec}. Call them {wanted}, or give the layer properties of "
        "those names"
    )


def _listed(tensors: dict[str, torch.Tensor]) -> str:
    return ", ".join(f"{path} {tuple(tensor.shape)}" for path, tensor in tensors.items()) or "none left"


# An input ------------------------------------------------------------------------------------------------------------


def _example(module: nn.Module, spec: NormSpec, places: dict[str, str], name: str) -> tuple[int, ...]:
    """The first small shape on which the layer gives an output of the same shape."""
    sizes = _sizes(module, spec, places)
    reasons = []
    layer = copy.deepcopy(module).cpu().double().train()
    for shape in _shapes(spec, sizes):
        try:
            with torch.no_grad():
                y = layer(torch.ones(shape, dtype=torch.float64))
        except Exception as error:  # the user's own forward
            reasons.append(f"{shape} raised {told(error)}")
            continue
        if isinstance(y, torch.Tensor) and y.shape == shape:
            return shape
        reasons.append(f"{shape} gave {tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__}")
    raise BadInput(
        f"{name} was tried on small inputs that fit {spec.stats!r} and gave no output of the same shape: "
        f"{'; '.join(reasons)}. Name a shape that it takes: (layer, spec, shape)"
    )


def _sizes(module: nn.Module, spec: NormSpec, places: dict[str, str]) -> dict[str, int]:
    """Sizes of axes, from the specification and the shapes of the tensors."""
    sizes = dict(spec.sizes)
    for role, names in _axes(spec).items():
        groups, shape = tokenize(names), tuple(attrgetter(places[role])(module).shape)
        shape = shape if len(shape) == len(groups) else _bare(shape)
        for group, size in zip(groups, shape, strict=False):
            unknown = [n for n in group if n not in sizes]
            known = math.prod(sizes[n] for n in group if n in sizes)
            if len(unknown) == 1 and size % known == 0:
                sizes[unknown[0]] = size // known
    return sizes


def _shapes(spec: NormSpec, sizes: dict[str, int]) -> Iterator[tuple[int, ...]]:
    pattern = spec.pattern
    least, most = pattern.min_ndim, pattern.min_ndim + (3 if pattern.has_ellipsis else 0)
    low, high = spec.ndim or (least, None)
    ranks = range(max(low, least), min(most if high is None else high, most) + 1)
    for rank in sorted(ranks, key=lambda rank: (rank == least, rank)):  # `...` without an axis comes last
        usual = {"b": 8 if rank == 2 else 4, "t": 2, "v": 2}
        shape: list[int] = []
        turn = 0
        for group in pattern.left:
            if group == (ELLIPSIS,):
                shape += (3, 2, 2)[: rank - least]
                continue
            size = 1
            for axis in group:
                size *= sizes.get(axis) or usual.get(axis) or SIZES[turn % len(SIZES)]
                turn += axis not in sizes and axis not in usual
            shape.append(size)
        yield tuple(shape)
