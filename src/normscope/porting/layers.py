"""One layer of Keras or Flax as a torch layer, and one torch layer as arrays for Keras or Flax."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscope.errors import BadInput
from normscope.identify.framework_layers import FrameworkLayer, framework_layer
from normscope.identify.owners_hooks import own_hooks
from normscope.porting import flax, keras
from normscope.porting.arrays import tensor_of
from normscope.porting.build import Plan, made, plan
from normscope.porting.norms import STORED, USUAL
from normscope.porting.report import PortReport
from normscope.porting.settings import settings_of
from normscope.reading import Reading, read
from normscope.reading.base import qualified_name
from normscope.spec import NormSpec
from normscope.transforms.agreement import Deviation
from normscope.transforms.report import Agreement, SiteChange

ALLOWED = 2.0**-40
"""of the largest output in float64: E[x^2] - E[x]^2 over a thousand numbers of size 1 rounds to 2**-43 at worst"""
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""of what a layer casts its output to"""
BATCH, AXIS = 4, 5
"""sizes of axes of the input that is tried, where the layer says none"""


def to_torch(
    obj: Any, source: str, input_shape: Sequence[int] | None, *, channels_first: bool, layers: str
) -> tuple[nn.Module, PortReport]:
    """See `normscope.porting.port.port`."""
    name = qualified_name(type(obj))
    given = None if input_shape is None else _sizes(input_shape)
    loose = read(obj, input_ndim=None if given is None else len(given))
    tensors = {key: tensor_of(value, f"{name}: {key}") for key, value in loose.tensors.items()}
    _complete(name, loose, tensors, source)
    shape = given or _shape(obj, loose, tensors)
    layer = framework_layer(obj, shape)
    assert layer is not None  # what can be read can be run
    reading = layer.reading
    frozen = reading.mode_train == "frozen"
    chosen = plan(reading.spec, shape, frozen=frozen and layers != "torch", channels_first=channels_first)
    ported, added = made(reading.spec, chosen, tensors, layers)
    ported.train(reading.mode_now == "batch")
    agreements = _agreements(obj, layer, ported, chosen, shape, name)
    after = qualified_name(type(ported))
    notes = [*_notes(reading, obj, source, chosen, shape, layers), *added, *reading.remarks]
    if frozen and layers == "torch":
        notes.append("the source is frozen; torch.nn has no such layer: .train() thaws this one")
        for parameter in ported.parameters():
            parameter.requires_grad_(False)
    return ported, PortReport("port", (SiteChange("", name, after),), tuple(agreements), tuple(notes))


def _complete(name: str, reading: Reading, tensors: dict[str, Tensor], source: str) -> None:
    spec = reading.spec
    wanted = [key for key in ("weight", "bias") if getattr(spec, key) is not None]
    wanted += STORED if spec.running is not None else ()
    missing = [key for key in wanted if key not in tensors]
    if not missing:
        return
    how = {
        "keras": "It is not built: call it on an input, or layer.build(shape), first",
        "linen": "It is not bound to variables: pass module.bind(variables), with variables from module.init(key, x)",
    }.get(source, "Set it first")
    raise BadInput(f"{name} has no {', '.join(missing)}. {how}.")


def _sizes(given: Sequence[int]) -> tuple[int, ...]:
    shape = tuple(given)
    if not shape or not all(isinstance(n, int | np.integer) and n > 0 for n in shape):
        raise BadInput(f"input_shape is the sizes of an input, whole numbers above 0; got {given!r}.")
    return tuple(int(n) for n in shape)


def _shape(obj: Any, reading: Reading, tensors: dict[str, Tensor]) -> tuple[int, ...]:
    """Of an input to plan and try the layer on, as far as the layer says it."""
    built = (getattr(obj, "_build_shapes_dict", None) or {}).get("input_shape")
    if built is not None:
        return tuple(int(n) if n else (AXIS if axis else BATCH) for axis, n in enumerate(built))
    held = next(iter(tensors.values()), None)
    stats = reading.spec.stats
    if held is not None and stats.startswith("... ") and stats.endswith("-> ..."):
        return (BATCH, 3, *held.shape)
    raise BadInput(
        f"{reading.type_name} does not say how many axes its input has, nor its sizes. Pass input_shape, such as "
        "(8, 32, 32, 64)."
    )


