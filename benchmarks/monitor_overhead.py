"""What a monitor costs: training steps of one model with and without it, alternating in one process.

    python benchmarks/monitor_overhead.py [--seconds 60] [--every 100] [--json FILE]

In turn: a step without a monitor, one between two looks, one with a look, one with a look that also computes in
float64 (one look in ten). Norms written by hand are identified once, after the first step; what that costs is told
apart ("once"). The overhead is that of a whole cycle, of medians:

    (between + (0.9 look + 0.1 costly - between) / every) / plain - 1

Times are of the processor, which other programs on the machine disturb least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from normscope import Monitor
from normscope.bench.timing import rotated

LIMIT = 0.03
STEPS, FEWEST = 3, 5
"""timed steps in a turn / rounds at least"""


class Block(nn.Module):
    """A basic residual block."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet18() -> nn.Module:
    """Eight basic blocks and 20 batch norms, with a stem for images of 32 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(Block(channels, width, stride))
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def transformer() -> nn.Module:
    """Four encoder layers of width 256 and 9 layer norms."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(256), enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(64, 256), encoder, nn.Linear(256, 10))


class Hand(nn.Module):
    """A layer norm written by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = (
            nn.Parameter(torch.ones(width)),
            nn.Parameter(torch.zeros(width)),
            1e-5,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return (
            self.weight * centered * (centered.square().mean(-1, keepdim=True) + self.eps).rsqrt() + self.bias
        )


def by_hand() -> nn.Module:
    """The transformer, its 9 layer norms written by hand."""
    model = transformer()
    for module in [*model.modules()]:
        for name, part in module.named_children():
            if isinstance(part, nn.LayerNorm):
                setattr(module, name, Hand(256))
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet-18-like, 2 x 3 x 32 x 32": (resnet18, (2, 3, 32, 32)),
    "transformer, 4 x 64 tokens": (transformer, (4, 64, 64)),
    "the same, norms by hand": (by_hand, (4, 64, 64)),
}


class Costly(Monitor):
    COSTLY_EVERY = 1


class Cheap(Monitor):
    COSTLY_EVERY = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    head = f"{'':<34}" + "".join(f"{name:>11}" for name in ("plain, ms", "between", "look", "costly", "once"))
    print(f"{torch.__version__}, {torch.get_num_threads()} threads\n{head}{'overhead':>11}{'rounds':>9}")
    found = {}
    for name, (build, shape) in MODELS.items():
        found[name] = measure(build, shape, options.seconds, options.every)
        ms = "".join(
            f"{1e3 * found[name][key]:>11.2f}" for key in ("plain", "between", "look", "costly", "once")
        )
        print(f"{name:<34}{ms}{found[name]['overhead']:>11.2%}{found[name]['rounds']:>9.0f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    worst = max(one["overhead"] for one in found.values())
    raise SystemExit(f"more than {LIMIT:.0%}: {worst:.2%}" if worst > LIMIT else 0)


def measure(
    build: Callable[[], nn.Module], shape: tuple[int, ...], seconds: float, every: int
) -> dict[str, float]:
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> float:
        begin = time.process_time()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return time.process_time() - begin

    never = 2**31
    contenders: dict[str, Callable[[], Monitor | None]] = {
        "plain": lambda: None,
        "between": lambda: Monitor(model, optimizer, never),
        "look": lambda: Cheap(model, optimizer, 1),
        "costly": lambda: Costly(model, optimizer, 1),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    once: list[float] = []
    begin, rounds = time.monotonic(), 0
    while time.monotonic() - begin < seconds or rounds < FEWEST:
        for name in rotated(list(contenders), rounds):
            monitor = contenders[name]()
            if monitor is not None:
                monitor.start()
            # the first two of a monitor have looks, and no step finds the caches of another contender
            first, second = step(), step()
            if name == "costly":
                once.append(first - second)
            times[name] += [step() for _ in range(STEPS)]
            if monitor is not None:
                monitor.stop()
        rounds += 1
    found = {name: statistics.median(values) for name, values in {**times, "once": once}.items()}
    look = 0.9 * found["look"] + 0.1 * found["costly"]
    overhead = (found["between"] + (look - found["between"]) / every) / found["plain"] - 1
    return {**found, "overhead": overhead, "rounds": rounds}


if __name__ == "__main__":
    main()
