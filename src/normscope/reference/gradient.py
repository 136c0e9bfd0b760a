"""Gradients by closed formulas: the backward of every scalar normalization, written out once (whitening: whitened.py).

With u = numerator, w = argument, N = divisor, n = count of a set, s = s(v) its denominator, s' = ds/dv,
y_i = a_i u_i / s + b_i, and v = sum_j w_j^2 / N:

    dy_i/dx_j = a_i / s (delta_ij - c/n) - a_i u_i / s^2 * 2 s' w_j / N        for i, j in one set, else 0

where c is 1 with centering and 0 without. (Under a variance sum_j w_j = 0, so the mean's own motion drops out of v.)
For sqrt(v + eps), biased, this is the known a_i / s (delta_ij - 1/n - x_hat_i x_hat_j / n). Contracted with a
gradient g, and h = a g:

    dx_j = (h_j - c mean(h)) / s - 2 s' w_j sum_i(h_i u_i) / (s^2 N)
    dweight = sum gain g x_hat,  dbias = sum g        over the elements that share an entry

So the backward needs, saved: u (or x and mean), s, and for a denominator that is not sqrt(v + eps) also s'.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from normscope.reference.inputs import affine, read
from normscope.reference.moments import Array, total
from normscope.reference.normalized import Normalized, normalized
from normscope.reference.whitened import Whitened, pull_back, whiten
from normscope.reference.whitening import METHODS


def _pull(n: Normalized) -> Array:
    """2 s' / (s^2 N) of each set: how strongly the denominator answers. 0 where statistics are stored."""
    return np.where(n.slope == 0, 0.0, 2 * n.slope / (n.s * n.s * n.divisor))


def vjp(
    grad: ArrayLike,
    x: ArrayLike,
    spec: Any,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    running: Any = None,
    training: bool = True,
    mask: ArrayLike | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """Gradients of sum(grad * forward(x, ...)) with respect to x, weight and bias.

    Arguments as in :func:`forward`; ``grad`` has the shape of ``x``. Statistics of the batch move with x; stored
    ones do not, and neither do r and d of batch renormalization. What is masked gives and gets no gradient.

    Returns float64 arrays of the shapes of x, weight and bias; None for a parameter that was not given.

    >>> from normscope.spec import families
    >>> dx, _, _ = vjp([1.0, 0.0, 0.0], [1.0, 2.0, 4.0], families.layer_norm(eps=0.1))
    >>> dx.round(10)
    array([ 0.23993836, -0.32861123,  0.08867287])
    """
    inputs = read(x, spec, mask)
    parameters = affine(inputs, weight, bias)
    g = np.asarray(grad, dtype=np.float64)
    if g.shape != inputs.axes.shape:
        raise ValueError(f"the gradient has the shape of the input, {inputs.axes.shape}; got {g.shape}")
    g = np.where(inputs.valid, g.ravel(), 0.0)
    with np.errstate(all="ignore"):
        h = np.where(inputs.valid, parameters.factor * g, 0.0)  # a NaN weight of masked elements stays theirs
        n: Whitened | Normalized
        if spec.scale in METHODS:
            n = whiten(inputs, running, training)
            dx = pull_back(n, h, inputs)
        else:
            n = normalized(inputs, running, training)
            dx = _pull_back(n, h, bool(spec.center))
        dx = np.where(inputs.valid, dx, 0.0).reshape(inputs.axes.shape)
        w, b = parameters.weight, parameters.bias
        dweight = None if w is None else w.collect(np.where(inputs.valid, g * parameters.gain * n.value, 0.0))
    return dx, dweight, None if b is None else b.collect(g)


def _pull_back(n: Normalized, h: Array, center: bool) -> Array:
    """dx of every element from h = a g."""
    dx = h / n.s[n.labels]
    if not n.live:
        return dx
    if center:
        dx = dx - (total(h, n.labels, n.sets) / (n.count * n.s))[n.labels]
    dx = dx - (total(h * n.numerator, n.labels, n.sets) * _pull(n))[n.labels] * n.argument
    return dx * n.stretch[n.labels]


def jacobian(
    x: ArrayLike,
    spec: Any,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    running: Any = None,
    training: bool = True,
    mask: ArrayLike | None = None,
) -> Array:
    """dy/dx from the closed formula, dense: shape (*y.shape, *x.shape), zero between sets.

    Arguments as in :func:`forward`. Takes x.size^2 numbers: for inputs of up to a few thousand elements.

    >>> from normscope.spec import families
    >>> jacobian([1.0, 2.0, 4.0], families.layer_norm(eps=0.1)).round(4)
    array([[ 0.2399, -0.3286,  0.0887],
           [-0.3286,  0.5007, -0.1721],
           [ 0.0887, -0.1721,  0.0835]])
    """
    inputs = read(x, spec, mask)
    a = affine(inputs, weight, bias).factor
    with np.errstate(all="ignore"):
        if spec.scale in METHODS:
            w = whiten(inputs, running, training)
            rows = [pull_back(w, row, inputs) for row in np.diag(np.where(inputs.valid, a, 0.0))]
            dense = np.where(inputs.valid, np.array(rows), 0.0)
            return dense.reshape(inputs.axes.shape * 2)
        n = normalized(inputs, running, training)
        s = n.s[n.labels]
        dense = np.diag(1 / s)
        if n.live:
            together = n.labels[:, None] == n.labels
            if spec.center:
                dense = dense - np.where(together, 1 / (n.count[n.labels] * s)[:, None], 0.0)
            dense = dense - np.where(together, np.outer(n.numerator * _pull(n)[n.labels], n.argument), 0.0)
            dense = dense * n.stretch[n.labels][:, None]
        dense = a[:, None] * dense
        dense = np.where(inputs.valid[:, None] & inputs.valid, dense, 0.0)
    return dense.reshape(inputs.axes.shape * 2)
