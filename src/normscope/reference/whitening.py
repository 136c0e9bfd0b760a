"""Whitening: the axes in ``spec.whiten`` are decorrelated jointly, y = W (x - mean) with W S W^T = 1.

S is the covariance over the erased axes, one matrix for each cell of the other kept axes, made regular by eps:
S + eps 1 (``eps_at="variance"``) or S + eps trace(S) / k 1 (``"trace"``), k the number of whitened channels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.reference.inputs import Inputs
from normscope.reference.moments import Array, moments

METHODS = ("zca", "cholesky", "iternorm")


def group_names(inputs: Inputs) -> tuple[str, ...]:
    """The kept axes that are not whitened: each of their cells has a covariance of its own."""
    return tuple(name for name in inputs.axes.kept if name not in _joint(inputs))


def _joint(inputs: Inputs) -> tuple[str, ...]:
    names = tuple(name for group in inputs.axes.names(inputs.spec.whiten) for name in group)
    if not names or any(name not in inputs.axes.kept for name in names):
        raise ValueError(
            f"whitening decorrelates kept axes of {inputs.axes.pattern!r}; got whiten={inputs.spec.whiten!r}"
        )
    return names


def whitened_size(inputs: Inputs) -> int:
    """How many channels are whitened jointly."""
    return math.prod(inputs.axes.sizes[name] for name in _joint(inputs))


def channel_rows(inputs: Inputs) -> list[NDArray[np.int64]]:
    """For each group: the flat positions of its elements as a (whitened channels, members) matrix."""
    group = inputs.axes.label(group_names(inputs))
    channel = inputs.axes.label(_joint(inputs))
    groups = math.prod(inputs.axes.sizes[name] for name in group_names(inputs))
    order = np.lexsort((channel, group))  # stable: members of every channel stay in the order of the input
    ends = np.cumsum(np.bincount(group, minlength=groups))[:-1]
    rows = [part.reshape(whitened_size(inputs), -1) for part in np.split(order, ends)[:groups]]
    if any((inputs.valid[part] != inputs.valid[part[:1]]).any() for part in rows):
        raise ValueError(
            "a mask holds for all channels that are whitened together; got one that differs along "
            f"{inputs.spec.whiten!r}"
        )
    return rows


def centered_values(inputs: Inputs) -> Array:
    if not inputs.spec.center:
        return inputs.x
    return moments(inputs.x, inputs.labels, inputs.sets, inputs.valid).centered


def covariances(inputs: Inputs, correction: float) -> Array:
    """Covariance over the valid members of each group, shape (groups, k, k); 0 for an empty group."""
    centered = centered_values(inputs)
    found = []
    for rows in channel_rows(inputs):
        members = int(inputs.valid[rows[0]].sum())
        found.append(centered[rows] @ centered[rows].T / (members - correction if members else 1.0))
    k = whitened_size(inputs)
    return np.array(found, dtype=np.float64).reshape(-1, k, k)


def regular(covariance: Array, spec: Any, eps: float) -> Array:
    """One covariance with eps where the spec has it."""
    one = np.eye(len(covariance))
    if spec.eps_at == "variance":
        return covariance + eps * one
    if spec.eps_at == "trace":
        return covariance + eps * float(np.trace(covariance)) / len(covariance) * one
    raise ValueError(f"eps stands at variance or trace of a covariance; got {spec.eps_at!r}")


def whitening_matrices(covariance: Array, spec: Any, eps: float) -> Array:
    """W of each covariance in a stack (groups, k, k); 0 where that is 0 and no eps is added, and NaN where there
    is none.

    - ``zca``: S^(-1/2), the symmetric one.
    - ``cholesky``: L^-1 with S = L L^T, lower triangular.
    - ``iternorm``: ``spec.iterations`` steps of Newton's method towards S^(-1/2), P <- (3 P - P^3 S / t) / 2 from
      P = 1, and W = P / sqrt(t), t = trace(S) (Huang et al. 2019, algorithm 1). Every P is a polynomial of S, so the
      steps are taken on the eigenvalues: on matrices, rounding errors that do not commute with S grow at every step.
    """
    found = [_whitening_matrix(regular(one, spec, eps), spec) for one in covariance]
    return np.array(found, dtype=np.float64).reshape(covariance.shape)


def _whitening_matrix(s: Array, spec: Any) -> Array:
    if not s.any():  # constant channels: the bias, and gradient 0
        return np.zeros_like(s)
    try:
        if spec.scale == "cholesky":
            return np.asarray(np.linalg.solve(np.linalg.cholesky(s), np.eye(len(s))), dtype=np.float64)
        values, vectors = np.linalg.eigh(s)
    except np.linalg.LinAlgError:  # not positive definite, or not finite
        return np.full_like(s, np.nan)
    if spec.scale == "zca":
        inverse_roots = 1 / np.sqrt(values)
    else:
        trace = values.sum()
        p = np.ones_like(values)
        for _ in range(spec.iterations):
            p = (3 * p - p**3 * values / trace) / 2
        inverse_roots = p / np.sqrt(trace)
    return np.asarray((vectors * inverse_roots) @ vectors.T, dtype=np.float64)


def matrices_by_batch(inputs: Inputs) -> Array:
    """W of each group, by the statistics of the input."""
    return whitening_matrices(covariances(inputs, float(inputs.spec.correction)), inputs.spec, inputs.eps)


def matrices_by_state(inputs: Inputs, var: Array, var_labels: NDArray[np.int64]) -> Array:
    """W of each group, by stored covariances (or stored W)."""
    spec = inputs.spec
    matrices = var if spec.whiten_state == "whitening" else whitening_matrices(var, spec, inputs.eps)
    return matrices[[int(var_labels[part.flat[0]]) if part.size else 0 for part in channel_rows(inputs)]]


def apply(matrices: Array, centered: Array, inputs: Inputs) -> Array:
    """W times the centered elements of each group."""
    value = np.zeros_like(centered)
    for matrix, part in zip(matrices, channel_rows(inputs), strict=True):
        value[part] = matrix @ centered[part]
    return value
