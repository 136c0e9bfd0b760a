"""Reader for the normalization layers of Keras 3, on any backend.

What Keras does otherwise than PyTorch: ``momentum`` is a decay (update fraction 1 - momentum), the stored variance is
biased, ``axis`` is -1 unless given, ``trainable=False`` makes batch normalization use its stored statistics in training
too, and a layer has no mode of its own (each call says ``training=``, evaluation where it says nothing). The
arithmetic is float32 whatever the layer's dtype: ``backend.result_type("float64", "float32")`` is float32.

Source: the ``call`` of each class, Keras 3.0 to 3.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from normscope.reading.base import Reader, Reading, qualified_name
from normscope.reading.by_class import home_of, refuse, refuse_other_methods
from normscope.reading.numbered import channels_at, over_axes
from normscope.spec import Cast, NormSpec, families
from normscope.spec.families.frameworks import update_fraction

if TYPE_CHECKING:
    from normscope.spec.families.layers import Rank

PACKAGE = "keras."
COMPUTES = (
    "__call__",
    "call",
    "_moments",
    "_reshape_into_groups",
    "_apply_normalization",
    "_create_broadcast_shape",
)
VARIABLES = {
    "weight": ("gamma", "scale"),
    "bias": ("beta",),
    "running_mean": ("moving_mean",),
    "running_var": ("moving_variance",),
}
FLOAT32 = Cast(compute="float32")
RENORM = (
    "has renorm=True, which keeps a second pair of statistics for training and averages standard deviations. No "
    "specification holds that. normscope.nn.BatchRenorm2d is batch renormalization with one pair"
)
SQUARES = (
    "on the torch backend the variance is mean(x^2) - mean(x)^2, which loses digits where the mean is large beside the "
    "deviation, and may come out below 0"
)
SPECTRAL = (
    "divides a kernel by its largest singular value, found by power iteration: it has no statistic sets and is outside "
    "the family. Leave it out"
)


def _read(obj: Any, input_ndim: int | None) -> Reading | None:
    home = home_of(obj, PACKAGE, KINDS)
    if home is None:
        return None
    version = str(getattr(sys.modules.get("keras"), "__version__", "3"))
    if version.partition(".")[0] == "2":
        refuse(
            obj,
            f"is a layer of Keras {version}, and Keras 3 is read: its fused kernels store another variance",
        )
    refuse_other_methods(obj, home, COMPUTES)
    return KINDS[home.__qualname__](obj, input_ndim)


def _batch(layer: Any, input_ndim: int | None) -> Reading:
    if getattr(layer, "renorm", False):
        refuse(layer, RENORM)
    ndim = _checked(layer, input_ndim)
    spec = families.batch_norm(
        eps=float(layer.epsilon),
        momentum=update_fraction(float(layer.momentum)),
        weight=bool(layer.scale),
        bias=bool(layer.center),
        running_correction=0,
        layout=channels_at(int(layer.axis), ndim),
        ndim=_rank(layer),
    )
    train, later = ("batch", "running") if layer.trainable else ("frozen", "frozen")
    return _reading(
        layer,
        spec.replace(cast=FLOAT32),
        later,
        train,
        later,
        ("train",) if layer.trainable else (),
        bool(getattr(layer, "synchronized", False)),
    )


def _layer(layer: Any, input_ndim: int | None) -> Reading:
    by_variance = bool(getattr(layer, "rms_scaling", False))
    stats, axes = _over(layer, input_ndim, kernel=not by_variance)
    spec = NormSpec(
        stats,
        eps=float(layer.epsilon),
        weight=axes if layer.scale or by_variance else None,
        bias=axes if layer.center and not by_variance else None,
        center=not by_variance,  # rms_scaling divides by the deviation about the mean, and subtracts nothing
        cast=FLOAT32,
    )
    return _reading(layer, spec)


def _rms(layer: Any, input_ndim: int | None) -> Reading:
    stats, axes = _over(layer, input_ndim, kernel=True)
    return _reading(
        layer,
        NormSpec(stats, center=False, scale="rms", eps=float(layer.epsilon), weight=axes, cast=FLOAT32),
    )


def _unit(layer: Any, input_ndim: int | None) -> Reading:
    stats, _ = _over(layer, input_ndim, kernel=False)
    return _reading(layer, NormSpec(stats, center=False, scale="l2", eps=1e-12, eps_at="max"))


def _group(layer: Any, input_ndim: int | None) -> Reading:
    ndim = _checked(layer, input_ndim)
    axis, groups = int(layer.axis), int(layer.groups)
    if axis == 0 or (ndim is not None and axis % ndim == 0):
        refuse(layer, "has its groups on axis 0, which holds the samples. Keras raises there, or mixes them")
    settings: dict[str, Any] = {
        "eps": float(layer.epsilon),
        "weight": bool(layer.scale),
        "bias": bool(layer.center),
        "ndim": _rank(layer),
    }
    if groups == -1:  # as many as channels, known from the first input on
        spec = families.instance_norm(layout=channels_at(axis, ndim), **settings)
    else:
        spec = families.group_norm(groups, layout=channels_at(axis, ndim, "(g c)"), **settings)
    return _reading(layer, spec.replace(cast=FLOAT32))


def _spectral(layer: Any, input_ndim: int | None) -> Reading:
    refuse(layer, SPECTRAL)


KINDS: dict[str, Callable[[Any, int | None], Reading]] = {
    "BatchNormalization": _batch,
    "LayerNormalization": _layer,
    "RMSNormalization": _rms,
    "GroupNormalization": _group,
    "UnitNormalization": _unit,
    "SpectralNormalization": _spectral,
}


def _reading(
    layer: Any,
    spec: NormSpec,
    now: str = "input",
    train: str = "input",
    later: str = "input",
    updates: tuple[str, ...] = (),
    synchronized: bool = False,
) -> Reading:
    tensors = {name: variable.value for name, variable in variables_of(layer).items()}
    by_moments = train == "batch" or hasattr(layer, "groups")  # batch and group norm; layer norm has a kernel
    remarks = (SQUARES,) if by_moments and sys.modules["keras"].backend.backend() == "torch" else ()
    return Reading(
        spec, qualified_name(type(layer)), tensors, now, train, later, updates, synchronized, remarks
    )


def variables_of(layer: Any) -> dict[str, Any]:
    """weight, bias, running_mean, running_var: the Keras variables that a built layer has; none before."""
    found = {}
    for name, own in VARIABLES.items():
        held = next((v for v in (getattr(layer, n, None) for n in own) if hasattr(v, "path")), None)
        if held is not None:
            found[name] = held
    return found


def _over(layer: Any, input_ndim: int | None, *, kernel: bool) -> tuple[str, str]:
    """The pattern and the axes of the parameters. ``kernel``: torch's, on that backend, where Keras may use it."""
    axes = [int(a) for a in layer.axis] if isinstance(layer.axis, list | tuple) else [int(layer.axis)]
    ndim = input_ndim
    if len({axis < 0 for axis in axes}) > 1:
        refuse(
            layer,
            f"names its axes from both ends, {axes}, and Keras then lays out its gain in another order than the axes. "
            "Count all of them from one end",
        )
    if ndim is not None and not all(-ndim <= axis < ndim for axis in axes):
        raise ValueError(f"{qualified_name(type(layer))} has axis {axes}, input_ndim is {ndim}.")
    if kernel and sys.modules["keras"].backend.backend() == "torch":
        _refuse_torch_kernel(layer, axes, ndim)
    found = over_axes(axes, axes, ndim)
    assert found is not None  # axes from one end always have a pattern
    return found


