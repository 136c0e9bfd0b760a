"""Companions: in training, batch norm makes a sample's output depend on the other samples of its batch.

Of the batch {0, b} the sample 0 gives -b / sqrt(b^2 + 4 eps): its companion alone decides its sign. Norms that average
within a sample do not know of companions, and batch norm in evaluation does not either.
"""

import math

import torch
from torch import nn

import normscope as ns

torch.set_default_dtype(torch.float64)
eps = 0.01
norm = nn.BatchNorm1d(1, eps=eps, affine=False)
for b in (2.0, 0.1, -2.0):
    first = norm(torch.tensor([[0.0], [b]]))[0].item()
    print(f"the sample 0 beside {b:4}: {first:.10f}")
    assert abs(first - -b / math.sqrt(b * b + 4 * eps)) < 1e-15
assert round(norm(torch.tensor([[0.0], [2.0]]))[0].item(), 10) == -0.9950371902

torch.manual_seed(0)
sample, some, others = torch.randn(1, 6, 5), torch.randn(7, 6, 5), 3 + torch.randn(7, 6, 5)
layers = {"batch norm": nn.BatchNorm1d(6), "group norm": nn.GroupNorm(2, 6), "layer norm": nn.LayerNorm(5)}
for name, layer in layers.items():
    coupled = ns.spec_of(layer).properties().couples_samples
    for mode in ("training", "evaluation"):
        layer.train(mode == "training")
        outputs = [layer(torch.cat([sample, rest]))[0] for rest in (some, others)]
        moved = (outputs[0] - outputs[1]).abs().max().item()
        print(f"{name} in {mode}: other companions move the sample's output by {moved:.3f}")
        assert (moved > 0.1) == (coupled and mode == "training")
