"""Reader for the normalization modules of torch.nn.

By class hierarchy: a subclass is read as its torch class where it computes the same, that is where it overrides no
method that computes. Checks of the input (``_check_input_dim``), initialization and parametrizations are free.

Sources: the forward of each class, from which the modes below are taken case by case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from normscope.reading.base import Reader, Reading, UnknownNormalization, qualified_name
from normscope.reading.by_class import has_put_on, put_on
from normscope.spec import families
from normscope.spec.axes import last_axes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from normscope.spec import NormSpec

STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
COMPUTES = (
    "__call__",
    "_call_impl",
    "forward",
    "_apply_instance_norm",
    "_handle_no_batch_input",
    "_get_no_batch_dim",
    "_by_batch",
)


def _read(obj: Any, input_ndim: int | None) -> Reading | None:
    from torch import nn

    if not isinstance(obj, nn.Module):
        return None
    if isinstance(obj, (nn.LocalResponseNorm, nn.CrossMapLRN2d)):
        _refuse(
            obj,
            "divides by a sum over a window of neighbouring channels, so no two elements share one scale: it has no "
            "statistic sets and is outside the family. Leave it out, or treat it as an activation",
        )
    target = getattr(type(obj), "cls_to_become", None) or type(obj)  # what a lazy module turns into
    home = next((cls for cls in target.__mro__ if cls in kinds()), None)
    if home is None:
        return None
    refuse_overrides(obj, home)
    if isinstance(obj, nn.modules.lazy.LazyModuleMixin) and obj.has_uninitialized_params():
        _refuse(
            obj,
            "has not seen an input yet, so its parameters do not exist. Run one forward on a real batch first",
        )
    return kinds()[home](obj, input_ndim)


def refuse_overrides(obj: Any, home: type) -> None:
    """Raise UnknownNormalization where ``obj`` computes by methods of its own, not by those of ``home``."""
    overridden = [
        name for name in COMPUTES if getattr(type(obj), name, None) is not getattr(home, name, None)
    ]
    if found := put_on(obj, COMPUTES):
        _refuse(
            obj,
            f"{has_put_on(found)}. normscope.check finds what it calls inside; or say what it computes with "
            "normscope.NormSpec(...)",
        )
    if overridden:
        _refuse(
            obj,
            f"inherits from {qualified_name(home)} but overrides {overridden[0]}, so it may compute something else. "
            f"normscope.check finds what it calls inside; or say what it computes with normscope.NormSpec(...)",
        )


def kinds() -> dict[type, Callable[[Any, int | None], Reading]]:
    from torch import nn

    base, instance = nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm
    return {
        nn.BatchNorm1d: lambda m, n: _batch_norm(m, n, 2, 3),
        nn.BatchNorm2d: lambda m, n: _batch_norm(m, n, 4, 4),
        nn.BatchNorm3d: lambda m, n: _batch_norm(m, n, 5, 5),
        nn.SyncBatchNorm: lambda m, n: _batch_norm(m, n, 2, None),
        base: lambda m, n: _batch_norm(m, n, 2, None),  # subclasses of the base, for any rank
        nn.InstanceNorm1d: lambda m, n: _instance_norm(m, n, 2),
        nn.InstanceNorm2d: lambda m, n: _instance_norm(m, n, 3),
        nn.InstanceNorm3d: lambda m, n: _instance_norm(m, n, 4),
        instance: lambda m, n: _instance_norm(m, n, None),
        nn.LayerNorm: _layer_norm,
        nn.GroupNorm: _group_norm,
        nn.RMSNorm: _rms_norm,
    }


def _batch_norm(
    m: nn.modules.batchnorm._BatchNorm, input_ndim: int | None, low: int, high: int | None
) -> Reading:
    """Train: by the batch, always. Eval: by the buffers where there are any, whatever ``track_running_stats`` says;
    that flag only decides whether training writes to them."""
    from torch import nn

    check_ndim(m, input_ndim, low, high)
    stored = _has_stored(m)
    tensors = tensors_of(m)
    spec = families.batch_norm(
        eps=_number(m.eps),
        momentum=_momentum(m, counts=m.num_batches_tracked is not None),
        weight="weight" in tensors,
        bias="bias" in tensors,
        running=stored,
        running_correction=getattr(m, "running_correction", 1),  # normscope's may store the biased variance
        ndim=(low, high),
    )
    return _reading(
        m,
        spec,
        tensors,
        train="batch",
        eval_="running" if stored else "batch",
        updates=("train",) if stored and m.track_running_stats else (),
        synchronized=isinstance(m, nn.SyncBatchNorm),
    )


def _instance_norm(
    m: nn.modules.instancenorm._InstanceNorm, input_ndim: int | None, unbatched: int | None
) -> Reading:
    """Eval normalizes by the buffers only where ``track_running_stats`` is set. Where it is not, buffers that exist
    are still handed over and still move, in eval too."""
    if unbatched is not None:
        check_ndim(m, input_ndim, unbatched, unbatched + 1)
    stored = _has_stored(m)
    if m.track_running_stats and not stored:
        _refuse(
            m,
            "has track_running_stats=True but no running_mean, and raises in eval mode. Set the flag to False",
        )
    tensors = tensors_of(m)
    batched = input_ndim is None or input_ndim != unbatched
    rank = None if unbatched is None else unbatched + batched
    spec = families.instance_norm(
        eps=_number(m.eps),
        momentum=_momentum(m, counts=False),
        weight="weight" in tensors,
        bias="bias" in tensors,
        running=stored,
        batched=batched,
        ndim=None if rank is None else (rank, rank),
    )
    own = "batch" if stored else "input"
    return _reading(
        m,
        spec,
        tensors,
        train=own,
        eval_="running" if m.track_running_stats else own,
        updates=(("train",) if m.track_running_stats else ("train", "eval")) if stored else (),
    )


def _layer_norm(m: nn.LayerNorm, input_ndim: int | None) -> Reading:
    axes = len(m.normalized_shape)
    check_ndim(m, input_ndim, axes, None)
    tensors = tensors_of(m)
    spec = families.layer_norm(
        last_axes(axes), eps=_number(m.eps), weight="weight" in tensors, bias="bias" in tensors
    )
    return _reading(m, spec, tensors)


def _rms_norm(m: nn.RMSNorm, input_ndim: int | None) -> Reading:
    axes = len(m.normalized_shape)
    check_ndim(m, input_ndim, axes, None)
    tensors = tensors_of(m)
    return _reading(
        m, families.rms_norm(last_axes(axes), eps=_number(m.eps), weight="weight" in tensors), tensors
    )


def _group_norm(m: nn.GroupNorm, input_ndim: int | None) -> Reading:
    check_ndim(m, input_ndim, 2, None)
    tensors = tensors_of(m)
    spec = families.group_norm(
        int(m.num_groups), eps=_number(m.eps), weight="weight" in tensors, bias="bias" in tensors
    )
    return _reading(m, spec, tensors)


def _reading(
    m: nn.Module,
    spec: NormSpec,
    tensors: dict[str, Tensor],
    *,
    train: str = "input",
    eval_: str = "input",
    updates: tuple[str, ...] = (),
    synchronized: bool = False,
) -> Reading:
    now = train if m.training else eval_
    return Reading(spec, qualified_name(type(m)), tensors, now, train, eval_, updates, synchronized)


def tensors_of(m: nn.Module) -> dict[str, Tensor]:
    found = {name: getattr(m, name, None) for name in STATE}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _has_stored(m: Any) -> bool:
    if (m.running_mean is None) != (m.running_var is None):
        there, missing = (
            ("running_var", "running_mean") if m.running_mean is None else ("running_mean", "running_var")
        )
        _refuse(m, f"has {there} but no {missing}, and its forward raises. Set both, or both to None")
    return m.running_mean is not None


def _number(value: Any) -> float | None:
    """Of Python, NumPy or a tensor of one element; torch takes them all."""
    return None if value is None else float(value)


def _momentum(m: Any, *, counts: bool) -> float | None:
    """``momentum=None`` is the plain average of all batches, by the counter; without a counter torch moves nothing."""
    if m.momentum is None:
        return None if counts else 0.0
    return float(m.momentum)


def check_ndim(m: nn.Module, input_ndim: int | None, low: int, high: int | None) -> None:
    if input_ndim is None or (input_ndim >= low and (high is None or input_ndim <= high)):
        return
    wanted = f"at least {low}" if high is None else str(low) if high == low else f"{low} or {high}"
    raise ValueError(
        f"{qualified_name(type(m))} takes an input of {wanted} axes, input_ndim is {input_ndim}."
    )


def _refuse(m: nn.Module, why: str) -> NoReturn:
    raise UnknownNormalization(f"{qualified_name(type(m))} {why}.")


READER = Reader(
    needs="torch",
    knows=(
        "torch.nn.BatchNorm1d/2d/3d",
        "torch.nn.SyncBatchNorm",
        "torch.nn.InstanceNorm1d/2d/3d",
        "torch.nn.LayerNorm",
        "torch.nn.GroupNorm",
        "torch.nn.RMSNorm",
    ),
    read=_read,
)
