"""The operators ``normscope::*`` of PyTorch's dispatcher: schemas, kernels, shapes of results.

There are three sets that compute the same (under a mask, whose calls take longer, the first two):

- raw ones (`norm`, `norm_backward`, ...), whose recipe is six numbers, without gradient;
- `normalize`, `add_normalize`, `normalize_by` and `normalize_masked`, which have one, of `normscope.kernels.autograd`:
  `torch.compile` and `torch.export` put these into a program, which can be saved and trained further. A gradient
  registered with an operator costs each call tens of microseconds of Python, so nothing else uses them;
- `norm_packed`, ..., whose recipe is one tensor of six numbers: for calls that Python makes one by one, from
  `normscope.kernels.autograd`. PyTorch takes a third of a microsecond to hand over a number, as much as a small
  normalization takes, and a tensor costs no more than one number.

On the CPU the kernels are native: registered by the library itself through PyTorch's C interface (``native/shim.cpp``)
where this PyTorch is one that was tested and a first call gives what it should, else by ctypes. Everywhere else, and
without a native library, they are the formulas in plain torch, so that a saved program runs wherever Normscope is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from normscope.errors import told
from normscope.kernels import bridge, formulas, library
from normscope.kernels.formulas import DBIAS, DWEIGHT, DX, recipe_of, statistics_dtype

RECIPE = "int axes, int split, int options, float eps, float gain, float offset"
NORM = f"(Tensor x, Tensor? weight, Tensor? bias, {RECIPE}) -> (Tensor y, Tensor stats)"
ADD_NORM = (
    f"(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, {RECIPE}) "
    "-> (Tensor y, Tensor sum, Tensor stats)"
)
FIXED = f"(Tensor x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, {RECIPE}) -> Tensor y"
NORM_MASKED = f"(Tensor x, Tensor mask, Tensor? weight, Tensor? bias, {RECIPE}) -> (Tensor y, Tensor stats)"
GRADIENTS = "(Tensor dx, Tensor dweight, Tensor dbias)"

SCHEMAS = {
    "norm": NORM,
    "norm_backward": f"(Tensor dy, Tensor? dsum, Tensor x, Tensor stats, Tensor? weight, {RECIPE}, int want) "
    f"-> {GRADIENTS}",
    "add_norm": ADD_NORM,
    "fixed": FIXED,
    "fixed_backward": f"(Tensor dy, Tensor x, Tensor mean, Tensor var, Tensor? weight, {RECIPE}, int want) "
    f"-> {GRADIENTS}",
    "norm_out": f"(Tensor x, Tensor? weight, Tensor? bias, {RECIPE}, Tensor(a!) out) -> ()",
    "update_running": "(Tensor(a!) mean, Tensor(b!) var, Tensor stats, float momentum, float count, float correction) "
    "-> ()",
    "norm_masked": NORM_MASKED,
    "norm_masked_backward": "(Tensor dy, Tensor x, Tensor mask, Tensor stats, Tensor? weight, "
    f"{RECIPE}, int want) -> {GRADIENTS}",
    "moments": f"(Tensor x, Tensor? mask, {RECIPE}) -> Tensor stats",
    "norm_backward_by": f"(Tensor dy, Tensor x, Tensor stats, Tensor sums, Tensor? weight, {RECIPE}) -> Tensor dx",
    # with gradients
    "normalize": NORM,
    "add_normalize": ADD_NORM,
    "normalize_by": FIXED,
    "normalize_masked": NORM_MASKED,
}
SAME_AS = {
    "normalize": "norm",
    "add_normalize": "add_norm",
    "normalize_by": "fixed",
    "normalize_masked": "norm_masked",
}
"""operators with gradients, and the raw ones that compute the same"""

PACKED = {
    f"{name}_packed": SCHEMAS[name].replace(RECIPE, "Tensor recipe")
    for name in ("norm", "norm_backward", "norm_out", "add_norm", "fixed", "fixed_backward")
} | {"norm_only_packed": "(Tensor x, Tensor? weight, Tensor? bias, Tensor recipe) -> Tensor y"}

FRAGMENT: Any = torch.library.Library("normscope", "FRAGMENT")  # type: ignore[no-untyped-call]


def _register() -> str:
    """Defines all and gives them kernels; how they reach the native library."""
    for name, schema in SCHEMAS.items():
        FRAGMENT.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        FRAGMENT.impl(name, getattr(formulas, SAME_AS.get(name, name)), "CompositeExplicitAutograd")
        torch.library.register_fake(f"normscope::{name}", _FAKES[SAME_AS.get(name, name)], lib=FRAGMENT)
    for name, schema in PACKED.items():
        FRAGMENT.define(name + schema)
        FRAGMENT.impl(name, _unpacking(name, formulas), "CompositeExplicitAutograd")
    if library.LIBRARY is None:
        return "none"
    if _shim(library.LIBRARY):
        return "dispatcher shim"
    for name in SCHEMAS:
        FRAGMENT.impl(name, getattr(bridge, SAME_AS.get(name, name)), "CPU")
    for name in PACKED:
        FRAGMENT.impl(name, _unpacking(name, bridge), "CPU")
    return "ctypes"


def _unpacking(name: str, kernels: ModuleType) -> Callable[..., Any]:
    """The kernel of a packed operator, by the one that takes numbers."""
    if name == "norm_only_packed":
        norm = _unpacking("norm_packed", kernels)
        return lambda *arguments: norm(*arguments)[0]
    kernel = getattr(kernels, name.removesuffix("_packed"))
    at = PACKED[name].split(", ").index("Tensor recipe") if ", Tensor recipe," in PACKED[name] else -1

    def run(*arguments: Any) -> Any:
        codes = arguments[at].tolist()
        numbers = (*map(int, codes[:3]), *codes[3:])
        return kernel(*arguments[:at], *numbers, *(arguments[at + 1 :] if at >= 0 else ()))

    return run


def _shim(native: library.Library) -> bool:
    """Whether the library could register its operators, and their first answers are right."""
    register = getattr(native.functions, "ns_register", None)
    if register is None or register(torch.__version__.encode()) != 0:
        return False
    return not self_test()


def self_test() -> str:
    """What is wrong with the operators as they are registered, or "".

    Real tensors, also where the first import happens under fake ones.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    # group norm of two channels of three: a split axis, kept ones, parameters, and sums to differentiate
    codes = (0b0000_0010_0011_0001, 2 << 40 | 2, 1, 1e-5, 1.0, 0.0)
    with _disable_current_modes(), torch.no_grad():
        x = torch.arange(24.0, device="cpu").reshape(2, 6, 2).sin()
        weight = torch.arange(6.0, device="cpu")
        try:
            y, stats = torch.ops.normscope.norm(x, weight, None, *codes)
            found = [y, stats, *torch.ops.normscope.norm_backward(x.cos(), None, x, stats, weight, *codes, 7)]
        except RuntimeError as error:
            return told(error)
        y, stats = formulas.norm(x, weight, None, *codes)
        expected = [y, stats, *formulas.norm_backward(x.cos(), None, x, stats, weight, *codes, 7)]
        for a, b in zip(found, expected, strict=True):
            # numbers up to about 10 in float32, sums of at most 12 of them
            if a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=64 * 2.0**-23 * 10):
                return "a group norm differs from its formula"
    return ""


