"""Calls of our functions and operators read as what they were made from."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from normscope import functional as F
from normscope.kernels import library, ops  # noqa: F401  (defines the operators)
from normscope.kernels.formulas import recipe_of
from normscope.kernels.layout import call as codes
from normscope.reading import read_call
from normscope.reading.base import CallReading
from normscope.spec import NormSpec, families


class Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[CallReading] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        reading = read_call(func, args, kwargs or {})
        if reading is not None:
            self.found.append(reading)
        return func(*args, **(kwargs or {}))


X = torch.randn(4, 6, 5)
C, D = torch.ones(6), torch.ones(5)
MEAN, VAR = torch.zeros(6), torch.ones(6)
CALLS = [
    (
        lambda: F.batch_norm(X, MEAN.clone(), VAR.clone(), C, C, True, 0.2),
        families.batch_norm(momentum=0.2),
        "batch",
    ),
    (
        lambda: F.batch_norm(X, MEAN, VAR, eps=0.5),
        families.batch_norm(eps=0.5, weight=False, bias=False),
        "running",
    ),
    (lambda: F.layer_norm(X, (5,), D), families.layer_norm(bias=False), "input"),
    (lambda: F.group_norm(X, 3, C, C), families.group_norm(3), "input"),
    (lambda: F.instance_norm(X), families.instance_norm(), "input"),
    (lambda: F.rms_norm(X, (6, 5), eps=1e-6), families.rms_norm("l d", eps=1e-6, weight=False), "input"),
    (lambda: F.normalize(X, families.gemma_rms_norm(), D), families.gemma_rms_norm(), "input"),
    (lambda: F.scale_norm(X, torch.tensor(2.0)), families.scale_norm(), "input"),
    (lambda: F.pixel_norm(X), families.pixel_norm(), "input"),
]


@pytest.mark.parametrize(("call", "spec", "mode"), CALLS, ids=lambda value: getattr(value, "stats", None))
def test_functions(call, spec, mode):
    with Watch() as watch:
        call()
    (reading,) = watch.found
    assert (reading.spec, reading.mode, reading.input is X) == (spec, mode, True)
    assert reading.type_name.startswith("normscope.functional.")
    assert set(reading.tensors) >= {"weight"} - {"weight" if spec.weight is None else ""}


def test_l2_norm():
    with Watch() as watch:
        F.l2_norm(X, 1)
    (reading,) = watch.found
    wanted = NormSpec("b d t -> b t", center=False, scale="l2", eps=1e-12, eps_at="max")
    assert reading.spec.same_function(
        wanted, layout=dict(zip(reading.spec.pattern.names, "bdt", strict=True))
    )


def test_masked_statistics_are_no_part_of_a_specification():
    with Watch() as watch:
        F.normalize(X, families.layer_norm(weight=False, bias=False), mask=X > 0)
    assert watch.found == []


SPECS = [
    (families.layer_norm(), (4, 6, 5), "input"),
    (families.layer_norm("l d", bias=False), (4, 6, 5), "input"),
    (families.rms_norm(eps=1e-6), (5,), "input"),
    (families.scale_norm(), (4, 5), "input"),
    (families.llama_rms_norm(), (4, 5), "input"),
    (families.batch_norm(running=False), (4, 6), "batch"),
    (families.batch_norm(running=False), (4, 6, 5, 2), "batch"),
    (families.instance_norm(), (4, 6, 5, 2), "input"),
    (families.group_norm(3), (4, 6, 5, 2), "input"),
    (families.channels_first_layer_norm(), (4, 6, 5, 2), "input"),
    (families.pixel_norm(), (4, 6, 5), "input"),
    (families.l2_normalize(), (4, 6), "input"),
]


@pytest.mark.parametrize(
    ("spec", "shape", "mode"), SPECS, ids=lambda value: str(getattr(value, "stats", value))
)
@pytest.mark.parametrize("name", ["norm", "normalize"])
def test_operators_say_their_axes(spec, shape, mode, name):
    call = codes(spec, len(shape))
    assert not call.unserved
    x = torch.randn(shape)
    bound = spec.bind(shape)
    weight = None if spec.weight is None else torch.ones(bound.weight_shape)
    bias = None if spec.bias is None else torch.ones(bound.bias_shape)
    eps = call.eps
    arguments = (x, weight, bias, call.axes, call.split, call.options, eps, call.gain, call.offset)
    reading = read_call(getattr(torch.ops.normscope, name).default, arguments, {})
    assert (reading.input is x, reading.mode) == (True, mode)
    assert set(reading.tensors) == {n for n, t in (("weight", weight), ("bias", bias)) if t is not None}
    found = reading.spec
    # an ellipsis stands for axes that an operator names one by one
    assert found.bind(shape).set_size == bound.set_size
    assert found.bind(shape).weight_shape == bound.weight_shape
    again = codes(found, len(shape))
    assert (again.axes, again.split, again.options, again.eps, again.gain, again.offset) == arguments[3:]
    assert recipe_of(list(arguments[3:])).sets(x) == bound.sets


def test_operator_by_stored_statistics():
    call = codes(families.batch_norm(), 3)
    arguments = (
        X,
        MEAN,
        VAR,
        C,
        C,
        call.stored_axes,
        call.split,
        call.options,
        call.eps,
        call.gain,
        call.offset,
    )
    reading = read_call(torch.ops.normscope.fixed, arguments, {})
    assert str(reading.spec.pattern) == "b c x2 -> c"
    assert (reading.mode, set(reading.tensors)) == (
        "running",
        {"weight", "bias", "running_mean", "running_var"},
    )


def test_operators_that_add_first_are_not_read():
    call = codes(families.rms_norm(eps=1e-6), 3)
    arguments = (X, X, D, None, call.axes, call.split, call.options, 1e-6, call.gain, call.offset)
    assert read_call(torch.ops.normscope.add_norm, arguments, {}) is None


def test_what_layers_call_reaches_the_dispatcher_as_an_operator_that_is_read():
    """With native kernels; without them it is one of torch's own, or several."""

    found: list[CallReading] = []

    class Below(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            reading = read_call(func, args, kwargs or {})
            if reading is not None:
                found.append(reading)
            return func(*args, **(kwargs or {}))

    if library.LIBRARY is None:
        pytest.skip("no native kernels here")
    with Below():
        F.rms_norm(torch.randn(512, 512), (512,), torch.ones(512), 1e-6)
    (reading,) = found
    assert (reading.spec.stats, reading.spec.eps) == ("... d -> ...", 1e-6)
