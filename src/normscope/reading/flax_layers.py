"""What the normalization layers of Flax compute, nnx and linen alike: both are written by the same formulas.

``momentum`` is a decay (update fraction 1 - momentum), the stored variance is biased, features are on the last axis
unless said, statistics are at least float32, and the variance is mean(x^2) - mean(x)^2 unless
``use_fast_variance=False``. Source: flax.linen.normalization and flax.nnx.nn.normalization, Flax 0.8 to 0.12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from normscope.reading.base import qualified_name
from normscope.reading.by_class import refuse
from normscope.reading.numbered import channels_at, over_axes
from normscope.spec import Cast, NormSpec, Running, families
from normscope.spec.families.frameworks import update_fraction

FAST = (
    "the variance is mean(x^2) - mean(x)^2, which loses digits where the mean is large beside the deviation "
    "(use_fast_variance=False does not)"
)
SPECTRAL = (
    "divides kernels by their largest singular value, found by power iteration: it has no statistic sets and is "
    "outside the family. Leave it out"
)


def spec_of_layer(layer: Any, kind: str, input_ndim: int | None, *, nnx: bool) -> NormSpec:
    """The specification of a layer of this kind. Raises UnknownNormalization where none holds it."""
    if kind == "SpectralNorm":
        refuse(layer, SPECTRAL)
    spec = _KINDS[kind](layer, input_ndim, nnx)
    if not getattr(layer, "force_float32_reductions", True):
        spec = spec.replace(cast=Cast(compute="input"))
    return spec


def remarks_on(layer: Any, kind: str) -> tuple[str, ...]:
    """What the specification does not say."""
    said = []
    if kind not in ("RMSNorm", "WeightNorm") and layer.use_fast_variance:
        said.append(FAST)
    if getattr(layer, "axis_name", None) is not None:
        said.append(f"statistics are averaged over the devices of axis {layer.axis_name!r}")
    if layer.dtype is not None:
        said.append(f"the output is {_dtype(layer.dtype)} whatever the input is")
    return tuple(said)


def _batch(layer: Any, input_ndim: int | None, nnx: bool) -> NormSpec:
    axes = _axes(layer.axis)
    if len(axes) == 1:
        stats, where = f"{channels_at(axes[0], input_ndim)} -> c", "c"
    else:
        found = None if nnx else _kept(axes, input_ndim)
        if found is None:
            refuse(
                layer, f"keeps the axes {axes}. A linen module is read so with input_ndim, an nnx one raises"
            )
        stats, where = found
    return NormSpec(
        stats,
        ndim=(2, None) if len(axes) == 1 else None,
        weight=where if layer.use_scale else None,
        bias=where if layer.use_bias else None,
        eps=float(layer.epsilon),
        running=Running(momentum=update_fraction(float(layer.momentum)), correction=0),
    )


def _kept(axes: Sequence[int], ndim: int | None) -> tuple[str, str] | None:
    """The pattern that keeps several axes, none of them the first."""
    if ndim is None or any(axis % ndim == 0 for axis in axes):
        return None
    kept = [axis % ndim for axis in axes]
    return over_axes([axis for axis in range(ndim) if axis not in kept], kept, ndim)


def _layer(layer: Any, input_ndim: int | None, nnx: bool) -> NormSpec:
    stats, where = _over(layer, input_ndim)
    return NormSpec(
        stats,
        weight=where if layer.use_scale else None,
        bias=where if layer.use_bias else None,
        eps=float(layer.epsilon),
    )


def _rms(layer: Any, input_ndim: int | None, nnx: bool) -> NormSpec:
    stats, where = _over(layer, input_ndim)
    weight = where if layer.use_scale else None
    return NormSpec(stats, weight=weight, center=False, scale="rms", eps=float(layer.epsilon))


def _over(layer: Any, ndim: int | None) -> tuple[str, str]:
    erased, features = _axes(layer.reduction_axes), _axes(layer.feature_axes)
    if ndim is not None and not all(-ndim <= axis < ndim for axis in (*erased, *features)):
        raise ValueError(
            f"{qualified_name(type(layer))} reduces {erased} with features on {features}, input_ndim is {ndim}."
        )
    found = over_axes(erased, features, ndim)
    if found is None:
        refuse(
            layer, f"reduces {erased} with features on {features}, which depends on the rank. Pass input_ndim"
        )
    return found


def _group(layer: Any, input_ndim: int | None, nnx: bool) -> NormSpec:
    reduced = None if layer.reduction_axes is None else _axes(layer.reduction_axes)
    stats = "b ... (g c) -> b g"
    if reduced is not None and not _all_but_first(reduced, input_ndim):
        own = None if nnx else _grouped(reduced, input_ndim)
        if own is None:
            refuse(
                layer,
                f"reduces the axes {reduced}. Groups over all axes but the first are read, other axes of a linen "
                "module with input_ndim; an nnx module repeats its statistics along axis 1, right for those alone",
            )
        stats = own
    groups = getattr(layer, "num_groups", None)
    return NormSpec(
        stats,
        ndim=(2, None) if "..." in stats else None,
        sizes={"g": int(groups)} if groups is not None else {"c": int(layer.group_size)},
        weight="(g c)" if layer.use_scale else None,
        bias="(g c)" if layer.use_bias else None,
        eps=float(layer.epsilon),
    )


def _all_but_first(axes: Sequence[int], ndim: int | None) -> bool:
    return ndim is not None and {axis % ndim for axis in axes} == set(range(1, ndim))


def _grouped(axes: Sequence[int], ndim: int | None) -> str | None:
    """The pattern over some axes and the channels of a group, which are on the last."""
    if ndim is None or ndim - 1 not in {axis % ndim for axis in axes}:
        return None
    erased = {axis % ndim for axis in axes}
    names = ["b", *(f"x{i}" for i in range(1, ndim - 1))]
    kept = [name for axis, name in enumerate(names) if axis not in erased]
    return f"{' '.join(names)} (g c) -> {' '.join([*kept, 'g'])}"


def _instance(layer: Any, input_ndim: int | None, nnx: bool) -> NormSpec:
    axes = _axes(layer.feature_axes)
    if len(axes) != 1 or axes[0] == 0:
        refuse(layer, f"has features on the axes {axes}; one axis that is not the first is read")
    return families.instance_norm(
        eps=float(layer.epsilon),
        weight=bool(layer.use_scale),
        bias=bool(layer.use_bias),
        layout=channels_at(axes[0], input_ndim),
    )


def _weight(layer: Any, input_ndim: int | None, nnx: bool) -> NormSpec:
    features = _axes(layer.feature_axes)
    if features != [-1]:
        refuse(layer, f"has feature_axes={layer.feature_axes}; the last axis of a kernel is read")
    return NormSpec(
        "... o -> o",
        weight="o" if layer.use_scale else None,
        center=False,
        scale="l2",
        eps=float(layer.epsilon),
    )


def _axes(axes: Any) -> list[int]:
    """Of one number or several; None is none."""
    if axes is None:
        return []
    return [int(axis) for axis in axes] if hasattr(axes, "__iter__") else [int(axes)]


def _dtype(dtype: Any) -> str:
    return str(getattr(dtype, "__name__", None) or dtype)


_KINDS: dict[str, Callable[[Any, int | None, bool], NormSpec]] = {
    "BatchNorm": _batch,
    "LayerNorm": _layer,
    "RMSNorm": _rms,
    "GroupNorm": _group,
    "InstanceNorm": _instance,
    "WeightNorm": _weight,
}
NAMES = (*_KINDS, "SpectralNorm")
