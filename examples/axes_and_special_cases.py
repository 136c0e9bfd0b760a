"""Axes: which elements share a mean and a variance, and where two layers are one function.

A specification says the axes as a reduction: what stands right of the arrow indexes the statistic sets, what vanishes
is averaged over.
"""

import torch
from torch import nn

import normscope as ns

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = 3 + 2 * torch.randn(4, 6, 3, 5)

layers = {
    "batch norm": nn.BatchNorm2d(6),
    "layer norm over the last axis": nn.LayerNorm(5),
    "layer norm over C, H, W": nn.LayerNorm((6, 3, 5)),
    "group norm, 3 groups": nn.GroupNorm(3, 6),
    "instance norm": nn.InstanceNorm2d(6),
}
expected = {
    "batch norm": (6, 60),
    "layer norm over the last axis": (72, 5),
    "layer norm over C, H, W": (4, 90),
    "group norm, 3 groups": (12, 30),
    "instance norm": (24, 15),
}
print(f"input {tuple(x.shape)}")
for name, layer in layers.items():
    spec = ns.spec_of(layer)
    bound = spec.bind(x.shape)
    error = abs(layer(x).detach().numpy() - ns.reference.forward(x.numpy(), spec)).max()
    print(
        f"{name:30} {spec.stats:20} {bound.sets:3} sets of {bound.set_size:2}, off the formula by {error:.1e}"
    )
    assert (bound.sets, bound.set_size) == expected[name]
    assert error < 1e-13  # sums of 90 terms in float64


def apart(one: nn.Module, other: nn.Module, at: torch.Tensor = x) -> float:
    return (one(at) - other(at)).abs().max().item()


one_group = nn.GroupNorm(1, 6, affine=False)
all_groups = nn.GroupNorm(6, 6, affine=False)
layer_norm = nn.LayerNorm((6, 3, 5), elementwise_affine=False)
instance_norm = nn.InstanceNorm2d(6)
batch_norm = nn.BatchNorm2d(6, affine=False, track_running_stats=False)
pairs = [
    ("group norm with G = 1 and layer norm over C, H, W", one_group, layer_norm, x),
    ("group norm with G = C and instance norm", all_groups, instance_norm, x),
    ("batch norm of one image and instance norm", batch_norm, instance_norm, x[:1]),
]
for words, one, other, at in pairs:
    verdict = ns.spec_of(one).same_function(ns.spec_of(other), shape=at.shape)
    print(f"{words}: by algebra {verdict}, by measurement {apart(one, other, at):.1e} apart")
    assert verdict
    assert apart(one, other, at) < 1e-13

# With gain and bias the first pair parts: group norm has one pair a channel, layer norm one an element.
verdict = ns.spec_of(nn.GroupNorm(1, 6)).same_function(ns.spec_of(nn.LayerNorm((6, 3, 5))), shape=x.shape)
print(f"group norm with G = 1 and layer norm, with gain and bias: {verdict}")
assert not verdict
