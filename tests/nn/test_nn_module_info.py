"""PyTorch's own samples and error inputs for its modules, run through ours."""

from __future__ import annotations

import copy

import pytest
import torch

import normscope.nn as own

common_modules = pytest.importorskip(
    "torch.testing._internal.common_modules", reason="needs expecttest and setuptools", exc_type=ImportError
)
MODULES = [info for info in common_modules.module_db if info.module_cls.__name__ in own.__all__]

modules = pytest.mark.parametrize("info", MODULES, ids=lambda info: info.module_cls.__name__)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def ours(info):
    return getattr(own, info.module_cls.__name__)


def test_all_norms_that_torch_has_samples_for_are_here():
    assert {info.module_cls.__name__ for info in MODULES} == {
        *(f"{kind}Norm{n}d" for kind in ("Batch", "Instance") for n in (1, 2, 3)),
        "LayerNorm",
        "GroupNorm",
        "RMSNorm",
    }


def samples(info, dtype, training):
    return info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)


def close(a, b, dtype):
    # sums over at most 4096 elements, a gradient being three of them: a few hundred units of rounding
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(a, b, rtol=256 * unit, atol=256 * unit)


@modules
@dtypes
@both_modes
def test_samples(info, dtype, training):
    found = samples(info, dtype, training)
    assert found
    for sample in found:
        build, call = sample.constructor_input, sample.forward_input
        mine = ours(info)(*build.args, **build.kwargs, dtype=dtype).train(training)
        torchs = info.module_cls(*build.args, **build.kwargs, dtype=dtype).train(training)
        with torch.no_grad():
            for parameter in torchs.parameters():
                parameter.uniform_(0.5, 1.5)
        mine.load_state_dict(torchs.state_dict())
        assert repr(mine) == repr(torchs)

        again = [a.detach().clone().requires_grad_() for a in call.args]
        y, wanted = mine(*call.args, **call.kwargs), torchs(*again, **call.kwargs)
        close(y, wanted, dtype)
        assert y.stride() == wanted.stride()
        if sample.reference_fn is not None:  # the one of RMS norm computes in float32
            with torch.no_grad():
                right = sample.reference_fn(copy.deepcopy(mine), *call.args, **call.kwargs)
            close(y.float(), right.float(), torch.float32)

        grad = torch.linspace(-1, 1, y.numel(), dtype=dtype).reshape(y.shape)
        y.backward(grad)
        wanted.backward(grad)
        for a, b in zip([*call.args, *mine.parameters()], [*again, *torchs.parameters()], strict=True):
            close(a.grad, b.grad, dtype)
        for a, b in zip(mine.buffers(), torchs.buffers(), strict=True):
            close(a, b, dtype)


@pytest.mark.parametrize(
    "info",
    [info for info in MODULES if info.module_error_inputs_func is not None],
    ids=lambda info: info.module_cls.__name__,
)
@both_modes
def test_error_inputs(info, training):
    found = info.module_error_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
    )
    assert found
    for error in found:
        sample = error.module_error_input
        build, call = sample.constructor_input, sample.forward_input
        if error.error_on == common_modules.ModuleErrorEnum.CONSTRUCTION_ERROR:
            with pytest.raises(error.error_type, match=error.error_regex):
                ours(info)(*build.args, **build.kwargs)
            continue
        mine = ours(info)(*build.args, **build.kwargs).train(training)
        torchs = info.module_cls(*build.args, **build.kwargs).train(training)
        if training:
            for layer in (mine, torchs):
                with pytest.raises(error.error_type, match=error.error_regex):
                    layer(*call.args, **call.kwargs)
        else:
            assert outcome(mine, call) == outcome(torchs, call)


def outcome(layer, call):
    """What comes of a call that only training must refuse: eps 0 is fine in evaluation, a negative one is not."""
    try:
        return tuple(layer(*call.args, **call.kwargs).shape)
    except ValueError as error:
        return str(error)
