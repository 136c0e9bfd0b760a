"""What the user passed to a check, made usable or refused: one message each, before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from normscope.doctor.nested import mapped, named_inputs
from normscope.errors import BadInput

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
FREEZE_POLICIES = ("", "statistics", "affine", "both")


def as_call(inputs: Any) -> Inputs:
    """A tensor is passed as ``model(x)``, a tuple as ``model(*args)``, a mapping as ``model(**kwargs)``.

    Raises:
        BadInput: for an array or tensor of a kind that no statistic can be taken of.
    """
    if isinstance(inputs, Mapping):
        return (), {str(k): _tensor(v) for k, v in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_tensor(v) for v in inputs), {}
    return (_tensor(inputs),), {}


def validate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of samples: the size of axis 0 of the first tensor.

    Raises:
        BadInput: without any tensor, with an empty one, or with NaN.
    """
    sizes: list[int] = []
    for where, tensor in named_inputs(args, kwargs):
        if tensor.numel() == 0:
            raise BadInput(
                f"an empty batch: {where} has shape {tuple(tensor.shape)}; pass at least one sample"
            )
        if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
            count = int(torch.isnan(tensor).sum())
            raise BadInput(
                f"{where} holds {count} NaN of {tensor.numel()} values; statistics of NaN say nothing: clean the data"
            )
        if tensor.ndim:
            sizes.append(int(tensor.shape[0]))
    if not sizes:
        came = ", ".join(type(value).__name__ for value in (*args, *kwargs.values())) or "nothing"
        raise BadInput(
            f"no tensor among the inputs, which are {came}; pass a tensor, a tuple of them, or a dict of keyword "
            "arguments"
        )
    return sizes[0]


def on_device(model: torch.nn.Module, inputs: Any) -> tuple[tuple[Any, ...] | None, dict[str, Any], int]:
    """The inputs as a call on the model's device, and the number of samples; None and 0 without inputs."""
    if inputs is None:
        return None, {}, 0
    args, kwargs = moved(as_call(inputs), model)
    return args, kwargs, validate(args, kwargs)


def moved(value: Any, model: torch.nn.Module) -> Any:
    """Tensors on the device of the model's first parameter or buffer."""
    first = next(iter((*model.parameters(), *model.buffers())), None)
    if first is None or first.device.type == "meta":
        return value
    return mapped(value, lambda t: t.to(first.device))


def module(value: Any) -> torch.nn.Module:
    """The model itself.

    Raises:
        BadInput: it is no module, or one that was not initialized, or everything new would be a meta tensor.
    """
    if not isinstance(value, torch.nn.Module):
        raise BadInput(f"model must be a torch.nn.Module, got {type(value).__name__}; pass the module itself")
    try:
        list(value.modules())
    except AttributeError:
        raise BadInput(
            f"{type(value).__name__} was not initialized: its __init__ must call super().__init__() first"
        ) from None
    if torch.get_default_device().type == "meta":
        raise BadInput(
            "the default device is meta, which computes nothing; leave `with torch.device('meta')` first"
        )
    return value


def padding_mask(
    mask: Any, args: tuple[Any, ...] | None, kwargs: dict[str, Any], batch: int
) -> torch.Tensor | None:
    """(B, L) on the CPU, True at valid positions; None where there is none.

    Raises:
        BadInput: for another shape, for a length that no input has, or with nothing valid.
    """
    if mask is None:
        return None
    if args is None:
        raise BadInput("a mask says what is padding in the inputs; pass inputs too")
    try:
        tensor = torch.as_tensor(mask).to_dense()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"mask must be a tensor of shape (B, L), got {type(mask).__name__}: {error}"
        ) from error
    if tensor.ndim != 2 or tensor.shape[0] != batch:
        raise BadInput(
            f"mask must have shape (B, L) with B = {batch}, True at valid positions; got {tuple(tensor.shape)}"
        )
    length = tensor.shape[1]
    shapes = {name: tuple(t.shape) for name, t in named_inputs(args, kwargs)}
    if not any(len(s) > 1 and s[0] == batch and length in (s[1], s[-1]) for s in shapes.values()):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise BadInput(f"mask has length {length}, but no input has an axis of that size: {listed}")
    tensor = tensor.bool().cpu()
    if not bool(tensor.any()):
        raise BadInput("mask is False everywhere: no position would be valid; is it inverted?")
    return tensor


