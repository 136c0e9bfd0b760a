"""Gradients at a constant input: finite, or not a number where a root of zero is differentiated."""

from __future__ import annotations

import numpy as np
import torch

from normscope.errors import ModelError
from normscope.identify.module_box import ModuleBox
from normscope.identify.result import Evidence

LEVELS = (0.0, 1.5)


def gradient_at_constant(box: ModuleBox) -> Evidence | None:
    """Differentiate a random sum of outputs at an input that is one number everywhere; None without a gradient.

    A standard deviation has no derivative at 0: sqrt(v) + eps gives 0 * inf where autograd goes through the root
    first, although the output is finite.
    """
    numbers: dict[str, float | int | str | tuple[int, ...]] = {}
    cotangent = torch.from_numpy(np.random.default_rng(41).standard_normal(box.shape))
    for level in LEVELS:
        x = torch.full(box.shape, level, dtype=box.dtype, requires_grad=True)
        with torch.enable_grad():
            try:
                y = box.apply(box.fork(), x)
                (gradient,) = torch.autograd.grad((y * cotangent).sum(), x)
            except (ModelError, RuntimeError):
                return None
        where = f"{level:g}"
        numbers[f"output not finite at {where}, elements"] = int((~torch.isfinite(y)).sum())
        numbers[f"gradient not finite at {where}, elements"] = int((~torch.isfinite(gradient)).sum())
    bad = [f"{level:g}" for level in LEVELS if numbers[f"gradient not finite at {level:g}, elements"]]
    what = (
        f"at a constant input ({' and '.join(bad)}) the gradient is not finite"
        if bad
        else "at a constant input the gradient is finite"
    )
    return Evidence(what, "autograd on a float64 copy, inputs of one number", numbers)
