"""The normalization of a parameter rather than of what comes in: weight norm, weight standardization, however written.

Read are, by class: the parametrizations of ``torch.nn.utils.parametrizations`` and of normscope.nn, the older hooks of
``torch.nn.utils``, and the convolutions of timm and transformers that standardize their weight in the forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from normscope.reading.base import UnknownNormalization, qualified_name
from normscope.reading.by_class import has_put_on, home_of, put_on, refuse_other_methods
from normscope.spec import NormSpec, families

if TYPE_CHECKING:
    from torch import nn

TIMM = "timm.layers.std_conv"
BIT = "transformers.models.bit.modeling_bit"
STANDARD = ("StdConv2d", "StdConv2dSame")
SCALED = ("ScaledStdConv2d", "ScaledStdConv2dSame")


def parameter_spec(module: Any, name: str) -> NormSpec:
    """The specification by which ``module`` normalizes its parameter ``name``, on the axes of that parameter.

    Raises UnknownNormalization where nothing normalizes it, more than one thing is done to it, or what does is outside
    the family, as spectral norm.

    >>> from torch import nn
    >>> print(parameter_spec(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), "weight"))
    o i ... -> o; not centered; l2; eps 0.0 inside the root; weight o; no bias
    """
    from torch import nn

    if not isinstance(module, nn.Module):
        _refuse(module, name, "is no torch module")
    done = [*_parametrizations(module, name), *_hooks(module, name)]
    if len(done) > 1:
        kinds = ", ".join(type(one).__name__ for one in done)
        _refuse(module, name, f"has {kinds} on it, one after the other. Ask each of them by itself")
    found = _by(done[0], module, name) if done else _in_forward(module, name)
    if found is None:
        kind = (
            f"{type(done[0]).__name__} on it, which is not known" if done else "nothing on it that is known"
        )
        _refuse(module, name, f"has {kind} to normalize")
    return found


def _parametrizations(module: nn.Module, name: str) -> list[Any]:
    from torch.nn.utils import parametrize

    if not parametrize.is_parametrized(module, name):
        return []
    return [*module.parametrizations[name]]  # type: ignore[index]


def _hooks(module: nn.Module, name: str) -> list[Any]:
    """The older ones, which compute the parameter before each forward."""
    hooks = module._forward_pre_hooks.values()
    return [
        hook
        for hook in hooks
        if type(hook).__module__.startswith("torch.nn.utils.") and getattr(hook, "name", None) == name
    ]


def _by(one: Any, module: nn.Module, name: str) -> NormSpec | None:
    kind = type(one).__name__
    if found := put_on(one, ("forward", "_call_impl", "compute_weight")):
        _refuse(module, name, f"is made by a {kind} that {has_put_on(found)}")
    if kind in ("WeightNorm", "_WeightNorm"):
        return _weight_norm(int(one.dim), getattr(module, name).dim())
    if kind in ("SpectralNorm", "_SpectralNorm"):
        _refuse(
            module,
            name,
            "is divided by its largest singular value, as power iterations find it: that is no mean square or sum of "
            "squares over any axes, so spectral norm is outside the family",
        )
    spec = getattr(one, "spec", None)
    return spec if isinstance(spec, NormSpec) else None


def _weight_norm(dim: int, ndim: int) -> NormSpec:
    """One set for each index of ``dim``; -1 is what torch makes of None: one of the whole parameter."""
    if dim == -1:
        return families.weight_norm().replace(stats="... ->", weight="")
    if dim == 0 and ndim > 1:
        return families.weight_norm()
    names = [f"i{axis}" for axis in range(ndim)]
    names[dim] = "o"
    return families.weight_norm().replace(stats=f"{' '.join(names)} -> o")


def _in_forward(module: nn.Module, name: str) -> NormSpec | None:
    home = home_of(module, TIMM, STANDARD) or home_of(module, BIT, ("WeightStandardizedConv2d",))
    scaled = home_of(module, TIMM, SCALED)
    cls = home or scaled
    if cls is None or name != "weight":
        return None
    refuse_other_methods(module, cls, ("forward", "_call_impl"))
    held: Any = module
    spec = families.biased_weight_standardization(eps=float(held.eps))
    return spec.replace(weight="o", gain=float(held.scale)) if scaled else spec


def _refuse(module: Any, name: str, why: str) -> NoReturn:
    raise UnknownNormalization(f"{qualified_name(type(module))}: the parameter {name!r} {why}.")
