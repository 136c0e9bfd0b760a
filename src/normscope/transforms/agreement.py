"""Do two models compute the same? Both run on one input, and beside them a copy in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from normscope.doctor.nested import detached, mapped
from normscope.doctor.session import Session
from normscope.doctor.wording import clean_path
from normscope.errors import ModelError, NormscopeError, told
from normscope.kernels import composite
from normscope.spec import Cast, NormSpec
from normscope.transforms.report import Agreement

MODES = {"eval": "eval", "train": "batch"}
"""name in the report -> mode of the session; in ``batch`` dropout is off, whose bits would differ between dtypes"""
ALLOWED = {torch.float64: 1e-10, torch.float32: 1e-5}
"""of the largest output: some eighty roundings of float32; float64 has room to spare"""
VACUOUS = 1e-2
"""of the largest output: where more is allowed, outputs that differ visibly pass; half types are allowed their units"""

Specs = Mapping[str, NormSpec | None]
"""of the changed modules, by path; a spec for those written by hand"""
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Deviation(NormscopeError):
    """A transform would have changed what the model computes, or whether it runs; nothing was changed.

    Attributes:
        site: path of the first module whose output deviates; None where the model fails and none can be named.
        agreement: the numbers; None where the model fails.
    """

    def __init__(self, text: str, site: str | None, agreement: Agreement | None = None) -> None:
        super().__init__(text)
        self.site = site
        self.agreement = agreement


def compare(
    before: nn.Module,
    after: nn.Module,
    specs: Specs,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    modes: Mapping[str, str] = MODES,
    half_units: int = 4,
) -> tuple[tuple[Agreement, ...], tuple[str, ...]]:
    """How far outputs of ``after`` are from those of ``before``, in each mode; and what could not be compared.

    ``half_units``: units in the last place that half types may differ by, of the largest output.

    Raises ModelError where ``before`` fails in eval mode, and Deviation, also where only ``after`` fails.
    """
    call = (args, kwargs)
    agreements: list[Agreement] = []
    notes: list[str] = []
    exact = _in_float64(before, specs, notes)
    exact_call: Call = mapped(call, lambda t: t.double() if t.is_floating_point() else t)
    for name, mode in modes.items():
        try:
            old = outputs(before, call, mode)
        except Exception as error:
            if name == "eval":
                raise ModelError(f"the model fails on the sample: {told(error)}") from error
            notes.append(f"{name}: the model does not run ({told(error)}), so nothing was compared")
            continue
        if not old:
            notes.append(f"{name}: the model returns no floating point tensor, so nothing was compared")
            continue
        try:
            new = outputs(after, call, mode)
        except Exception as error:
            raise _failure(name, error, _suspect((before, after), call, mode, specs)) from error
        truth = _true_outputs(exact, exact_call, mode, old, name, notes)
        dtype = _dtype(before, old)
        usual = _usual(dtype, half_units)
        agreement = _agreement(name, dtype, usual, old, new, truth)
        if not agreement.deviation <= agreement.allowed:
            models = (before, after, None if truth is None else exact)
            raise _deviation(agreement, first(models, (call, exact_call), mode, specs, agreement.allowed))
        agreements.append(agreement)
        notes += _reservations(agreement, usual, old)
    return tuple(agreements), tuple(notes)


def _usual(dtype: torch.dtype, half_units: int) -> float:
    """What two computations of the same may differ by, where the original amplifies nothing."""
    return ALLOWED.get(dtype, half_units * torch.finfo(dtype).eps)


def _reservations(agreement: Agreement, usual: float, outputs: list[Tensor]) -> list[str]:
    """Why an agreement says less than it seems to."""
    values = sum(t.numel() for t in outputs)
    infinite = values - sum(int(t.isfinite().sum()) for t in outputs)
    notes = []
    if not any(bool((t.isfinite() & (t != 0)).any()) for t in outputs):
        what = "not finite" if infinite == values else "zero or not finite" if infinite else "zero"
        notes.append(
            f"{agreement.mode}: cannot tell, every output of the original is {what if values else 'empty'}; give a "
            "sample and weights that come to something"
        )
    elif infinite:
        notes.append(f"{agreement.mode}: {infinite} of {values} output values are not finite and say little")
    # outputs that agree with each other as if nothing were amplified have been told to be the same after all
    if agreement.allowed > max(VACUOUS, usual) and agreement.difference > usual:
        notes.append(
            f"{agreement.mode}: cannot tell, the original itself is {agreement.error_before:.1e} of the largest "
            f"output away from float64, so anything within {agreement.allowed:.1e} passes; compare the model in "
            "float64, or on a sample of another scale"
        )
    return notes


def _agreement(
    mode: str,
    dtype: torch.dtype,
    allowed: float,
    old: list[Tensor],
    new: list[Tensor],
    truth: list[Tensor] | None,
) -> Agreement:
    word = str(dtype).removeprefix("torch.")
    if truth is None:
        return Agreement(mode, word, distance(new, old), allowed)
    error = distance(old, truth)
    return Agreement(mode, word, distance(new, old), max(allowed, 2 * error), error, distance(new, truth))


def outputs(model: nn.Module, call: Call, mode: str) -> list[Tensor]:
    """The floating point tensors that the model returns."""
    with Session(model) as session:
        output = session.forward(*call, mode=mode)
    return [t for t in detached(output) if t.is_floating_point()]


def _true_outputs(
    exact: nn.Module | None, call: Call, mode: str, like: list[Tensor], name: str, notes: list[str]
) -> list[Tensor] | None:
    if exact is None:
        return None
    try:
        truth = outputs(exact, call, mode)
    except Exception as error:
        notes.append(f"{name}: no float64 reference, the copy in float64 does not run ({told(error)})")
        return None
    if [t.shape for t in truth] != [t.shape for t in like]:
        notes.append(f"{name}: no float64 reference, the copy in float64 returns other shapes")
        return None
    return truth


class _Exact(nn.Module):
    """What a hand-written norm computes, without its cast to float32."""

    exact_spec: NormSpec
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return composite.normalize(x, self.exact_spec, self.weight)


def _in_float64(model: nn.Module, specs: Specs, notes: list[str]) -> nn.Module | None:
    try:
        made = copy.deepcopy(model).double()
    except Exception as error:
        notes.append(f"no float64 reference, the model cannot be copied into float64 ({told(error)})")
        return None
    modules = dict(made.named_modules())
    for path, spec in specs.items():
        if spec is not None and "parametrizations" not in modules[path]._modules:
            modules[path].__dict__["exact_spec"] = spec.replace(cast=Cast())
            modules[path].__class__ = _Exact
    return made


def _dtype(model: nn.Module, outputs: list[Tensor]) -> torch.dtype:
    """The coarsest that takes part: half precision inside is not mended by a float32 output."""
    held = [t.dtype for t in (*outputs, *model.parameters()) if t.is_floating_point()]
    return max(held, key=lambda dtype: torch.finfo(dtype).eps)


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference of two tensors, in units of the largest finite value of the second; over all pairs."""
    if len(one) != len(other):
        return float("inf")
    return max(map(_apart, one, other), default=0.0)


