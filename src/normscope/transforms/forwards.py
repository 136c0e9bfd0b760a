"""A forward on a batch of a loader; where the model cannot take the batch, in words of what came and what to pass."""

from __future__ import annotations

from typing import Any

import torch

from normscope.doctor.nested import named_inputs
from normscope.doctor.session import Session
from normscope.errors import ModelError, NormscopeError, told

ONE_VALUE = "Expected more than 1 value per channel when training"
"""how torch begins"""
SHOWN = 4
"""so many inputs are told"""


def forward(
    session: Session, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, **settings: Any
) -> Any:
    """`Session.forward` on the batch with this number, counted from 1.

    Raises:
        ModelError: whatever the model raised, with what it was given; the cause is chained. Errors of Normscope, and of
            a batch that cannot be normalized by itself, pass as they are.
    """
    try:
        return session.forward(args, kwargs, **settings)
    except NormscopeError:
        raise
    except Exception as error:
        if str(error).startswith(ONE_VALUE):
            raise
        raise ModelError(
            f"the model raised on batch {number}: {told(error)}. {_given(session.model, args, kwargs)}"
        ) from error


def _given(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    came = [(name, t.dtype, tuple(t.shape)) for name, t in named_inputs(args, kwargs)]
    held = {p.dtype for p in model.parameters() if p.is_floating_point()}
    words = [f"{name} {_named(dtype)} {shape}" for name, dtype, shape in came[:SHOWN]]
    text = f"It was given {', '.join(words)}{' and more' if len(came) > SHOWN else ''}"
    if len(held) != 1:
        return f"{text}. Pass inputs=lambda batch: ... that returns what it takes"
    (own,) = held
    how = "the model's inputs, of what a batch holds"
    if any(dtype.is_floating_point and dtype != own for _, dtype, _ in came):
        how = f"the model's inputs as {_named(own)}"
    return f"{text}, and its parameters are {_named(own)}. Pass inputs=lambda batch: ... that returns {how}"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
