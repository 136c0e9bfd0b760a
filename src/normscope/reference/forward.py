"""Forward and statistics of every specification."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normscope.reference.inputs import affine, read
from normscope.reference.moments import Array, moments
from normscope.reference.normalized import normalized
from normscope.reference.whitened import whiten
from normscope.reference.whitening import METHODS, covariances, group_names


def forward(
    x: ArrayLike,
    spec: Any,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    running: Any = None,
    training: bool = True,
    mask: ArrayLike | None = None,
) -> Array:
    """y = (offset + weight) * gain * (x - mean) / denominator + bias, in float64.

    Arguments:
        x: input of any shape that the spec fits, any real dtype.
        spec: a specification, read by the names of its fields. ``cast`` does not matter here, save that it says whose
            machine epsilon ``eps=None`` is.
        weight, bias: of the shapes that the spec says, or None: a factor of 1, and no bias.
        running: stored ``mean`` and ``var``, for ``training=False`` and for batch renormalization. Never written.
        training: with a spec that has running statistics: normalize by the batch (True) or by ``running`` (False).
        mask: boolean, broadcastable to ``x``. Only True elements enter statistics, with exact counts; the output is
            0 elsewhere, and nothing that stands there, NaN included, reaches the rest.

    Returns an array of the shape of ``x``. A constant set gives exactly the bias where eps is above 0; NaN and infinite
    elements spoil their own set and no other. Raises ValueError where shapes do not fit, or ``running`` is missing.

    >>> from normscope.spec import families
    >>> forward([1.0, 2.0, 4.0], families.layer_norm(eps=0.0)).round(4)
    array([-1.069 , -0.2673,  1.3363])
    """
    inputs = read(x, spec, mask)
    parameters = affine(inputs, weight, bias)
    with np.errstate(all="ignore"):  # 0/0 of a constant set without eps is a result, not an accident
        n = (whiten if spec.scale in METHODS else normalized)(inputs, running, training)
        return np.where(inputs.valid, parameters.apply(n.value), 0.0).reshape(inputs.axes.shape)


def statistics(
    x: ArrayLike, spec: Any, mask: ArrayLike | None = None
) -> tuple[Array, Array, NDArray[np.int64]]:
    """Mean, v and number of elements of every statistic set, in the shape of the kept axes.

    v is what stands under the root before eps: the variance (with the spec's correction), the mean square, or the sum
    of squares; with whitening it is the covariance, with two axes of the whitened channels at its end in place of
    theirs. An empty set has mean 0, v 0 and count 0.

    >>> from normscope.spec import families
    >>> statistics([[1.0, 2.0, 6.0], [0.0, 0.0, 0.0]], families.layer_norm())
    (array([3., 0.]), array([4.66666667, 0.        ]), array([3, 3]))
    """
    inputs = read(x, spec, mask)
    shape = inputs.kept_shape
    with np.errstate(all="ignore"):
        m = moments(inputs.x, inputs.labels, inputs.sets, inputs.valid)
        if spec.scale in METHODS:
            v = covariances(inputs, float(spec.correction))
            v_shape = (*inputs.axes.extent((name,) for name in group_names(inputs)), *v.shape[1:])
        else:
            v, v_shape = m.under_root(spec, inputs.x)[0], shape
    return m.mean.reshape(shape), v.reshape(v_shape), m.count.reshape(shape)