def _apart(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    off = torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=float("inf"))
    scale = float(torch.where(other.isfinite(), other, 0.0).abs().max())
    return float(off.max()) / (scale or 1.0)


def _deviation(agreement: Agreement, site: str) -> Deviation:
    against = "the outputs before" if agreement.error_after is None else "a float64 copy of the model"
    site = clean_path(site)
    before = "" if agreement.error_before is None else f" ({agreement.error_before:.1e} before)"
    return Deviation(
        f"{site or 'the model itself'}: the first module whose output deviates. In {agreement.mode} the outputs would "
        f"be {agreement.deviation:.1e} of the largest away from {against}{before}, and {agreement.dtype} allows "
        f"{agreement.allowed:.1e}. Nothing was changed. Where the model amplifies roundings, compare it in float64; "
        "else please report this module, its settings and the scale of its input.",
        site,
        agreement,
    )


def _failure(mode: str, error: Exception, site: str | None) -> Deviation:
    site = None if site is None else clean_path(site)
    suspect = "" if site is None else f"{site or 'the model itself'}: the first suspect. "
    said = told(error).rstrip(".")
    return Deviation(
        f"{suspect}In {mode} the accelerated model fails where the original runs: {said}. Nothing was changed. "
        "Instance norm of normscope.nn keeps the memory format of its input, where torch's returns contiguous memory: "
        "a .view behind it may need to be .reshape",
        site,
    )


def _suspect(models: tuple[nn.Module, nn.Module], call: Call, mode: str, specs: Specs) -> str | None:
    """The first changed module that does not return, or returns another layout; else the last before the failure."""
    old, new = (_recorded(model, call, mode, specs) for model in models)
    for (_, one), (path, two) in zip(old, new, strict=False):
        if [_layout(t) for t in one] != [_layout(t) for t in two]:
            return path
    return new[-1][0] if new else None


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def first(
    models: tuple[nn.Module, nn.Module, nn.Module | None],
    calls: tuple[Call, Call],
    mode: str,
    specs: Specs,
    allowed: float,
) -> str:
    """The first changed module, in order of calls, whose output is off; where none alone is, the one furthest off."""
    before, after, exact = models
    old, new = (_recorded(model, calls[0], mode, specs) for model in (before, after))
    truth = old if exact is None else _recorded(exact, calls[1], mode, specs)
    worst = (-1.0, "")
    for (path, one), (_, two), (_, true) in zip(old, new, truth, strict=False):
        off = distance(two, true)
        if not off <= max(allowed, 2 * distance(one, true)):
            return path
        worst = max(worst, (off, path))
    return worst[1]


def _recorded(model: nn.Module, call: Call, mode: str, specs: Specs) -> list[tuple[str, list[Tensor]]]:
    """Outputs of the modules at some paths, in order of calls, as far as the model comes; a call that does not return
    has none."""
    calls: list[tuple[str, list[Tensor]]] = []
    running: list[str] = []

    @contextmanager
    def watching() -> Iterator[None]:
        modules = dict(model.named_modules())

        def entered(path: str) -> Any:
            return lambda module, args: running.append(path)

        def left(path: str) -> Any:
            def told_of(module: nn.Module, args: Any, output: Any) -> None:
                running.remove(path)
                calls.append((path, [t.clone() for t in detached(output)]))

            return told_of

        handles = [modules[path].register_forward_pre_hook(entered(path)) for path in specs]
        handles += [modules[path].register_forward_hook(left(path)) for path in specs]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    with Session(model) as session, suppress(Exception):
        session.forward(*call, mode=mode, watch=(watching(),))
    return calls + [(path, []) for path in running[-1:]]
