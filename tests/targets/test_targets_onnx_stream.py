"""The residual stream of an ONNX graph: NS602 says of an export what it says of the model."""

import io
import warnings

import onnx
import pytest
import torch
from torch import nn

import normscope as ns
from normscope.targets.onnx_model import OnnxModel

pytest.importorskip("onnxruntime")


class Block(nn.Module):
    def __init__(self, attends=False, post=False):
        super().__init__()
        self.norm, self.after = nn.LayerNorm(8), nn.LayerNorm(8) if post else nn.Identity()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.attends = attends

    def forward(self, x):
        h = self.norm(x)
        if self.attends:  # a second branch of the same norm
            x = x + torch.softmax(h @ h.transpose(1, 2), -1) @ h
        return self.after(x + self.second(torch.relu(self.first(h))))


class Stack(nn.Module):
    def __init__(self, *blocks, head=True, final=False, pooled=False):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.final = nn.LayerNorm(8) if final else nn.Identity()
        self.head = nn.Linear(8, 3) if head else nn.Identity()
        self.pooled = pooled

    def forward(self, x):
        x = self.final(self.blocks(x))
        return self.head(x.mean(1) if self.pooled else x)


def exported(model, x, opset):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), file, dynamo=False, opset_version=opset, input_names=["x"])
    return OnnxModel(onnx.load_from_string(file.getvalue()))


def found(model, x):
    report = ns.check(model, x, select=["NS602"])
    assert not report.not_run
    return [(f.severity, f.evidence.get("branches"), f.evidence.get("reached")) for f in report.findings]


STACKS = {
    "head": lambda: Stack(Block(), Block(), Block()),
    "pooled head": lambda: Stack(Block(), Block(), pooled=True),
    "two branches of one norm": lambda: Stack(Block(attends=True), Block(attends=True)),
    "returned": lambda: Stack(Block(), Block(), head=False),
    "norm on the sum too": lambda: Stack(Block(post=True), Block(post=True), Block(post=True)),
    "final norm": lambda: Stack(Block(), Block(), Block(), final=True),
    "one block": lambda: Stack(Block()),
    "no residual": lambda: Stack(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), nn.LayerNorm(8)),
}
FIRES = {"head": "warning", "pooled head": "warning", "two branches of one norm": "warning", "returned": "info",
         "norm on the sum too": "info"}  # fmt: skip


@pytest.mark.parametrize("opset", [17, 13], ids=["operators", "many nodes"])
@pytest.mark.parametrize("name", STACKS)
def test_an_export_is_judged_as_its_model(name, opset):
    torch.manual_seed(0)
    model, x = STACKS[name]().eval(), torch.randn(8, 5, 8)
    wanted = found(model, x)
    assert [severity for severity, *_ in wanted] == ([FIRES[name]] if name in FIRES else [])
    assert found(exported(model, x, opset), x) == wanted
