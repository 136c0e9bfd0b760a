"""Any normalization in plain torch: the readable form of what the native kernels compute.

    y = (offset + weight) * gain * (x - mean) / denominator + bias

Every step is a torch operation that has derivatives of any order, so that vmap, jvp, jacrev, double backward and
torch.compile work, on any device. Gradients are those of `normscope.reference`: statistics of the batch move with x,
stored ones do not, and neither do r and d of batch renormalization.

How exact it is: sums run in float64 (float32 where the device has none), and a mean is taken in two steps. A pivot
near the mean is taken off first, which leaves small numbers with all their digits; then what is left of the mean. A
constant set centers to exactly 0 whatever its level, and the level of x costs no digits.

Where the slope of a denominator is infinite or has two values it is 0, as in the reference: sqrt(v) + eps at v = 0,
max(sqrt(v), eps) and sqrt(max(v, eps)) at the corner. So a constant set has a finite gradient where eps is above 0,
wherever eps stands. Without eps a constant set is 0 / 0, NaN, and so is its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from normscope.errors import BadInput
from normscope.kernels import whitening
from normscope.kernels.elementary import Elementary, divisor, place, shape_on, wide
from normscope.kernels.follow import follow, stored
from normscope.spec import NormSpec, RunningState


def normalize(
    x: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    running: RunningState | None = None,
    training: bool = True,
    mask: Tensor | None = None,
    momentum: float | Tensor | None = None,
    limits: tuple[float | Tensor, float | Tensor] | None = None,
) -> Tensor:
    """Normalize as the specification says.

    Arguments:
        x: floating point input of any shape that the spec fits.
        weight, bias: of the shapes that the spec says, or None: a factor of 1, and no bias. Any floating dtype.
        running: stored statistics, tensors; read with ``training=False`` and under batch renormalization, and updated
            in place with ``training=True``, where the spec has running statistics.
        training: normalize by the batch (True) or by ``running`` (False). Without running statistics in the spec it
            means nothing.
        mask: boolean, broadcastable to ``x``. Only True elements enter statistics, with exact counts; the output is 0
            elsewhere, and nothing that stands there, NaN included, reaches outputs or gradients.
        momentum: the update fraction, in place of the one that ``spec.running`` says.
        limits: r_max and d_max of batch renormalization, in place of ``spec.running.renorm``; tensors where they follow
            a counter.

    Returns a tensor of the shape and dtype of ``x``. Half types are computed in float32 unless ``spec.cast`` says else.

    Raises BadInput where dtypes or shapes of the arguments do not fit, PatternError where the shape of ``x`` does not
    fit the pattern.

    >>> import torch
    >>> from normscope.spec import families
    >>> normalize(torch.tensor([1.0, 2.0, 4.0]), families.layer_norm(eps=0.0))
    tensor([-1.0690, -0.2673,  1.3363])
    """
    view = Elementary.of(x, spec, mask)
    if spec.running is not None and not training:
        mean, var = stored(view, running)
        return finish(_by_state(view, mean, var), view, weight, bias)
    m = Moments.of(view)
    if spec.whiten:
        value = whitening.by_batch(view, m.centered, m.count)
    else:
        value = _by_batch(view, m, running, limits)
    y = finish(value, view, weight, bias)
    if spec.running is not None and running is not None:
        follow(running, view, m, spec.running.momentum if momentum is None else momentum)
    return y


def fixed(
    x: Tensor,
    spec: NormSpec,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Normalize by given statistics, an affine map of every element.

    Arguments:
        mean, var: on the axes of ``spec.running_axes``; with a whitening scale ``var`` holds matrices.

    >>> import torch
    >>> from normscope.spec import families
    >>> x, mean, var = torch.tensor([[3.0], [5.0]]), torch.tensor([1.0]), torch.tensor([4.0])
    >>> fixed(x, families.batch_norm(eps=0.0), mean, var)
    tensor([[1.],
            [2.]])
    """
    view = Elementary.of(x, spec, None)
    return finish(_by_state(view, *stored(view, RunningState(mean, var))), view, weight, bias)


