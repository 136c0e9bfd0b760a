"""PyTorch's own samples and error inputs for its five norms (torch.testing), through ours: values, gradients, running
statistics and errors. The truth is PyTorch's function in float64; errors are PyTorch's own, word for word.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from normscope import functional

NAMES = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SAMPLES = {"batch_norm": 12, "layer_norm": 6, "group_norm": 21, "instance_norm": 9, "rms_norm": 6}


@pytest.fixture(scope="module")
def operators() -> dict[str, Any]:
    """OpInfos by name. Private to PyTorch, so that another version may lack them: then skip, unless told not to."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        if os.environ.get("NORMSCOPE_REQUIRE_REAL") == "1":
            raise
        pytest.skip(f"PyTorch's OpInfos are not there ({error}): pip install 'normscope[test]'")
    finally:
        # importing them forbids assignments to torch.backends in the whole process
        vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True
    return {name: next(op for op in op_db if op.name == f"nn.functional.{name}") for name in NAMES}


def outcome(function: Callable[..., Tensor], sample: Any, dtype: torch.dtype) -> list[Tensor] | Exception:
    """Output, gradients and running statistics of one call, or the error; tensors converted to ``dtype`` before."""

    def fresh(t: Tensor) -> Tensor:
        copy = t.detach().to(dtype if t.is_floating_point() else t.dtype, copy=True)
        return copy.requires_grad_(t.requires_grad)

    args, kwargs = tree_map_only(Tensor, fresh, ((sample.input, *sample.args), sample.kwargs))
    tensors: list[Tensor] = []
    tree_map(lambda t: tensors.append(t) if isinstance(t, Tensor) else None, (args, kwargs))
    try:
        y = function(*args, **kwargs)
    except Exception as error:
        return error
    wanting = [t for t in tensors if t.requires_grad]
    torch.manual_seed(1)
    direction = torch.randn(y.shape, dtype=torch.float64).to(sample.input.dtype).to(dtype)
    grads = torch.autograd.grad(y, wanting, direction, allow_unused=True) if y.requires_grad else ()
    assert y.requires_grad == bool(wanting)
    found = [y.detach(), *(torch.zeros(0, dtype=dtype) if g is None else g for g in grads)]
    return found + [t for t in tensors if not t.requires_grad and t is not args[0]]


def text(error: Any) -> tuple[type, str]:
    assert isinstance(error, Exception), f"it raised nothing, but gave {error}"
    return type(error), str(error)


def tolerance(dtype: torch.dtype) -> float:
    """Of the largest true value. Sums run over at most some hundred elements; gradients are differences of three
    terms of that size, each right to a few roundings of the arithmetic (float32 for half types), and rounded once.
    The truth adds its own roundings: PyTorch's group norm subtracts a multiple of the mean, ten deviations here."""
    half = dtype in (torch.bfloat16, torch.float16)
    arithmetic = 32 * torch.finfo(torch.float32 if half else dtype).eps + 64 * torch.finfo(torch.float64).eps
    return arithmetic + (torch.finfo(dtype).eps / 2 if half else 0)


def scale(want: Tensor) -> float:
    """What errors are measured by. Where all cancels (one element normalized alone), the terms that do: a gradient of
    some units, times 1 / sqrt(eps) of the usual eps."""
    return max(largest(want), 1.0) if want.any() or not want.numel() else 8 / 1e-5**0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_samples(name: str, dtype: torch.dtype, operators: dict[str, Any]) -> None:
    op = operators[name]
    if dtype not in op.supported_dtypes("cpu"):
        pytest.skip(f"PyTorch has no samples of {name} in {dtype}")
    ours, theirs = getattr(functional, name), getattr(torch.nn.functional, name)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=True))
    assert len(samples) == SAMPLES[name]
    for sample in samples:
        found, truth = outcome(ours, sample, dtype), outcome(theirs, sample, torch.float64)
        if isinstance(truth, Exception) or isinstance(found, Exception):
            assert text(found) == text(outcome(theirs, sample, dtype)), sample
            continue
        assert len(found) == len(truth)
        for have, want in zip(found, truth, strict=True):
            assert have.dtype == dtype
            assert have.shape == want.shape
            torch.testing.assert_close(
                have.double(),
                want,
                rtol=0,
                atol=tolerance(dtype) * scale(want),
                equal_nan=True,
                msg=lambda told: f"{told}\n{sample}",  # noqa: B023
            )


def largest(t: Tensor) -> float:
    finite = t[t.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


@pytest.mark.parametrize("name", NAMES)
def test_error_inputs(name: str, operators: dict[str, Any]) -> None:
    ours, theirs = getattr(functional, name), getattr(torch.nn.functional, name)
    cases = list(operators[name].error_inputs("cpu")) if operators[name].error_inputs_func else []
    assert len(cases) == {"group_norm": 2, "rms_norm": 3}.get(name, 0)
    for case in cases:
        found = outcome(ours, case.sample_input, case.sample_input.input.dtype)
        assert text(found) == text(outcome(theirs, case.sample_input, case.sample_input.input.dtype))
        assert isinstance(found, case.error_type)