def state(value: Any) -> dict[str, torch.Tensor] | None:
    """What a checkpoint holds, name -> tensor; what is no tensor is left out. None where there is none.

    Raises:
        BadInput: for anything but a mapping with tensors by name.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise BadInput(
            f"state must be a mapping name -> tensor, such as torch.load(file, weights_only=True) gives; "
            f"got {type(value).__name__}"
        )
    found = {key: t for key, t in value.items() if isinstance(key, str) and isinstance(t, torch.Tensor)}
    if not found:
        keys = ", ".join(map(repr, list(value)[:4])) or "nothing"
        raise BadInput(f"state holds no tensor by name, only {keys}; pass the state dict itself")
    return found


def rule_codes(word: str, codes: Any, known: Iterable[str]) -> tuple[str, ...]:
    """Codes, or their beginnings, in capitals.

    Raises:
        BadInput: for anything but strings that begin a known code.
    """
    if codes is None:
        return ()
    if isinstance(codes, str):
        raise BadInput(f"{word} takes a list of codes, got the string {codes!r}; write [{codes!r}]")
    listed = list(codes) if isinstance(codes, Iterable) else [codes]
    if not isinstance(codes, Iterable) or not all(isinstance(code, str) for code in listed):
        raise BadInput(f"{word} takes a list of codes such as ['NS304'], got {codes!r}")
    wanted = tuple(code.strip().upper() for code in listed)
    known = list(known)
    for code in wanted:
        if not code or not any(one.startswith(code) for one in known):
            raise BadInput(f"{word} names {code!r}, which begins no rule's code; known: {', '.join(known)}")
    return wanted


def whole_number(name: str, value: Any, least: int, most: int) -> int:
    """An integer in range, of Python or NumPy.

    Raises:
        BadInput: for anything else, also True and 1.0.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, (bool, np.bool_)) or not least <= number <= most:
        raise BadInput(f"{name} must be a whole number from {least} to {most}, got {value!r}")
    return number


def settings(optimizer: Any, loss_fn: Any, progress: Any, frozen_policy: Any) -> None:
    """Raises BadInput for an optimizer, loss, progress or policy that cannot be one."""
    groups = getattr(optimizer, "param_groups", None)
    if optimizer is not None and not (
        isinstance(groups, list) and all(isinstance(g, Mapping) and "params" in g for g in groups)
    ):
        raise BadInput(
            f"optimizer must be a torch.optim.Optimizer, got {optimizer!r:.80}; pass the object itself"
        )
    for name, value in (("loss_fn", loss_fn), ("progress", progress)):
        if value is not None and not callable(value):
            raise BadInput(f"{name} must be callable, got {type(value).__name__}")
    if not isinstance(frozen_policy, str) or frozen_policy not in FREEZE_POLICIES:
        raise BadInput(
            f"frozen_policy is one of {', '.join(map(repr, FREEZE_POLICIES))}; got {frozen_policy!r}"
        )


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        native = value.astype(value.dtype.newbyteorder("="), copy=True)  # any byte order and stride, writable
        try:
            return torch.from_numpy(np.ascontiguousarray(native))
        except TypeError as error:
            raise BadInput(f"an array of {value.dtype} cannot be an input: pass numbers ({error})") from error
    if isinstance(value, torch.Tensor):
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        if kind != "strided" or value.is_meta or type(value).__name__ == "MaskedTensor":
            kind = "meta" if value.is_meta else kind if kind != "strided" else "masked"
            raise BadInput(f"a {kind} tensor cannot be an input of a check: pass a dense one")
    return value
