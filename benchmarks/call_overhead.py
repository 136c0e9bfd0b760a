"""What a call costs beside its work: 1x768, blocks of calls against PyTorch's own functions.

    python benchmarks/call_overhead.py [--seconds 2] [--json FILE]

Forward without gradients, forward that records for backward, and forward with backward; microseconds a call.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from normscope import functional, kernels
from normscope.bench import alternate

SHAPE = (768,)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(kernels.status())
    print(f"\n{'1x768':<36}{'torch, us':>10}{'ours, us':>10}{'ours/torch':>12}{'kept':>10}")
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight, bias = torch.ones(SHAPE, dtype=dtype), torch.zeros(SHAPE, dtype=dtype)
        for name, parameters in {"layer_norm": (weight, bias, 1e-5), "rms_norm": (weight, 1e-6)}.items():
            for mode in MODES:
                what = f"{name} {str(dtype).removeprefix('torch.')} {mode}"
                found[what] = compare(name, dtype, parameters, mode, options.seconds)
                torch_us, ours_us, kept, rounds = found[what].values()
                print(
                    f"{what:<36}{torch_us:>10.2f}{ours_us:>10.2f}{ours_us / torch_us:>12.2f}{f'{kept}/{rounds}':>10}"
                )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def compare(
    name: str, dtype: torch.dtype, parameters: tuple[Any, ...], mode: str, seconds: float
) -> dict[str, float]:
    x = torch.randn(1, *SHAPE, dtype=dtype)
    if mode != "no grad":
        parameters = tuple(p.requires_grad_() if isinstance(p, torch.Tensor) else p for p in parameters)
        x.requires_grad_()
    gradient, target = torch.randn_like(x), torch.empty_like(x)

    def contender(function: Callable[..., torch.Tensor]) -> Callable[[], object]:
        call = MODES[mode]
        return lambda: call(function, x, parameters, gradient)

    source = x.detach()
    with torch.set_grad_enabled(mode != "no grad"):
        timing = alternate(
            {
                "torch": contender(getattr(F, name)),
                "ours": contender(getattr(functional, name)),
                "copy": lambda: target.copy_(source),
            },
            seconds=seconds,
        )
    times = timing.seconds
    return {
        "torch_us": 1e6 * times["torch"],
        "ours_us": 1e6 * times["ours"],
        "kept": timing.kept,
        "rounds": timing.rounds,
    }


def forward(function: Any, x: Any, parameters: Any, gradient: Any) -> object:
    return function(x, SHAPE, *parameters)


def with_backward(function: Any, x: Any, parameters: Any, gradient: Any) -> object:
    inputs = [x, *(p for p in parameters if isinstance(p, torch.Tensor))]
    return torch.autograd.grad(function(x, SHAPE, *parameters), inputs, gradient)


MODES = {"no grad": forward, "recording": forward, "with backward": with_backward}

if __name__ == "__main__":
    main()