# Shapes of results --------------------------------------------------------------------------------------------------


def _statistics(x: Tensor, codes: tuple[float, ...], masked: bool = False) -> Tensor:
    recipe = recipe_of(codes)
    rows = (3 if recipe.center else 1) + masked
    return x.new_empty((rows, recipe.sets(x)), dtype=statistics_dtype(x.dtype))


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *codes: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _statistics(x, codes)


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *codes: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), _statistics(x, codes)


def _fixed(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, *codes: float
) -> Tensor:
    return torch.empty_like(x)


def _gradients(
    x: Tensor, weight: Tensor | None, codes: list[float], want: int
) -> tuple[Tensor, Tensor, Tensor]:
    parameters = recipe_of(codes).parameters(x)
    dtype = statistics_dtype(x.dtype) if weight is None else weight.dtype
    return (
        torch.empty_like(x) if want & DX else x.new_empty(0),
        x.new_empty(parameters if want & DWEIGHT else 0, dtype=dtype),
        x.new_empty(parameters if want & DBIAS else 0, dtype=dtype),
    )


def _norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, *codes_and_want: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *codes, want = codes_and_want
    return _gradients(x, weight, codes, want)


def _fixed_backward(
    dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, *codes_and_want: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *codes, want = codes_and_want
    return _gradients(x, weight, codes, want)


def _norm_masked(
    x: Tensor, mask: Tensor, weight: Tensor | None, bias: Tensor | None, *codes: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _statistics(x, codes, True)


def _norm_masked_backward(
    dy: Tensor, x: Tensor, mask: Tensor, stats: Tensor, weight: Tensor | None, *codes_and_want: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *codes, want = codes_and_want
    return _gradients(x, weight, codes, want)


def _moments(x: Tensor, mask: Tensor | None, *codes: float) -> Tensor:
    return _statistics(x, codes, mask is not None)


def _norm_backward_by(
    dy: Tensor, x: Tensor, stats: Tensor, sums: Tensor, weight: Tensor | None, *codes: float
) -> Tensor:
    return torch.empty_like(x)


def _nothing(*_: Any) -> None:
    return None


_FAKES: dict[str, Callable[..., Any]] = {
    "norm": _norm,
    "norm_backward": _norm_backward,
    "add_norm": _add_norm,
    "fixed": _fixed,
    "fixed_backward": _fixed_backward,
    "norm_masked": _norm_masked,
    "norm_masked_backward": _norm_masked_backward,
    "moments": _moments,
    "norm_backward_by": _norm_backward_by,
    "norm_out": _nothing,
    "update_running": _nothing,
}

library.registered = _register()


def raw(name: str) -> Callable[..., Any]:
    """An operator as what its overload calls: half a microsecond less a call."""
    overload = getattr(torch.ops.normscope, name).default
    direct: Callable[..., Any] = getattr(overload, "_op", overload)
    return direct


norm = raw("norm_packed")
norm_only = raw("norm_only_packed")
norm_backward = raw("norm_backward_packed")
norm_out = raw("norm_out_packed")
add_norm = raw("add_norm_packed")
fixed = raw("fixed_packed")
fixed_backward = raw("fixed_backward_packed")
update_running = raw("update_running")
norm_masked = raw("norm_masked")
norm_masked_backward = raw("norm_masked_backward")
moments = raw("moments")
norm_backward_by = raw("norm_backward_by")
