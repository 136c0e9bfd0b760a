"""How the layer of another framework is made that computes what a torch layer does, on data as torch lays it out."""

from __future__ import annotations

from typing import Any

from normscope.errors import BadInput
from normscope.reading import Reading, UnknownNormalization
from normscope.spec import NormSpec

LAYER, CHANNELS = "layer", "channels"
KINDS = {
    "b c ... -> c": "batch",
    "b c ... -> b c": "instance",
    "b (g c) ... -> b g": "group",
    "b c ... -> b ...": CHANNELS,
}
CLASSES = {
    "keras": {
        "batch": "BatchNormalization",
        LAYER: "LayerNormalization",
        CHANNELS: "LayerNormalization",
        "group": "GroupNormalization",
        "instance": "GroupNormalization",
        "rms": "RMSNormalization",
        "l2": "UnitNormalization",
    },
    "flax": {
        "batch": "BatchNorm",
        LAYER: "LayerNorm",
        CHANNELS: "LayerNorm",
        "group": "GroupNorm",
        "instance": "InstanceNorm",
        "rms": "RMSNorm",
    },
}


def settings_of(reading: Reading, target: str) -> dict[str, Any]:
    """The class under ``"class"``, and its arguments. Raises UnknownNormalization where the target has none."""
    spec = reading.spec
    kind = _kind(spec)
    flax = target != "keras"
    name = CLASSES["flax" if flax else "keras"].get(kind or "")
    if name is None or (kind == "instance" and spec.running is not None):
        raise UnknownNormalization(
            f"{'Flax' if flax else 'Keras'} has no layer for {spec}. Say which layer it shall be, and port the state."
        )
    if why := _beyond(reading, kind):
        raise UnknownNormalization(
            f"{'Flax' if flax else 'Keras'} has no layer like {reading.type_name}: {why}. Where that may go, port the "
            "state, which says nothing of it."
        )
    found: dict[str, Any] = {"class": name}
    if kind != "l2":
        found["epsilon"] = 2.0**-23 if spec.eps is None else spec.eps
    if kind == "batch":
        found |= _running(spec, reading, flax)
    if not flax:
        return found | _keras(spec, kind)
    return found | _flax(spec, kind)


def _beyond(reading: Reading, kind: str | None) -> str:
    """What neither Keras nor Flax can be told, "" where there is nothing."""
    spec = reading.spec
    if spec.source != "parameter":
        return "its gain and bias are computed from an input"
    own = {"batch": "c", "instance": "c", CHANNELS: "c", "group": "(g c)"}.get(
        kind or "", " ".join(spec.pattern.erased)
    )
    if any(where not in (None, own) for where in (spec.weight, spec.bias)):
        return f"its weight lives on {spec.weight!r}, its bias on {spec.bias!r}, and theirs on {own!r}"
    if kind == "rms" and spec.bias is not None:
        return "their RMS norms add no bias"
    if kind != "batch":
        return ""
    if spec.running is None or "running_mean" not in reading.tensors or reading.mode_eval == "batch":
        return "it normalizes by the batch in evaluation too"
    if reading.mode_train == "batch" and "train" not in reading.updates:
        return "it normalizes by the batch in training and moves no stored statistics"
    if spec.running.renorm is not None:
        return (
            "batch renormalization bends the statistics of a batch towards the stored ones (r and d), so training "
            "would compute another function"
        )
    if spec.running.averages != "variance":
        return "its stored variance is an average of denominators"
    return ""


def _running(spec: NormSpec, reading: Reading, flax: bool) -> dict[str, Any]:
    assert spec.running is not None
    if spec.running.momentum is None:
        raise BadInput(
            "momentum=None averages all batches alike, and Keras and Flax only forget by a decay. Set a momentum first."
        )
    decay = {"momentum": float(f"{1 - spec.running.momentum:.12g}")}
    if flax:
        return {**decay, "use_running_average": reading.mode_now != "batch"}
    return {**decay, "trainable": reading.mode_now != "frozen"}


def _keras(spec: NormSpec, kind: str | None) -> dict[str, Any]:
    last = [*range(-len(spec.pattern.erased), 0)]
    axis: Any = (last if len(last) > 1 else -1) if kind in (LAYER, "rms", "l2") else 1
    found: dict[str, Any] = {"axis": axis}
    if kind == "instance":
        found["groups"] = -1
    if kind == "group":
        found["groups"] = spec.sizes["g"]
    if kind not in ("rms", "l2"):
        found |= {"center": spec.bias is not None, "scale": spec.weight is not None}
    return found


def _flax(spec: NormSpec, kind: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"use_scale": spec.weight is not None}
    if kind != "rms":
        found["use_bias"] = spec.bias is not None
    if kind == "batch":
        found["axis"] = 1
    elif kind == "instance":
        found["feature_axes"] = 1
    elif kind == "group":
        found["num_groups"] = spec.sizes["g"]  # of channels on the last axis
    else:
        erased = spec.pattern.erased
        axes: Any = 1 if kind == CHANNELS else -1 if len(erased) == 1 else tuple(range(-len(erased), 0))
        found |= {"reduction_axes": axes, "feature_axes": axes}
    return found


def _kind(spec: NormSpec) -> str | None:
    trailing = spec.stats.startswith("... ") and spec.stats.endswith("-> ...")
    if spec.eps_at == "max" and spec.scale == "l2" and spec.eps == 1e-12 and trailing and spec.weight is None:
        return "l2"
    if spec.eps_at != "variance" or spec.correction or spec.whiten or spec.gain != 1:
        return None
    if not spec.center:
        return "rms" if spec.scale == "rms" and trailing else None
    if spec.scale != "std":
        return None
    return LAYER if trailing else KINDS.get(spec.stats)
