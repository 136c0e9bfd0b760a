"""Compiled, exported and traced programs: an operator for each norm, the same numbers, gradients to train with."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from normscope.kernels import dispatch, library
from normscope.kernels.layout import call
from normscope.spec import families

native = pytest.mark.skipif(
    library.LIBRARY is None, reason="no native kernels here: programs hold plain torch"
)
LAYER, BATCH, RMS = families.layer_norm(), families.batch_norm(), families.rms_norm()


def close(a: Tensor, b: Tensor) -> bool:
    """Eager and compiled make the same calls of the norms; what is around them may be fused and rounded otherwise: sums
    of at most 48 terms, in float32, by the largest value."""
    return torch.allclose(a, b, rtol=0.0, atol=8 * 2.0**-23 * max(1.0, float(b.detach().abs().max())))


class Net(nn.Module):
    """Every operator, between others that a compiler would fuse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.rand(8) + 0.5)
        self.bias = nn.Parameter(torch.rand(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.calls = [call(spec, 2) for spec in (LAYER, BATCH, RMS)]

    def forward(self, x: Tensor) -> Tensor:
        layer, batch, rms = self.calls
        y = dispatch.norm(self.linear(x) * 2, self.weight, self.bias, layer)
        if self.training:
            y = dispatch.norm_running(y, self.weight, self.bias, self.mean, self.var, batch, 0.1)
        else:
            y = dispatch.fixed(y, self.mean, self.var, self.weight, self.bias, batch)
        y, total = dispatch.add_norm(y, x, self.weight, None, rms)
        return (y + total).relu()


def step(net: nn.Module, run, x: Tensor) -> list[Tensor]:
    """Output, gradients and buffers after one step."""
    x = x.clone().requires_grad_()
    net.zero_grad()
    y = run(x)
    y.square().sum().backward()
    return [
        y.detach(),
        x.grad,
        *(p.grad.clone() for p in net.parameters()),
        *(b.clone() for b in net.buffers()),
    ]


def operators(graph) -> list[str]:
    return [str(n.target).split(".")[1] for n in graph.nodes if str(n.target).startswith("normscope.")]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_whole_it_does_a_step_as_eager_does(backend, training):
    net = Net().train(training)
    other = copy.deepcopy(net)
    x = torch.randn(6, 8)
    torch._dynamo.reset()
    expected = step(net, net, x)
    found = step(other, torch.compile(other, fullgraph=True, backend=backend), x)
    assert all(close(a, b) for a, b in zip(found, expected, strict=True))


def test_compiled_once_it_serves_every_size():
    net = Net().eval()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(net, fullgraph=True, dynamic=True, backend=counter)
    run(torch.randn(3, 8))
    compiled = counter.frame_count
    for n in (5, 9):
        x = torch.randn(n, 8)
        assert close(run(x), net(x))
    assert counter.frame_count == compiled


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_compiled_it_keeps_the_layout(layout):
    c = call(families.group_norm(3), 4)
    weight, bias = torch.rand(6), torch.rand(6)
    f = lambda x: dispatch.norm(x * 2, weight, bias, c)  # noqa: E731
    x = torch.randn(2, 6, 5, 4).to(memory_format=layout)
    torch._dynamo.reset()
    y = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
    assert y.stride() == f(x).stride() == x.stride()
    assert close(y, f(x))


@pytest.mark.parametrize("strict", [True, False])
def test_exported_saved_loaded_and_trained(strict):
    net = Net().eval()
    x = torch.randn(6, 8)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},), strict=strict)
    if library.LIBRARY is not None:
        assert operators(program.graph) == ["normalize", "normalize_by", "add_normalize"]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    x = torch.randn(9, 8)
    found = step(loaded, loaded, x)
    assert all(close(a, b) for a, b in zip(found, step(net, net, x), strict=True))
    assert close(program.run_decompositions().module()(x), net(x))


@native
def test_exported_in_training_mode_running_statistics_follow():
    net = Net()
    x = torch.randn(6, 8)
    program = torch.export.export(net, (x,), strict=False).run_decompositions()
    module = program.module()
    assert close(module(x), net(x))
    for name, buffer in net.named_buffers():
        assert close(dict(module.named_buffers())[name], buffer)
        assert buffer.abs().sum() > 0


@native
def test_a_gradient_of_a_gradient_through_an_exported_program():
    net = Net().eval().double()
    x = torch.randn(3, 8, dtype=torch.float64)
    module = torch.export.export(net, (x,), strict=False).module()

    def penalty(run) -> Tensor:
        z = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(run(z).square().sum(), z, create_graph=True)
        return torch.autograd.grad(g.square().sum(), z)[0]

    assert torch.allclose(penalty(module), penalty(net), rtol=1e-9, atol=1e-9)


RUN = """
import sys, torch
import normscope.functional
from normscope.kernels import library
assert library.registered == "none"
x, expected = torch.load(sys.argv[2])
module = torch.export.load(sys.argv[1]).module()
y = module(x)
y.sum().backward()
assert torch.allclose(y, expected, rtol=0, atol=1e-5)
assert all(p.grad.abs().sum() > 0 for p in module.parameters())
"""


@native
def test_an_exported_program_runs_by_the_formulas_where_nothing_is_native(tmp_path):
    """As on a machine without a compiler: a process that is told to use no native kernels."""
    net = Net().eval()
    x = torch.randn(6, 8)
    program, values = tmp_path / "net.pt2", tmp_path / "values.pt"
    torch.export.save(torch.export.export(net, (x,), strict=False), program)
    torch.save((x, net(x).detach()), values)
    environment = {**os.environ, "NORMSCOPE_KERNELS": "torch"}
    command = [sys.executable, "-c", RUN, str(program), str(values)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_traced():
    net = Net().eval()
    x = torch.randn(6, 8)
    traced = torch.jit.trace(net, x)
    assert "normscope::" not in str(traced.inlined_graph)
    x = torch.randn(4, 8)
    assert close(traced(x), net(x))


def test_exported_to_onnx():
    onnx = pytest.importorskip("onnx")
    file = io.BytesIO()
    torch.onnx.export(Net().eval(), (torch.randn(6, 8),), file, dynamo=False)
    file.seek(0)
    kinds = [node.op_type for node in onnx.load(file).graph.node]
    assert {"LayerNormalization", "BatchNormalization"} <= set(kinds)
    assert not any("norm" in node.domain for node in onnx.load(io.BytesIO(file.getvalue())).graph.node)
