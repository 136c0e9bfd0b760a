"""Reader for the RMS norms that the models of transformers write by hand, under a hundred class names.

A name says nothing: ``HYV4UnweightedRMSNorm`` returns only the factor, ``MuseSparkTextInputScaledRMSNorm`` weights its
input, ``Kosmos2_5LayerNorm`` centers nothing. So a class of ``transformers.models`` shaped like a hand-written
norm (one vector or none, an eps, no children) is run on a small probe, as a stand-in that shares nothing with the
user's module, and is one of the conventions below where its output is: in float32 up to the order of roundings, in
bfloat16 and float16 and in mixtures bit for bit. Otherwise the error says where the closest convention differs.

With r = 1 / sqrt(mean(x^2) + eps) in float32:

- ``llama``: w * cast(x * r), the cast to the dtype of x before the weight (LlamaRMSNorm, MistralRMSNorm, ...)
- ``t5``: the same with the cast to the dtype of w where that is a half type, and none otherwise (T5LayerNorm, ...)
- ``gemma``: cast(x * r * (1 + w)) (GemmaRMSNorm, Gemma2RMSNorm, Gemma3RMSNorm, Qwen3NextRMSNorm, ...)
- ``before``: cast(x * r * w) (Olmo2RMSNorm, GptOssRMSNorm, Gemma4RMSNorm, ...)
- ``plain``: cast(x * r), no weight (NanoChatRMSNorm, Gemma4RMSNorm without scale, ...)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from normscope.errors import told
from normscope.reading.base import Reader, Reading, UnknownNormalization, qualified_name
from normscope.reading.by_class import put_on
from normscope.spec import Cast, families

if TYPE_CHECKING:
    from torch import Tensor, nn

    from normscope.spec import NormSpec

HOME = "transformers.models."
EPS_NAMES = ("variance_epsilon", "eps")
PLAIN = (bool, int, float, str, type(None))
ROWS, LEAST_VALUES = 6, 256
"""of a probe: enough values that two conventions which round in another order differ in many of them"""


@dataclass(frozen=True)
class Convention:
    """One way to write an RMS norm: its formula in plain PyTorch, and its specification."""

    name: str
    formula: Callable[[Tensor, Tensor | None, float], Tensor]
    spec: Callable[[float], NormSpec]
    weighted: bool = True


@dataclass(frozen=True)
class Written:
    """What one hand-written norm follows."""

    convention: Convention
    eps: float


def _read(obj: Any, input_ndim: int | None) -> Reading | None:
    found = identified(obj)
    if found is None:
        return None
    if input_ndim == 0:
        raise ValueError(f"{qualified_name(type(obj))} takes an input of at least 1 axis, input_ndim is 0.")
    tensors = {"weight": obj.weight} if found.convention.weighted else {}
    return Reading(found.convention.spec(found.eps), qualified_name(type(obj)), tensors)


def identified(obj: Any) -> Written | None:
    """The convention of a hand-written norm of transformers; None where the object does not have the shape of one.

    Raises UnknownNormalization where it has the shape and computes something else.
    """
    shape = _shape(obj)
    if shape is None:
        return None
    home, eps = shape
    name = qualified_name(type(obj))
    overridden = put_on(obj, ("_call_impl", *_methods(home))) or _overridden(type(obj), home)
    if overridden:
        raise UnknownNormalization(
            f"{name} is {qualified_name(home)} with another {overridden}, so it may compute something else. Say what "
            "it computes with normscope.NormSpec(...)."
        )
    others = list(inspect.signature(vars(home)["forward"]).parameters)[2:]
    if others:
        raise UnknownNormalization(
            f"{name} takes {', '.join(others)} beside its input, so it is more than a norm. Say what it computes with "
            "normscope.NormSpec(...)."
        )
    weight = getattr(obj, "weight", None)
    size = None if weight is None else int(weight.shape[0])
    settings = {
        k: v for k, v in vars(obj).items() if k[0] != "_" and k != "training" and isinstance(v, PLAIN)
    }
    code = tuple(vars(home).get(method) for method in _methods(home))
    found = _probed(home, code, tuple(sorted(settings.items())), size, eps)
    if isinstance(found, str):
        raise UnknownNormalization(
            f"{name} has the shape of a hand-written RMS norm, but is none of the known conventions: {found}. Say what "
            "it computes with normscope.NormSpec(...)."
        )
    return Written(found, eps)


def _shape(obj: Any) -> tuple[type, float] | None:
    """The class in transformers that an object's forward comes from, and its eps, if it could be a norm at all."""
    from torch import nn

    if not isinstance(obj, nn.Module):
        return None
    homes = [cls for cls in type(obj).__mro__ if cls.__module__.startswith(HOME)]
    if not homes:
        return None
    home: type = homes[0]
    if getattr(sys.modules.get(home.__module__), home.__qualname__, None) is not home:
        return None
    given = (vars(obj).get(name) for name in EPS_NAMES)
    eps = next((float(value) for value in given if isinstance(value, (int, float))), None)
    if eps is None or home.__bases__ != (nn.Module,) or "forward" not in vars(home):
        return None
    if obj._buffers or set(obj._modules) - {"parametrizations"} or set(obj._parameters) - {"weight"}:
        return None
    weight = getattr(obj, "weight", None)
    return (home, eps) if weight is None or weight.ndim == 1 else None


