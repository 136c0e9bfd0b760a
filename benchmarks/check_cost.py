"""What a check costs: time in forward passes of the same model, peak memory against one forward and backward.

    python benchmarks/check_cost.py [--rounds 3] [--size 224] [--json FILE]

Times alternate in one process and are medians; peak memory is the resident set of one fresh process each.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from resnet50 import resnet50

import normscope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", choices=("load", "step", "check"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak(options.peak, options.size))
        return
    result = memory(options.size)  # first: a child inherits the peak of the process that started it
    result |= times(options.rounds, options.size)
    result["allowed_seconds"] = 10 * result["forward_seconds"] + result["step_seconds"]
    result["check_in_forwards"] = (result["check_seconds"] - result["step_seconds"]) / result[
        "forward_seconds"
    ]
    result["memory_ratio"] = result["check_peak_mb"] / result["step_peak_mb"]
    for name, value in result.items():
        print(f"{name:<20} {value:.2f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


def subject(size: int) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return resnet50().eval(), torch.randn(8, 3, size, size)


def forward(model: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def step(model: torch.nn.Module, x: torch.Tensor) -> None:
    """One training forward and backward."""
    model.train()
    model(x).square().mean().backward()
    model.eval()
    model.zero_grad(set_to_none=True)


def check(model: torch.nn.Module, x: torch.Tensor) -> None:
    normscope.check(model, x)


def times(rounds: int, size: int) -> dict[str, float]:
    model, x = subject(size)
    works: dict[str, Callable[[torch.nn.Module, torch.Tensor], None]] = {
        "forward": forward,
        "step": step,
        "check": check,
    }
    taken: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():  # warm up
        work(model, x)
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work(model, x)
            taken[name].append(time.perf_counter() - start)
    return {f"{name}_seconds": statistics.median(values) for name, values in taken.items()}


def peak(what: str, size: int) -> float:
    """Peak resident set of this process in MB after doing it twice, as a training loop would."""
    model, x = subject(size)
    if what != "load":
        for _ in range(2):
            (step if what == "step" else check)(model, x)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory(size: int) -> dict[str, float]:
    """Peaks above what the process with model and data alone takes."""

    def measured(what: str) -> float:
        command = [sys.executable, __file__, "--peak", what, "--size", str(size)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    base = measured("load")
    return {
        "loaded_mb": base,
        "step_peak_mb": measured("step") - base,
        "check_peak_mb": measured("check") - base,
    }


if __name__ == "__main__":
    main()
