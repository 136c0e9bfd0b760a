"""Whole models, before and after ``normscope.transforms.accelerate``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor, nn

from normscope.bench.report import ModelRow
from normscope.bench.timing import COPY, alternate
from normscope.errors import told

COPY_BYTES = 64 * 2**20
"""of the copy that shows disturbed rounds: some milliseconds, or it would slip through between disturbances"""
LONGER = 3
"""times the seconds of one operation: a step is long, and only many rounds make a median"""
LLAMA = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
"""a Llama's proportions at a hundredth of its size"""


@dataclass(frozen=True)
class Model:
    """``build`` makes a module and its input; ``needs`` is a package with the way to get it."""

    name: str
    build: Callable[[], tuple[nn.Module, Tensor]]
    training: bool
    needs: tuple[str, str] | None = None


def models(*, quick: bool = False) -> list[Model]:
    """All whole models; ``quick`` makes their inputs small."""
    side, tokens = (64, 32) if quick else (224, 256)
    transformers = ("transformers", "pip install 'normscope[transformers]'")
    lite = ("efficientnet_lite_pytorch", "pip install --no-deps efficientnet-lite-pytorch")

    def resnet(last: bool) -> tuple[nn.Module, Tensor]:
        form = torch.channels_last if last else torch.contiguous_format
        x = torch.randn(4, 3, side, side)
        network: nn.Module = ResNet18().to(memory_format=form)  # type: ignore[call-overload]
        return network, x.to(memory_format=form)

    def llama(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        return _llama().to(dtype), torch.randint(LLAMA["vocab_size"], (4, tokens))

    def efficientnet() -> tuple[nn.Module, Tensor]:
        built = import_module(lite[0]).EfficientNet.from_name("efficientnet-lite0")
        return built, torch.randn(8, 3, side, side)

    return [
        Model("ResNet-18, training step", lambda: resnet(False), True),
        Model("ResNet-18, training step, channels-last", lambda: resnet(True), True),
        Model("Llama shape, forward", lambda: llama(torch.float32), False, transformers),
        Model("Llama shape, training step", lambda: llama(torch.float32), True, transformers),
        Model("Llama shape, forward, bfloat16", lambda: llama(torch.bfloat16), False, transformers),
        Model("Llama shape, training step, bfloat16", lambda: llama(torch.bfloat16), True, transformers),
        Model("EfficientNet-Lite0, inference", efficientnet, False, lite),
    ]


def compare(model: Model, *, seconds: float) -> ModelRow:
    """The same step of the model as it is and accelerated, alternating; the largest difference of their outputs."""
    if model.needs is not None and find_spec(model.needs[0]) is None:
        return ModelRow(model.name, note=f"needs {model.needs[0]}: {model.needs[1]}")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            before, x = model.build()
        before.train(model.training)
        after = _accelerated(before)
        steps: dict[str, Callable[[], object]] = {
            "before": _step(before, x, model.training),
            "after": _step(after, x, model.training),
        }
        with torch.no_grad():
            wanted, got = _output(before(x)), _output(after(x))
        difference = float((got - wanted).abs().max() / wanted.abs().max())
        source = torch.zeros(COPY_BYTES // 4)
        target = torch.empty_like(source)
        steps[COPY] = lambda: target.copy_(source)
        with torch.set_grad_enabled(model.training):
            timing = alternate(steps, seconds=LONGER * seconds)
    except Exception as error:
        return ModelRow(model.name, note=told(error))
    swapped = sum(type(m).__module__.startswith("normscope.nn") for m in after.modules())
    return ModelRow(model.name, swapped, timing, difference)


def _accelerated(model: nn.Module) -> nn.Module:
    from normscope.transforms import accelerate

    found: nn.Module = accelerate(copy.deepcopy(model))[0]
    return found


def _step(model: nn.Module, x: Tensor, training: bool) -> Callable[[], object]:
    """A training step up to the gradients, or a forward."""
    if not training:
        return lambda: model(x)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(_output(model(x)).float().square().mean())

    return step


def _output(found: object) -> Tensor:
    logits = found if isinstance(found, Tensor) else found.logits  # type: ignore[attr-defined]
    assert isinstance(logits, Tensor)
    return logits


def _llama() -> nn.Module:
    transformers = import_module("transformers")
    found: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, use_cache=False))
    return found


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2016, figure 2)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """The 18-layer network of He et al. 2016, table 1."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = (64, 64, 128, 256, 512)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Block(inner, outer, 1 if inner == outer else 2), Block(outer, outer, 1))
                for inner, outer in pairwise(widths)
            )
        )
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return found