def _agreements(
    obj: Any, source: FrameworkLayer, ported: nn.Module, plan: Plan, shape: tuple[int, ...], name: str
) -> list[Agreement]:
    """Both in float64 on one random input. Raises Deviation where they are further apart than rounding takes them."""
    twin = copy.deepcopy(ported).double()
    x = np.random.default_rng(0).standard_normal(shape)
    given = torch.from_numpy(x).permute(plan.order)
    back = np.argsort(plan.order)
    dtype = next(
        (key for key in ROUNDOFF if getattr(obj, "dtype", None) is not None and key in str(obj.dtype)), ""
    )
    allowed = ALLOWED if hasattr(obj, "trainable_variables") else max(ALLOWED, 4 * ROUNDOFF.get(dtype, 0.0))
    found = []
    modes = ("eval", "train") if source.reading.mode_train == "batch" else ("eval",)
    for mode in modes:
        y, stored = source.run(x, mode == "train", {})
        twin.train(mode == "train")
        with torch.no_grad():
            mine = twin(given).permute(*back).numpy()
        apart = _apart(mine, y)
        if mode == "train":
            same = (
                STORED if getattr(twin, "running_correction", 1) == 0 else STORED[:1]
            )  # of torch.nn's the mean alone
            apart = max(apart, *(_apart(getattr(twin, key).numpy(), stored[key]) for key in same))
        agreement = Agreement(mode, "float64", apart, allowed)
        if not apart <= allowed:
            raise Deviation(
                f"{name} and the {plan.name} made of it are {apart:.1e} of the largest output apart in {mode}, where "
                f"{allowed:.1e} is rounding. Say what the layer computes with normscope.NormSpec, and report this.",
                "",
                agreement,
            )
        found.append(agreement)
    return found


def _apart(one: Any, other: Any) -> float:
    return float(np.abs(one - other).max() / max(float(np.abs(other).max()), 1e-300))


def _notes(
    reading: Reading, obj: Any, source: str, plan: Plan, shape: tuple[int, ...], layers: str
) -> list[str]:
    notes = []
    own = keras.own(only_scale=reading.spec.scale == "rms") if source == "keras" else flax.OWN
    names = [f"{own[key]} -> {key}" for key in USUAL if key in reading.tensors]
    if names:
        notes.append(f"carried as they are: {', '.join(names)}")
    if list(plan.order) != list(range(len(shape))):
        notes.append(f"the input's axes stand otherwise: give it x.permute{plan.order}")
    if plan.turned:
        notes.append(f"weight and bias were permuted likewise, by {plan.turned}")
    running = reading.spec.running
    if reading.synchronized or getattr(obj, "axis_name", None) is not None:
        does = "in torch SyncBatchNorm does so" if running is not None else "torch has no layer that does so"
        notes.append(
            f"the source takes statistics over several devices together; {does}. This one takes those of what comes "
            "into it, and outputs were compared on one device"
        )
    if running is None:
        return notes
    notes.append(f"momentum {obj.momentum:g} is a decay: its update fraction is {running.momentum:g}")
    if layers == "torch" and reading.mode_train == "batch":
        count = prod(shape) // plan.parameters[0]
        notes.append(
            "the source stores the variance of a batch, and torch.nn goes on with M / (M - 1) times it: for the "
            f"{count} elements a channel of an input {shape} its running variance settles 1 / {count - 1} above"
        )
    elif reading.mode_train == "batch":
        notes.append("it goes on storing the biased variance, as the source does: running_correction=0")
    if reading.mode_train == "batch":
        notes.append("num_batches_tracked starts at 0: the source counts no batches")
    if source == "keras" and reading.mode_train == "batch":
        notes.append(
            "in eval(): a Keras layer has no mode, and evaluates where a call does not say training=True"
        )
    return notes


