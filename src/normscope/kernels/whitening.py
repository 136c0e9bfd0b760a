"""Whitening in torch: y = W (x - mean) with W S W^T = 1, S the covariance made regular by eps.

Everything here has one matrix a group, a cell of the kept axes that are not whitened: (groups, k, k) for k channels,
and works on elements as (groups, k, members). Matrices are float64 where the device has it.
"""

from __future__ import annotations

from math import nan, prod

import torch
from torch import Tensor
from torch.compiler import is_compiling

from normscope.errors import BadInput
from normscope.kernels.elementary import Elementary, divisor, names_of, shape_on, wide

CHORDS = 3
"""steps that give `inverse_root` its derivatives: one an order"""


def group_names(view: Elementary) -> list[str]:
    """The kept axes that are not whitened."""
    return [axis.name for axis in view.axes if axis.kept and axis.name not in view.spec.whiten.split()]


def by_batch(view: Elementary, centered: Tensor, count: int | Tensor) -> Tensor:
    """W (x - mean) by the covariance of the input; ``centered`` is the input where the spec does not center."""
    x = centered if view.spec.center else view.x
    return applied(matrices(view, covariance(view, x, count, float(view.spec.correction))), x, view)


def by_state(view: Elementary, numerator: Tensor, stored: Tensor) -> Tensor:
    """W times ``numerator``, with stored covariances (or stored W) of each group."""
    w = stored if view.spec.whiten_state == "whitening" else matrices(view, semidefinite(stored))
    return applied(w, numerator, view)


def to_store(view: Elementary, centered: Tensor, count: int | Tensor, correction: float) -> Tensor:
    """What running state follows: covariances or W, with the axes of `group_names` before those of the matrix."""
    found = covariance(view, centered if view.spec.center else view.x, count, correction)
    if view.spec.whiten_state == "whitening":
        w = matrices(view, found)
        if (
            view.spec.eps == 0
            and not (is_compiling() or w.is_meta)
            and (found.isfinite() & ~w.isfinite()).any()
        ):
            raise BadInput(
                "whitening with eps=0 that stores W needs a covariance with an inverse; got channels that are constant "
                "or combinations of others. Give an eps such as 1e-5."
            )
        found = w
    sizes = {axis.name: axis.size for axis in view.axes}
    return found.reshape(*(sizes[name] for name in group_names(view)), *found.shape[1:])


def stored_shape(view: Elementary, where: str) -> tuple[int, ...]:
    """Shape of stored matrices: the axes that the state lives on, whitened ones last and twice."""
    sizes = {axis.name: axis.size for axis in view.axes}
    joint = shape_on(view.spec.whiten, view.axes)
    return (*(sizes[name] for name in _state_names(view, where)), *joint, *joint)


def spread(view: Elementary, stored: Tensor, where: str) -> Tensor:
    """Stored matrices, one for each group."""
    groups, lives = group_names(view), _state_names(view, where)
    sizes = {axis.name: axis.size for axis in view.axes}
    k = prod(shape_on(view.spec.whiten, view.axes))
    order = sorted(range(len(lives)), key=lambda i: groups.index(lives[i]))
    split = stored.reshape(*(sizes[name] for name in lives), k, k).permute(*order, -2, -1)
    split = split.reshape(*(sizes[name] if name in lives else 1 for name in groups), k, k)
    return split.expand(*(sizes[name] for name in groups), k, k).reshape(-1, k, k)


def covariance(view: Elementary, x: Tensor, count: int | Tensor, correction: float) -> Tensor:
    """x x^T / (n - correction) of each group; 0 of an empty one."""
    rows = as_rows(x.to(wide(x)), view)
    number = divisor(count, correction)
    if isinstance(number, Tensor):
        assert view.mask is not None  # or the count were a number
        one_mask(view)
        number = number.expand([axis.size if axis.kept else 1 for axis in view.axes])
        number = as_rows(number, view)[:, :1, :1]
    return rows @ rows.mT / number