@dataclass(frozen=True)
class Moments:
    """Count, mean and centered elements of every statistic set."""

    count: int | Tensor
    """elements of each set: one number, or under a mask a tensor; 0 where a set is empty"""
    mean: Tensor
    centered: Tensor
    """x - mean, 0 where it is masked"""

    @staticmethod
    def of(view: Elementary) -> Moments:
        """Two steps about a pivot, see the head of this file. The pivot takes no part in the gradient."""
        if view.mask is None:
            count: int | Tensor = prod([axis.size for axis in view.axes if not axis.kept])
            number: int | Tensor = max(count, 1)
        else:
            count = view.total(view.mask)
            number = count.clamp(min=1)
        pivot = (view.total(view.x) / number).detach().to(view.x.dtype)
        shifted = view.only(view.x - pivot)
        rest = view.total(shifted) / number
        centered = view.only(shifted - rest.to(view.x.dtype))
        return Moments(count, pivot + rest, centered)

    def variance(self, view: Elementary, correction: float) -> Tensor:
        """Sum of squares about the mean over n - correction; 0 of an empty set, NaN where n is not above it."""
        return view.total(self.centered.to(wide(view.x)).square()) / divisor(self.count, correction)

    def under_root(self, view: Elementary) -> Tensor:
        """v of each set: the variance about the mean always, mean square and sum of squares of what is divided."""
        spec = view.spec
        if spec.scale == "std":
            return self.variance(view, float(spec.correction))
        squares = view.total((self.centered if spec.center else view.x).to(wide(view.x)).square())
        return squares if spec.scale == "l2" else squares / divisor(self.count, 0.0)


def denominator(v: Tensor, eps: float, eps_at: str) -> Tensor:
    """sqrt(v + eps), sqrt(v) + eps, max(sqrt(v), eps) or sqrt(max(v, eps)), with slopes as the head of this file says.

    >>> import torch
    >>> v = torch.tensor([0.0, 4.0])
    >>> [denominator(v, 1.0, at).tolist() for at in ("std", "max", "max_variance")]
    [[1.0, 3.0], [1.0, 2.0], [1.0, 2.0]]
    """
    if eps_at == "variance":
        return (v + eps).sqrt()
    # comparisons are False for NaN, which so goes through the root
    still = {"std": v == 0, "max": v.sqrt() <= eps, "max_variance": v <= eps}[eps_at]
    root = v.masked_fill(still, 1.0).sqrt()
    if eps_at == "std":
        return root.masked_fill(still, 0.0) + eps
    return root.masked_fill(still, eps if eps_at == "max" else max(eps, 0.0) ** 0.5)


def _by_batch(
    view: Elementary,
    m: Moments,
    running: RunningState | None,
    limits: tuple[float | Tensor, float | Tensor] | None,
) -> Tensor:
    spec = view.spec
    s = denominator(m.under_root(view), view.eps, spec.eps_at)
    value = (m.centered if spec.center else view.x) / s.to(view.x.dtype)
    if spec.running is not None and spec.running.renorm is not None:
        r_max, d_max = limits or spec.running.renorm
        mean, var = stored(view, running)
        sigma = denominator(var, view.eps, spec.eps_at)
        r = _within(s.detach() / sigma, 1 / r_max, r_max)
        d = _within((m.mean.detach() - mean) / sigma, -d_max, d_max)
        value = value * r.to(value.dtype) + d.to(value.dtype)
    return value


def _within(value: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    return value.clamp(low, high)  # type: ignore[arg-type]  # two numbers or two tensors, never one of each


def _by_state(view: Elementary, mean: Tensor, var: Tensor) -> Tensor:
    numerator = view.only(view.x - mean.to(view.x.dtype)) if view.spec.center else view.x
    if view.spec.whiten:
        return whitening.by_state(view, numerator, var)
    return numerator / denominator(var, view.eps, view.spec.eps_at).to(view.x.dtype)


def finish(value: Tensor, view: Elementary, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Weight, gain and bias on their axes; casts; the shape of the input."""
    spec = view.spec
    value = view.only(value)  # the weight's gradient, too, must not see what is masked
    if spec.cast.weight == "after":
        value = value.to(view.dtype).to(view.x.dtype)
    if weight is not None:
        w = _parameter("weight", weight, spec.weight, view)
        value = value * ((w + spec.weight_offset if spec.weight_offset else w) * spec.gain)
    elif spec.gain != 1:
        value = value * spec.gain
    if bias is not None:
        value = value + _parameter("bias", bias, spec.bias, view)
    return view.close(view.only(value))


def _parameter(kind: str, value: Tensor, where: str | None, view: Elementary) -> Tensor:
    if where is None:
        raise BadInput(
            f"a spec without {kind} takes none; got one of shape {tuple(value.shape)}. Name the axes it lives on in "
            f"spec.{kind}"
        )
    shape = shape_on(where, view.axes)
    if value.shape != shape and not (shape == () and value.numel() == 1):
        raise BadInput(
            f"the {kind} on {where!r} of an input of shape {view.shape} has shape {shape}; got {tuple(value.shape)}"
        )
    return place(value.to(view.x.dtype), where, view.axes)
