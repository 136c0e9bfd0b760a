"""What every layer keeps whose gain and bias come with the call, and every layer that is no normalization."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from computed_cases import ALONE, COMPUTED, GIVEN, MADE, ComputedCase
from torch import Tensor

import normscope.nn as own
from normscope import reference
from normscope.errors import BadInput
from normscope.reading import UnknownNormalization, read
from normscope.reference import RunningState

every = pytest.mark.parametrize("case", COMPUTED, ids=str)
given = pytest.mark.parametrize("case", GIVEN, ids=str)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def close(got: Tensor, wanted: object, case: ComputedCase) -> None:
    """Sums of n terms and 16 operations, each rounded to half a unit of float64, of values up to 10; a gradient has
    three sums more, and the 4 is for constants.
    """
    bound = 4 * 8 * (math.prod(case.shape) + 16) * 2.0**-53 * 10
    torch.testing.assert_close(got.detach(), torch.as_tensor(wanted), rtol=0, atol=bound)


@given
@both_modes
def test_output_and_all_gradients_are_those_of_the_specification(case, training):
    layer = case.make().double().train(training)
    reading = read(layer, input_ndim=len(case.shape))
    assert reading.spec == layer.spec
    assert reading.spec.source == "input"
    assert reading.type_name == f"normscope.nn.{case.name}"
    x, beside = case.input().requires_grad_(), {n: t.requires_grad_() for n, t in case.beside().items()}
    running = None
    if "running_mean" in reading.tensors:
        held = [reading.tensors[name].numpy().copy() for name in ("running_mean", "running_var")]
        running = RunningState(*held, int(layer.num_batches_tracked))
    arguments = {
        "weight": beside["scale"].detach().numpy(),
        "bias": beside["shift"].detach().numpy(),
        "running": running,
        "training": reading.mode_now in ("batch", "input"),
    }
    y = layer(x, **beside)
    close(y, reference.forward(x.detach().numpy(), reading.spec, **arguments), case)
    grad = torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape)
    y.backward(grad)
    wanted = reference.vjp(grad.numpy(), x.detach().numpy(), reading.spec, **arguments)
    for tensor, right in zip((x, beside["scale"], beside["shift"]), wanted, strict=True):
        close(tensor.grad, right, case)
    if running is not None:
        if training:
            running = reference.update_running(running, x.detach().numpy(), reading.spec)
        close(layer.running_mean, running.mean, case)
        close(layer.running_var, running.var, case)
        assert int(layer.num_batches_tracked) == running.batches


@pytest.mark.parametrize("case", [c for c in COMPUTED if c.spec], ids=str)
def test_spec_is_of_the_attributes_as_they_are_now(case):
    layer = case.make()
    before = layer.spec
    layer.eps = 0.25
    assert layer.spec == before.replace(eps=0.25)


@pytest.mark.parametrize("case", MADE, ids=str)
def test_everything_that_gain_and_bias_are_made_of_is_trained(case):
    layer = case.make().double()
    beside = {n: t.requires_grad_(t.is_floating_point()) for n, t in case.beside().items()}
    layer(case.input(), **beside).sin().sum().backward()
    learned = [*layer.parameters(), *(t for t in beside.values() if t.requires_grad)]
    assert learned
    assert all(t.grad is not None and t.grad.abs().max() > 0 for t in learned)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_what_no_specification_says_is_refused_with_its_reason(case):
    layer = case.make()
    with pytest.raises(UnknownNormalization) as caught:
        read(layer)
    if case.name == "TLU":
        assert str(caught.value).startswith("normscope.nn.TLU is not a normalization that can be read.")
    else:
        assert str(caught.value) == f"normscope.nn.{case.name} {layer.outside_family}."
    if case.name.startswith("Filter"):
        with pytest.raises(BadInput) as caught:
            _ = layer.spec
        assert str(caught.value) == (
            "FilterResponseNorm1d learns its eps, and a specification holds a number: every statistic is as in filter "
            "response norm, and eps moves with training. Leave learned_eps at None for a fixed one."
        )


@pytest.mark.parametrize("case", [c for c in COMPUTED if c.name != "TLU"], ids=str)
def test_subclass_that_computes_otherwise_is_refused(case):
    layer = case.make()
    layer.__class__ = type(case.name, (type(layer),), {"forward": lambda self, x: x})
    with pytest.raises(TypeError, match=f"inherits from normscope.nn.{case.name} but overrides forward"):
        read(layer)


@every
def test_one_node_to_fx_whole_to_export_and_no_script(case):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = case.make().double()

        def forward(self, x, *beside):
            return self.norm(x, **dict(zip(case.given, beside, strict=True)))

    model, inputs = Model().eval(), (case.input(), *case.beside().values())
    if not case.given:
        model = torch.nn.Sequential(torch.nn.Identity(), model.norm)
        traced = torch.fx.symbolic_trace(copy.deepcopy(model))
        assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]
    else:
        traced = torch.fx.symbolic_trace(_fixed(model, len(case.given)))
        assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["model.norm"]
    assert torch.equal(traced(*inputs), model(*inputs))
    for training in (True, False):
        exported = torch.export.export(copy.deepcopy(model.train(training)), inputs).module()
        torch.testing.assert_close(exported(*inputs), model(*inputs))
        torch.testing.assert_close(dict(exported.named_buffers()), dict(model.named_buffers()))
    with pytest.raises(
        BadInput, match=r"^torch\.jit\.script takes those layers of normscope\.nn that torch\.nn"
    ):
        torch.jit.script(torch.nn.Sequential(case.make()))


def _fixed(model: torch.nn.Module, count: int) -> torch.nn.Module:
    """A graph needs a forward of as many arguments as there are."""

    class One(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, a):
            return self.model(x, a)

    class Two(One):
        def forward(self, x, a, b):
            return self.model(x, a, b)

    return (One, Two)[count - 1]()


@pytest.mark.parametrize("case", list({case.name: case for case in COMPUTED}.values()), ids=str)
def test_compiles_whole(case):
    layer = case.make()
    eager = copy.deepcopy(layer)
    torch.compiler.reset()  # layers share code, of which a process compiles eight versions and no more
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x, z = (case.input(torch.float32).requires_grad_() for _ in range(2))
    y, wanted = compiled(x, **case.beside(torch.float32)), eager(z, **case.beside(torch.float32))
    torch.testing.assert_close(y, wanted)
    y.sin().sum().backward()
    wanted.sin().sum().backward()
    torch.testing.assert_close(x.grad, z.grad)
    torch.testing.assert_close(layer.state_dict(), eager.state_dict())


def test_layers_of_other_eps_compile_one_after_the_other():
    """A compiler that has met two numbers in one place leaves it open, and a specification is of known ones."""
    torch.compiler.reset()
    x, scale = torch.randn(2, 4, 5), torch.randn(2, 4)
    for eps in (1e-5, 1e-3, 1e-2):
        layer = own.AdaptiveGroupNorm(2, 4, eps=eps)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, scale=scale, shift=scale), layer(x, scale=scale, shift=scale))


def _saved(layer: torch.nn.Module) -> torch.nn.Module:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@every
def test_copies_casts_and_an_empty_batch(case):
    layer = case.make().eval()
    x, beside = case.input(torch.float32), case.beside(torch.float32)
    for twin in (copy.deepcopy(layer), _saved(layer)):
        assert (repr(twin), twin.training) == (repr(layer), False)
        assert torch.equal(twin(x, **beside), layer(x, **beside))
    empty = {n: t[:0] for n, t in beside.items()}
    assert layer(x[:0], **empty).shape == (0, *case.shape[1:])
    before = copy.deepcopy(layer.state_dict())
    layer.bfloat16()
    for name, tensor in layer.state_dict().items():
        stays = name.startswith("running_") or not before[name].is_floating_point()
        assert torch.equal(tensor, before[name] if stays else before[name].bfloat16())
    for training in (False, True):
        assert layer.train(training)(x.bfloat16(), **case.beside(torch.bfloat16)).dtype == torch.bfloat16


@every
def test_made_on_meta_filled_later(case):
    layer = case.make()
    if not layer.state_dict():
        return
    cls = type(layer)
    torch.manual_seed(0)
    fresh = cls(*case.args, **case.kwargs, dtype=torch.float64)
    meta = cls(*case.args, **case.kwargs, dtype=torch.float64, device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    meta.reset_parameters()
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(meta.state_dict()[name], tensor), name