def _refuse_torch_kernel(layer: Any, axes: Sequence[int], ndim: int | None) -> None:
    """Keras hands neighbouring axes to torch's kernel, which takes the last axes whatever their numbers."""
    built = (getattr(layer, "_build_shapes_dict", None) or {}).get("input_shape")
    rank = ndim or (None if built is None else len(built))
    neighbours = list(axes) == list(range(axes[0], axes[0] + len(axes)))
    last = axes[-1] == -1 or (rank is not None and axes[-1] == rank - 1)
    if neighbours and not last:
        refuse(
            layer,
            f"has axis {list(axes)}, and on the torch backend Keras gives it to a kernel that normalizes over the last "
            "axes: it raises, or where sizes are equal normalizes over another axis. Move the axis to the end, or run "
            "Keras on another backend",
        )


def _checked(layer: Any, input_ndim: int | None) -> int | None:
    """The number of axes of an input, where it is given or the layer was built for one."""
    rank = _rank(layer)
    built = rank[0] if rank is not None and rank[0] == rank[1] else None
    if input_ndim is not None and built is not None and built != input_ndim:
        raise ValueError(
            f"{qualified_name(type(layer))} was built for an input of {built} axes, input_ndim is {input_ndim}."
        )
    return input_ndim or built


def _rank(layer: Any) -> Rank:
    """The numbers of axes that it takes: that which it was built for, else two and more."""
    built = getattr(getattr(layer, "input_spec", None), "ndim", None)
    return (2, None) if built is None else (int(built), int(built))


READER = Reader(
    needs="keras",
    knows=(
        "keras.layers.BatchNormalization",
        "keras.layers.LayerNormalization",
        "keras.layers.RMSNormalization",
        "keras.layers.GroupNormalization",
        "keras.layers.UnitNormalization",
    ),
    read=_read,
)