def _overridden(cls: type, home: type) -> str:
    """A method that a subclass has made its own; parametrizations only turn tensors into properties."""
    names = {"__call__", "_call_impl", *_methods(home)}
    return next((n for n in sorted(names) if getattr(cls, n, None) is not getattr(home, n, None)), "")


def _methods(home: type) -> list[str]:
    return sorted(name for name, value in vars(home).items() if callable(value) and name != "__init__")


@lru_cache(maxsize=4096)
def _probed(
    home: type, code: tuple[Any, ...], settings: tuple[tuple[str, Any], ...], size: int | None, eps: float
) -> Convention | str:
    """The convention that a class follows with these settings, or where the closest one differs.

    ``code`` holds the methods: a class that is patched later is probed anew.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    candidates = [c for c in _conventions() if c.weighted == (size is not None)]
    most, closest = -1, ""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
    ):
        probes = _probes(size, eps)
        try:
            outputs = [_stand_in(home, settings, w).train(flag)(x.clone()) for x, w, flag in probes]
        except Exception as error:
            return f"its forward fails on one input ({told(error)})"
        for convention in candidates:
            expected = [convention.formula(x, w, eps) for x, w, _ in probes]
            differences = [_difference(one, other) for one, other in zip(outputs, expected, strict=True)]
            first = next((i for i, difference in enumerate(differences) if difference), None)
            if first is None:
                return convention
            if first > most:
                x, w, _ = probes[first]
                most, closest = (
                    first,
                    f"from {convention.name} it differs {_where(x, w)}: {differences[first]}",
                )
    return closest


def _probes(size: int | None, eps: float) -> list[tuple[Tensor, Tensor | None, bool]]:
    """Inputs (2, 6 or more, size) with rows that eps dominates, of a common size, large, and far from zero; a weight;
    and the training flag, on which nothing may depend."""
    import torch

    generator = torch.Generator().manual_seed(0)
    width = size or 16
    rows = max(ROWS, -(-LEAST_VALUES // width))
    x = torch.randn(2, rows, width, generator=generator, device="cpu", dtype=torch.float32)
    scale = torch.tensor([1.0, eps**0.5, 30.0], device="cpu").repeat(rows)[:rows, None]
    x = x * scale
    x[1] += 3
    w = torch.randn(width, generator=generator, device="cpu", dtype=torch.float32)
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    pairs = ((f32, f32), (bf16, bf16), (f16, f16), (bf16, f32), (f32, bf16))
    if size is None:
        return [(x.to(dtype), None, flag) for dtype in (f32, bf16, f16) for flag in (True, False)]
    return [(x.to(one), w.to(other), flag) for one, other in pairs for flag in (True, False)]


def _stand_in(home: Any, settings: tuple[tuple[str, Any], ...], weight: Tensor | None) -> nn.Module:
    """A module of the class with the same numbers and a weight of its own."""
    from torch import nn

    made: nn.Module = home.__new__(home)
    nn.Module.__init__(made)
    for name, value in settings:
        made.__dict__[name] = value
    if weight is not None:
        made.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return made


def _difference(got: Any, expected: Tensor) -> str:
    """How an output is not the expected one; "" where it is.

    In float32 sixteen units: a product of three factors and a square root that may be taken in another way. A half
    type rounds the float32 result, so such a unit shows in one of several thousand values; one in a hundred may.
    """
    import torch

    if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
        return f"it returns {f'shape {tuple(got.shape)}' if isinstance(got, torch.Tensor) else type(got).__name__}"
    if got.dtype != expected.dtype:
        return f"it returns {got.dtype}, not {expected.dtype}"
    unit = torch.finfo(expected.dtype).eps
    same = (got == expected) | (got.isnan() & expected.isnan())  # rows of zeros under an eps of 0
    off = torch.where(same, 0.0, (got.double() - expected.double()).abs())
    limit = 16 * unit * expected.double().abs()
    if expected.dtype == torch.float32:
        if bool((same | (off <= limit)).all()):
            return ""
        return f"by {float(off.max()):.3g} at outputs up to {float(expected.abs().max()):.3g}"
    share = float((off > 0).double().mean())
    if share <= 0.01 and bool((same | (off <= limit)).all()):
        return ""
    return f"in {share:.0%} of the values, by up to {float(off.max()):.3g}"


def _where(x: Tensor, weight: Tensor | None) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    if weight is None or weight.dtype == x.dtype:
        return f"in {dtype}"
    return f"for {dtype} input with a {str(weight.dtype).removeprefix('torch.')} weight"


def _normalized(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _llama(x: Tensor, weight: Any, eps: float) -> Tensor:
    result: Tensor = weight * _normalized(x, eps).to(x.dtype)
    return result


def _t5(x: Tensor, weight: Any, eps: float) -> Tensor:
    normalized = _normalized(x, eps)
    result: Tensor = weight * (normalized.to(weight.dtype) if weight.dtype.itemsize == 2 else normalized)
    return result


def _gemma(x: Tensor, weight: Any, eps: float) -> Tensor:
    result: Tensor = (_normalized(x, eps) * (1 + weight.float())).to(x.dtype)
    return result


def _before(x: Tensor, weight: Any, eps: float) -> Tensor:
    result: Tensor = (_normalized(x, eps) * weight.float()).to(x.dtype)
    return result


def _plain(x: Tensor, weight: Any, eps: float) -> Tensor:
    return _normalized(x, eps).to(x.dtype)


def _conventions() -> tuple[Convention, ...]:
    cast = Cast(compute="float32", weight="before")
    return (
        Convention("llama", _llama, lambda eps: families.llama_rms_norm(eps=eps)),
        Convention("t5", _t5, lambda eps: families.t5_layer_norm(eps=eps)),
        Convention("gemma", _gemma, lambda eps: families.gemma_rms_norm(eps=eps)),
        Convention("before", _before, lambda eps: families.rms_norm(eps=eps, cast=cast)),
        Convention(
            "plain", _plain, lambda eps: families.rms_norm(eps=eps, weight=False, cast=cast), weighted=False
        ),
    )


READER = Reader(
    needs="transformers",
    knows=("hand-written RMS norms of transformers (the conventions of Llama, T5 and Gemma)",),
    read=_read,
)
