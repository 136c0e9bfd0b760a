"""The whitened value of every element, and its gradient by the closed formulas.

y = W c with c = x - mean, W = f(S), S = c c^T / N + eps. With H = dL/dy and A = H c^T, the gradient of W:

    dL/dc = W^T H + (B + B^T) c / N,    dL/dx = dL/dc less its mean,    B = dL/dS

- ``zca``, ``iternorm``: S = U diag(l) U^T and W = U diag(f) U^T give B = U (F * (U^T A U)) U^T, where F_ij is the
  divided difference (f_i - f_j) / (l_i - l_j) (Daleckii and Krein 1965): -1 / (r_i r_j (r_i + r_j)) with r = sqrt(l)
  for zca, and carried along through Newton's steps for iternorm, which also depends on the trace.
- ``cholesky``: B = -W^T low(A W^T) W, with low the lower triangle, its diagonal halved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from normscope.reference.inputs import Inputs
from normscope.reference.moments import Array
from normscope.reference.running import read_state
from normscope.reference.whitening import (
    apply,
    centered_values,
    channel_rows,
    covariances,
    matrices_by_batch,
    matrices_by_state,
    regular,
)


@dataclass(frozen=True)
class Whitened:
    """What forward computes and backward reads."""

    value: Array
    """y of every element, before gain and bias"""
    centered: Array
    matrices: Array
    """W of each group"""
    live: bool
    """the statistics move with x"""


def whiten(inputs: Inputs, running: Any, training: bool) -> Whitened:
    """By the batch, or by the stored statistics where the spec has some and ``training`` is False."""
    live = inputs.spec.running is None or training
    if live:
        centered, matrices = centered_values(inputs), matrices_by_batch(inputs)
    else:
        state = read_state(running, inputs)
        centered = inputs.x - state.mean[state.mean_labels] if inputs.spec.center else inputs.x
        matrices = matrices_by_state(inputs, state.var, state.var_labels)
    return Whitened(apply(matrices, centered, inputs), centered, matrices, live)


def pull_back(n: Whitened, h: Array, inputs: Inputs) -> Array:
    """The gradient of sum(h * y) with respect to x, for every element."""
    spec, dx = inputs.spec, np.zeros_like(h)
    covariance = covariances(inputs, float(spec.correction)) if n.live else n.matrices
    for w, sigma, part in zip(n.matrices, covariance, channel_rows(inputs), strict=True):
        dc = w.T @ h[part]
        members = int(inputs.valid[part[0]].sum())
        if n.live and members:
            c = n.centered[part]
            b = _pull_matrix(h[part] @ c.T, w, regular(sigma, spec, inputs.eps), spec)
            if spec.eps_at == "trace":
                b = b + inputs.eps * np.trace(b) / len(b) * np.eye(len(b))
            dc = dc + (b + b.T) @ c / (members - float(spec.correction))
            if spec.center:
                dc = dc - dc.sum(axis=1, keepdims=True) / members
        dx[part] = dc
    return dx


def _pull_matrix(a: Array, w: Array, s: Array, spec: Any) -> Array:
    """B = dL/dS from A = dL/dW."""
    if not s.any():  # W is 0 there, and stays
        return np.zeros_like(s)
    if not np.isfinite(w).all():
        return np.full_like(s, np.nan)
    if spec.scale == "cholesky":
        low = np.tril(a @ w.T)
        return np.asarray(-w.T @ (low - np.diag(np.diag(low)) / 2) @ w, dtype=np.float64)
    values, u = np.linalg.eigh(s)
    inner = u.T @ a @ u
    if spec.scale == "zca":
        r = np.sqrt(values)
        return np.asarray(u @ (-inner / (np.outer(r, r) * np.add.outer(r, r))) @ u.T, dtype=np.float64)
    # f(l, t) = p(l / t) / sqrt(t); p and its divided differences d, step by step
    t = values.sum()
    m, p, d = values / t, np.ones_like(values), np.zeros_like(s)
    for _ in range(spec.iterations):
        cubes = (np.add.outer(p * p, p * p) + np.outer(p, p)) * d
        d = (3 * d - np.add.outer(p**3, np.zeros_like(p)) - cubes * m) / 2
        p = (3 * p - p**3 * m) / 2
    by_trace = -(p / 2 + m * np.diag(d)) / t**1.5  # df/dt: f scales as 1 / sqrt when l and t scale together
    b = u @ (d / t**1.5 * inner) @ u.T + (np.diag(inner) @ by_trace) * np.eye(len(s))
    return np.asarray(b, dtype=np.float64)