def matrices(view: Elementary, s: Tensor) -> Tensor:
    """W of each covariance; 0 where that is 0 and no eps is added, and NaN where there is none.

    - ``zca``: S^(-1/2), the symmetric one.
    - ``cholesky``: L^-1 with S = L L^T, lower triangular.
    - ``iternorm``: Newton's steps towards S^(-1/2), P <- (3 P - P^3 S / t) / 2 from P = 1, and W = P / sqrt(t) with t
      the trace of S (Huang et al. 2019, algorithm 1). M = P^2 S / t is carried along, so that P <- P (3 - M) / 2: the
      same numbers, but roundings do not grow from step to step (Guo and Higham 2006, A Schur-Newton method for the
      matrix p-th root and its inverse).
    """
    spec, k = view.spec, s.shape[-1]
    one = torch.eye(k, dtype=s.dtype, device=s.device)
    trace = s.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    s = s + view.eps * one * (trace / k if spec.eps_at == "trace" else 1.0)
    nothing = torch.zeros_like(trace, dtype=torch.bool)
    if (
        spec.eps == 0 or spec.eps_at == "trace"
    ):  # constant channels have no direction: they give the bias, gradient 0
        nothing = trace == 0
        s = torch.where(nothing, one, s)
    sound = torch.isfinite(s).all(-1).all(-1)[:, None, None]
    s = torch.where(sound, s, one)  # LAPACK refuses what is not finite
    if spec.scale == "iternorm":
        trace = s.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        p, m = one.expand(s.shape), s / trace
        for _ in range(spec.iterations):
            step = (3 * one - m) / 2
            p, m = p @ step, step @ m @ step
        w = p / trace.sqrt()
    elif spec.scale == "cholesky":
        root, failed = torch.linalg.cholesky_ex(s)
        failed = (failed != 0)[:, None, None]
        w = torch.linalg.solve_triangular(torch.where(failed, one, root), one, upper=False)
        w = w.masked_fill(failed, nan)
    else:
        w = inverse_root(s)
    return w.masked_fill(~sound, nan).masked_fill(nothing, 0.0)


def semidefinite(s: Tensor) -> Tensor:
    """Covariances as they were before float32 rounded them: a rounding of the largest is more than a small eps, and can
    leave a negative eigenvalue, which no variance is. Those that have none stay bit for bit.

    >>> semidefinite(torch.tensor([[[1.0, 0.0], [0.0, -1e-3]], [[2.0, 1.0], [1.0, 2.0]]])).flatten().tolist()
    [1.0, 0.0, 0.0, 0.0, 2.0, 1.0, 1.0, 2.0]
    """
    sound = torch.isfinite(s).all(-1).all(-1)[:, None, None]
    values, vectors = torch.linalg.eigh(s.masked_fill(~sound, 0.0))
    nearest = (vectors * values.clamp(min=0)[:, None, :]) @ vectors.mT
    return torch.where(values[:, :1, None] < 0, nearest, s)


def inverse_root(s: Tensor) -> Tensor:
    """S^(-1/2) of symmetric positive matrices, with derivatives also where eigenvalues coincide.

    The eigenvectors themselves have no derivative there. So W comes from them as a constant, and then takes steps of
    a Newton iteration for W S W = 1 whose operator, D -> D R + R D with R = S^(1/2), stays where it is: each step
    leaves the value and makes one more order of derivatives right.

    >>> inverse_root(torch.diag(torch.tensor([4.0, 0.25]))[None])
    tensor([[[0.5000, 0.0000],
             [0.0000, 2.0000]]])
    """
    values, vectors = torch.linalg.eigh(s.detach())
    r = values.sqrt()
    w: Tensor = (vectors / r[:, None, :]) @ vectors.mT
    for _ in range(CHORDS):
        left = vectors.mT @ (w @ s @ w - torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)) @ vectors
        w = w - vectors @ (left / (r[:, :, None] + r[:, None, :])) @ vectors.mT
    return w


def applied(w: Tensor, x: Tensor, view: Elementary) -> Tensor:
    """W times the elements of each group."""
    order, shape = _order(view), x.shape
    with torch.autocast(x.device.type, enabled=False):  # the dtype of the arithmetic is the spec's
        y = w.to(x.dtype) @ as_rows(x, view)
    back = sorted(range(len(order)), key=order.__getitem__)
    return y.reshape([shape[i] for i in order]).permute(back)


def as_rows(x: Tensor, view: Elementary) -> Tensor:
    """Elements as (groups, channels, members)."""
    sizes = {axis.name: x.shape[i] for i, axis in enumerate(view.axes)}
    joint = prod([sizes[name] for name in view.spec.whiten.split()])
    groups = prod([sizes[name] for name in group_names(view)])
    members = prod([sizes[axis.name] for axis in view.axes if not axis.kept])
    return x.permute(_order(view)).reshape(groups, joint, members)


def _order(view: Elementary) -> list[int]:
    """Groups, then whitened axes as the spec names them, then erased ones."""
    names = [axis.name for axis in view.axes]
    first = [names.index(name) for name in [*group_names(view), *view.spec.whiten.split()]]
    return first + [i for i in range(len(names)) if i not in first]


def _state_names(view: Elementary, where: str) -> list[str]:
    return [name for name in names_of(where, view.axes) if name in group_names(view)]


def one_mask(view: Elementary) -> None:
    """Raise BadInput where a mask is not one for all channels that are whitened together."""
    assert view.mask is not None
    rows = as_rows(view.mask, view)
    if bool((rows != rows[:, :1]).any()):
        raise BadInput(
            "a mask holds for all channels that are whitened together; got one that differs along "
            f"{view.spec.whiten!r}"
        )