def from_torch(module: nn.Module, target: str) -> tuple[dict[str, Any], PortReport]:
    """See `normscope.porting.port.port`."""
    reading = read(module)
    name = qualified_name(type(module))
    settings = settings_of(reading, target)
    spec = reading.spec
    tensors = {
        key: tensor_of(reading.tensors[key], f"{name}: {key}") for key in USUAL if key in reading.tensors
    }
    notes = []
    if spec.weight_offset and "weight" in tensors:
        tensors["weight"] = tensors["weight"] + spec.weight_offset
        notes.append(f"weight: {spec.weight_offset:g} was added, which the source adds itself")
    if settings["class"] == "RMSNormalization" and "weight" not in tensors:
        size = getattr(module, "normalized_shape", None)
        if size is None:
            raise BadInput(
                f"{name} has no weight, and RMSNormalization of Keras has one: its size is not known."
            )
        tensors["weight"] = torch.ones(tuple(size))
        notes.append("it has no weight, and RMSNormalization of Keras has one: ones, set trainable=False")
    notes += _notes_back(spec, reading, module, target, tensors)
    if target == "keras":
        arrays = keras.written((), tensors, only_scale=settings["class"] == "RMSNormalization")
        kind = f"keras.layers.{settings['class']}"
    else:
        if target == "flax":
            tensors = {key: tensor.reshape(-1) for key, tensor in tensors.items()}
            size = _features(module, tensors)
            if size is None:
                notes.append("how many features it has it does not say: give num_features")
            else:
                settings = {"class": settings.pop("class"), "num_features": size, **settings}
        arrays = flax.written((), tensors, linen=target == "linen")
        kind = f"flax.{'linen' if target == 'linen' else 'nnx'}.{settings['class']}"
    if own_hooks(module):
        notes.append("its forward hooks were not carried: arrays hold none")
    notes.append("outputs were not compared: arrays are no layer")
    return arrays, PortReport("port", (SiteChange("", name, kind),), notes=tuple(notes), settings=settings)


def _features(module: nn.Module, tensors: dict[str, Tensor]) -> int | None:
    """Of its tensors, or as it was told: an nnx layer wants their number also where it has no parameters."""
    for tensor in tensors.values():
        return tensor.numel()
    for name in ("normalized_shape", "num_features", "num_channels"):
        told = getattr(module, name, None)
        if told is not None:
            return int(prod(told)) if isinstance(told, Sequence) else int(told)
    return None


def _notes_back(
    spec: NormSpec, reading: Reading, module: nn.Module, target: str, tensors: dict[str, Tensor]
) -> list[str]:
    notes = []
    if spec.eps is None:
        notes.append("eps=None is the machine epsilon of the arithmetic: that of float32 was written")
    if spec.running is not None:
        notes.append(f"momentum {spec.running.momentum:g} is an update fraction: the decay is 1 less it")
        if spec.running.correction:
            notes.append(
                f"torch stored M / (M - 1) times the variance of a batch of M elements a channel, and {target} goes on "
                "with the variance itself"
            )
    if reading.synchronized:
        how = "synchronized=True, on its TensorFlow backend" if target == "keras" else "axis_name="
        notes.append(f"the source takes statistics over all processes: {target} does with {how}")
    if target == "keras" and spec.stats == "b c ... -> b ...":
        notes.append(
            "on the torch backend Keras normalizes over the last axes whatever axis says: run another backend, or move "
            "the channels to the end"
        )
    if target != "keras" and "(g c)" in spec.stats:
        notes.append("Flax takes the channels of a group norm on the last axis: move them there")
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors.values()):
        notes.append("bfloat16 arrays, which NumPy lacks, were written as float32 of the same values")
    return notes
