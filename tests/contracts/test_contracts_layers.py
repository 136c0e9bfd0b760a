"""What every layer of normscope.nn keeps: its specification is what it computes, and torch.nn cannot tell it apart."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from computed_cases import COMPUTED
from layer_cases import CASES, SECOND, STORING, WITH_TORCH, LayerCase, arrays, reading_of
from torch import Tensor

import normscope.nn as own
from normscope import reference
from normscope.errors import BadInput
from normscope.spec import NormSpec

every = pytest.mark.parametrize("case", CASES, ids=str)
with_torch = pytest.mark.parametrize("case", WITH_TORCH, ids=str)
storing = pytest.mark.parametrize("case", STORING, ids=str)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def test_every_layer_is_held_to_the_contract():
    layers = {name for name in own.__all__ if isinstance(getattr(own, name), type)}
    assert {case.name for case in (*CASES, *COMPUTED)} == layers


def tolerance(case: LayerCase, spec: NormSpec) -> float:
    """In units of the largest value: sums of n terms, and 16 operations, each rounded to half a unit (float32 where the
    convention says so), about a mean that a sum of n terms gave."""
    n = spec.bind(case.shape).set_size
    return (n + 16) * (2.0**-24 if case.float32 else 2.0**-53) * 4


def assert_close(got: Tensor, wanted: np.ndarray, scale: float) -> None:
    got = got.detach().double()
    assert got.shape == wanted.shape
    wanted = torch.from_numpy(wanted)
    assert (got - wanted).abs().max() <= scale * wanted.abs().max().clamp(min=1)


def second(layer: torch.nn.Module) -> Tensor:
    """The variance that it stores, or the matrix."""
    (held,) = [tensor for name, tensor in layer.named_buffers() if name in SECOND]
    return held


# The specification is what the layer computes ---------------------------------------------------------------


@every
@both_modes
def test_output_and_gradients_are_those_of_the_specification(case, training):
    layer = case.make().double().train(training)
    reading = reading_of(layer, case)
    given = arrays(reading)
    x = case.input().requires_grad_()
    y = layer(x)
    bound = tolerance(case, reading.spec)
    assert y.dtype == x.dtype
    assert_close(y, reference.forward(x.detach().numpy(), reading.spec, **given), bound)

    grad = torch.randn(case.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y.backward(grad)
    wanted = reference.vjp(grad.numpy(), x.detach().numpy(), reading.spec, **given)
    own_gradients = [getattr(getattr(layer, name, None), "grad", None) for name in ("weight", "bias")]
    for found, right in zip([x.grad, *own_gradients], wanted, strict=True):
        if found is x.grad or (found is not None and not case.made):
            assert_close(found, right, bound * 8)  # three sums more
    parameters = dict(layer.named_parameters())
    assert all(parameter.grad is not None for parameter in parameters.values())


@storing
@both_modes
def test_statistics_follow_as_the_specification_says(case, training):
    layer = case.make().double().train(training)
    reading = reading_of(layer, case)
    start = arrays(reading)["running"]
    for _ in range(2):
        layer(case.input())
    if ("train" if training else "eval") in reading.updates:
        for _ in range(2):
            start = reference.update_running(start, case.input().numpy(), reading.spec)
        assert (
            getattr(layer, "num_batches_tracked", None) is None
            or case.name.startswith("Instance")
            or (int(layer.num_batches_tracked) == start.batches)
        )
    bound = tolerance(case, reading.spec)
    assert_close(layer.running_mean, start.mean, bound)
    assert_close(second(layer), start.var, bound)


@every
def test_spec_is_of_the_attributes_as_they_are_now(case):
    layer = case.make()
    before = layer.spec
    assert before == layer.spec
    layer.eps = 0.25
    assert layer.spec == before.replace(eps=0.25)


@every
def test_reader_knows_the_layer_by_its_public_name(case):
    layer = case.make()
    reading = reading_of(layer, case)
    assert reading.type_name == f"normscope.nn.{case.name}"
    if not case.made:
        assert set(reading.tensors) == set(layer.state_dict())
        assert all(tensor is getattr(layer, name) for name, tensor in reading.tensors.items())
    if case.id != "InstanceNorm1d-unbatched":
        assert reading.spec == layer.spec


@every
def test_subclass_that_computes_otherwise_is_refused(case):
    layer = case.make()
    cls = type(case.name, (type(layer),), {"forward": lambda self, x: x})
    layer.__class__ = cls
    with pytest.raises(TypeError, match=f"inherits from normscope.nn.{case.name} but overrides forward"):
        reading_of(layer, case)


# torch.nn cannot tell it apart ---------------------------------------------------------------


@with_torch
def test_is_torchs_class_and_prints_like_it(case):
    ours, torchs = case.make(), case.make_torch()
    assert isinstance(ours, case.like)
    assert repr(ours) == repr(torchs)
    assert ours.spec == reading_of(torchs, case).spec or case.id == "InstanceNorm1d-unbatched"


@with_torch
def test_reading_is_that_of_torchs(case):
    for training in (True, False):
        ours = reading_of(case.make().train(training), case)
        torchs = reading_of(case.make_torch().train(training), case)
        assert (ours.spec, ours.mode_now, ours.mode_train, ours.mode_eval, ours.updates) == (
            torchs.spec,
            torchs.mode_now,
            torchs.mode_train,
            torchs.mode_eval,
            torchs.updates,
        )


@with_torch
def test_state_dicts_go_both_ways(case):
    ours, torchs = case.make(), case.make_torch()
    with torch.no_grad():
        for tensor in torchs.state_dict().values():
            tensor.mul_(2).add_(1)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    assert ours.state_dict()._metadata == torchs.state_dict()._metadata
    ours.load_state_dict(torchs.state_dict(), strict=True)
    back = case.make_torch()
    back.load_state_dict(ours.state_dict(), strict=True)
    for name, tensor in torchs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)
        assert torch.equal(back.state_dict()[name], tensor)


@with_torch
@both_modes
def test_follows_torch_in_float64(case, training):
    """Two steps: outputs, gradients, statistics and counter."""
    ours, torchs = (
        case.make(dtype=torch.float64).train(training),
        case.make_torch(dtype=torch.float64).train(training),
    )
    bound = 4 * tolerance(case, ours.spec) if case.id != "InstanceNorm1d-unbatched" else 1e-14
    for _ in range(2):
        x, z = case.input().requires_grad_(), case.input().requires_grad_()
        y, wanted = ours(x), torchs(z)
        assert_close(y, wanted.detach().numpy(), bound)
        grad = torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape)
        y.backward(grad)
        wanted.backward(grad)
        assert_close(x.grad, z.grad.numpy(), 8 * bound)
    for name, tensor in torchs.state_dict().items():
        assert ours.state_dict()[name].dtype == tensor.dtype
        assert_close(ours.state_dict()[name], tensor.double().numpy(), bound)
    for mine, theirs in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad.numpy(), 8 * bound)


@with_torch
@both_modes
def test_empty_batch_as_torch_does(case, training):
    shape = (0, *case.shape[1:]) if case.id != "InstanceNorm1d-unbatched" else (5, 0)
    results = []
    for layer in (case.make().train(training), case.make_torch().train(training)):
        try:
            y = layer(torch.zeros(shape))
            results.append((tuple(y.shape), [t.tolist() for t in layer.state_dict().values()]))
        except (ValueError, RuntimeError, IndexError) as error:
            results.append((type(error), str(error)))
    assert results[0] == results[1]


@every
def test_empty_batch_gives_an_empty_output(case):
    if case.name.startswith("InstanceNorm") and case.tensors:
        pytest.skip("torch has no instance norm with parameters of no samples")
    if case.name == "WeightStandardization":
        pytest.skip("takes a weight, which has no samples")
    layer = case.make().eval()
    empty = [0 if axis == case.samples else size for axis, size in enumerate(case.shape)]
    assert layer(torch.zeros(empty)).shape == torch.Size(empty)


# torch.fx and torch.jit.script ------------------------------------------------------------------------------


@every
@both_modes
def test_is_a_leaf_to_symbolic_tracing(case, training):
    model = torch.nn.Sequential(torch.nn.Identity(), case.make().double()).train(training)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    calls = [(node.op, node.target) for node in traced.graph.nodes]
    assert calls[1:-1] == [("call_module", "0"), ("call_module", "1")]
    x = case.input()
    assert torch.equal(traced(x), model(x))
    for name, tensor in model.state_dict().items():
        assert torch.equal(traced.state_dict()[name], tensor)


@with_torch
@both_modes
def test_scripts_to_what_torchs_computes(case, training):
    model = torch.nn.Sequential(case.make().double()).train(training)
    scripted = torch.jit.script(model)
    assert type(model[0]) is getattr(own, case.name)
    torchs = case.make_torch().double().train(training)
    x = case.input()
    assert torch.equal(scripted(x), torchs(x))
    for name, tensor in torchs.state_dict().items():
        assert torch.equal(model[0].state_dict()[name], tensor)


@pytest.mark.parametrize("case", [case for case in CASES if case.like is None], ids=str)
def test_what_torch_lacks_says_how_else_than_by_scripting(case):
    layer = case.make().double()
    with pytest.raises(BadInput) as caught:
        torch.jit.script(torch.nn.Sequential(layer))
    assert str(caught.value) == (
        f"torch.jit.script takes those layers of normscope.nn that torch.nn has too; got {layer!r}. "
        "Use torch.export."
    )
    x = case.input()
    for training in (True, False):
        exported = torch.export.export(copy.deepcopy(layer.train(training)), (x,)).module()
        torch.testing.assert_close(exported(x), layer(x))
        torch.testing.assert_close(dict(exported.named_buffers()), dict(layer.named_buffers()))


# torch.compile ---------------------------------------------------------------


ONE_EACH = list({case.name + str(case.kwargs.get("convention", "")): case for case in CASES}.values())


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_compiles_whole(case):
    """In one graph, forward and backward. (The operators under compilers proper are tested with the kernels.)"""
    layer = case.make()
    eager = copy.deepcopy(layer)
    torch.compiler.reset()  # layers share code, of which a process compiles eight versions and no more
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x, z = (case.input(torch.float32).requires_grad_() for _ in range(2))
    y, wanted = compiled(x), eager(z)
    torch.testing.assert_close(y, wanted)
    y.sin().sum().backward()
    wanted.sin().sum().backward()
    torch.testing.assert_close(x.grad, z.grad)
    torch.testing.assert_close(layer.state_dict(), eager.state_dict())


# Copies, casts, devices ---------------------------------------------------------------


def saved(layer: torch.nn.Module) -> torch.nn.Module:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@every
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved],
    ids=["deepcopy", "pickle", "save"],
)
def test_copies_are_the_same_and_apart(case, copied):
    layer = case.make().eval()
    twin = copied(layer)
    assert type(twin) is type(layer)
    assert (repr(twin), twin.spec, twin.training) == (repr(layer), layer.spec, False)
    x = case.input(torch.float32)
    assert torch.equal(twin(x), layer(x))
    for name, tensor in layer.state_dict().items():
        assert torch.equal(twin.state_dict()[name], tensor)
        assert twin.state_dict()[name].data_ptr() != tensor.data_ptr()


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "to": lambda m: m.to(torch.bfloat16),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.float16),
}


@every
@pytest.mark.parametrize("cast", CASTS)
def test_casts_leave_statistics_and_counters_alone(case, cast):
    layer, before = case.make(), case.make().state_dict()
    wanted = {"half": torch.float16, "double": torch.float64, "type": torch.float16}.get(cast, torch.bfloat16)
    CASTS[cast](layer)
    for name, tensor in layer.state_dict().items():
        if name == "num_batches_tracked" and cast != "type":
            assert tensor.dtype == torch.int64
        elif name.startswith("running_") and wanted != torch.float64:
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, before[name])  # not a bit was lost on the way
        elif name != "num_batches_tracked":
            assert tensor.dtype == wanted
            assert torch.equal(tensor, before[name].to(wanted))
    x = case.input(wanted)
    assert layer(x).dtype == wanted
    assert layer.eval()(x).dtype == wanted


@storing
def test_statistics_can_be_cast_on_request(case):
    layer = case.make(float32_statistics=False).bfloat16()
    assert layer.running_mean.dtype == second(layer).dtype == torch.bfloat16
    assert repr(layer).endswith(", float32_statistics=False)")


@storing
def test_statistics_are_float32_however_half_comes_in(case):
    assert second(case.make(dtype=torch.bfloat16)).dtype == torch.float32
    assigned = case.make()
    halves = {n: t.half() if t.is_floating_point() else t for n, t in assigned.state_dict().items()}
    assigned.load_state_dict(halves, assign=True)
    assert assigned.running_mean.dtype == second(assigned).dtype == torch.float32
    assert torch.equal(assigned.running_mean, halves["running_mean"].float())


@every
def test_made_on_meta_filled_later(case):
    if not case.tensors:
        pytest.skip("holds no tensor")
    layer = getattr(own, case.name)(*case.args, **case.kwargs, device="meta", dtype=torch.float64)
    assert all(tensor.device.type == "meta" for tensor in layer.state_dict().values())
    layer.to_empty(device="cpu")
    if case.name != "FrozenBatchNorm":
        layer.reset_parameters()
        fresh = getattr(own, case.name)(*case.args, **case.kwargs, dtype=torch.float64)
        for name, tensor in fresh.state_dict().items():
            assert torch.equal(layer.state_dict()[name], tensor)
