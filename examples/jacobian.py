"""The Jacobian of layer norm: one direction is invisible, one is faint, the others scale by 1 / s.

With c = x - mean and s = sqrt(mean(c^2) + eps), dy/dx = (I - 11'/d - c c' / (d s^2)) / s. Its eigenvalues are 0 along
(1, ..., 1), eps / s^3 along c, and 1 / s elsewhere. At eps 0 the length of c is lost as well.
"""

import numpy as np
import torch
from torch import nn

import normscope as ns

x, eps = [1.0, 2.0, 4.0], 0.1
norm = nn.LayerNorm(3, eps=eps, elementwise_affine=False, dtype=torch.float64)
spec = ns.spec_of(norm)
closed = ns.reference.jacobian(x, spec)
print("dy/dx at (1, 2, 4), eps 0.1:")
print(np.round(closed, 10))
assert np.round(closed[0], 10).tolist() == [0.2399383587, -0.3286112304, 0.0886728717]

automatic = torch.autograd.functional.jacobian(norm, torch.tensor(x, dtype=torch.float64)).numpy()
print(f"autograd differs by {abs(closed - automatic).max():.1e}")
assert abs(closed - automatic).max() < 1e-14

step = 1e-5  # step^2 / 6 times the third derivative, and an ulp / step, are both below 2e-10
shifts = step * np.eye(3)
differences = np.stack(
    [(ns.reference.forward(x + h, spec) - ns.reference.forward(x - h, spec)) / (2 * step) for h in shifts],
    axis=1,
)
print(f"central differences with step {step:g} differ by {abs(closed - differences).max():.1e}")
assert abs(closed - differences).max() < 1e-9

c = np.array(x) - np.mean(x)
s = np.sqrt(np.mean(c**2) + eps)
print(f"along (1, 1, 1): {abs(closed @ np.ones(3)).max():.1e}")
print(f"along c: {(closed @ c / c)[0]:.10f}, and eps / s^3 is {eps / s**3:.10f}")
print(f"eigenvalues {np.linalg.eigvalsh(closed)}, and 1 / s is {1 / s:.8f}")
assert np.allclose(closed @ np.ones(3), 0, atol=1e-15)
assert np.allclose(closed @ c, eps / s**3 * c, atol=1e-15)
assert np.allclose(np.linalg.eigvalsh(closed), [0, eps / s**3, 1 / s], atol=1e-15)

without = ns.reference.jacobian(x, spec.replace(eps=0.0))
print(f"at eps 0, along c: {abs(without @ c).max():.1e}")
assert np.allclose(without @ c, 0, atol=1e-15)

one, other = (ns.reference.forward(v, spec) for v in (x, [11.0, 12.0, 14.0]))
print(f"(1, 2, 4) gives {one.round(6)}, (11, 12, 14) gives {other.round(6)}")
assert np.allclose(one, other, atol=1e-14)
