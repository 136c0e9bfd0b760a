"""RMS norm in half precision: where the squares are summed decides whether the result is right or nonsense.

The largest float16 is 65504, so 300 squared overflows already. bfloat16 has 8 significant bits, so a running sum stops
to move once it is 256 times its terms. PyTorch sums in float32 and rounds the output only.
"""

import torch
from torch import nn

import normscope as ns

torch.manual_seed(0)
n, eps = 2048, 1e-6
norm = nn.RMSNorm(n, eps=eps)
spec = ns.spec_of(norm)
print(spec)
exact = 300 * (1 + 0.1 * torch.randn(n))


def summed_in_half(x: torch.Tensor) -> torch.Tensor:
    """What a hand-written loop in half precision does."""
    total = x.new_zeros(())
    for square in x * x:
        total = total + square
    return x * torch.rsqrt(total / n + eps)


errors = {}
for dtype in (torch.float16, torch.bfloat16):
    x = exact.to(dtype)
    right = ns.reference.forward(x.double().numpy(), spec)
    half_a_unit = abs(right).max() * torch.finfo(dtype).eps / 2
    for words, y in (("torch.nn.RMSNorm", norm.to(dtype)(x)), ("summed in half", summed_in_half(x))):
        errors[dtype, words] = abs(y.detach().double().numpy() - right).max()
        print(f"{dtype!s:15} {words:17} error {errors[dtype, words]:.5f}, half a unit is {half_a_unit:.5f}")
    # rounding the output, and sqrt(n) roundings of float32 before it
    assert errors[dtype, "torch.nn.RMSNorm"] <= half_a_unit + abs(right).max() * n**0.5 * 2.0**-23
    assert errors[dtype, "summed in half"] > 0.5

# float16 overflows to infinity, and x / infinity is 0: an output of zeros, without an error.
assert summed_in_half(exact.half()).abs().max() == 0
print("summed in float16 the output is all zeros")

# eps=None is the machine epsilon of the dtype that computes, so that one model has two: of float64 and of float32.
for dtype in (torch.float64, torch.float16):
    tiny = torch.full((4,), 1e-4, dtype=dtype)
    y = nn.RMSNorm(4, dtype=dtype)(tiny)[0].item()
    compute = torch.promote_types(dtype, torch.float32)
    print(f"eps=None on {dtype}: {torch.finfo(compute).eps:.3g}, so 0.0001 gives {y:.4f}")
    assert abs(y - 1e-4 / (1e-8 + torch.finfo(compute).eps) ** 0.5) < 1e-3
