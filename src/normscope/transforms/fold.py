"""Norms become part of the linear layers and convolutions beside them, where that leaves the function as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from normscope.doctor import arguments
from normscope.doctor.refusals import Refused, unwrap
from normscope.doctor.session import is_training
from normscope.doctor.wording import listed
from normscope.errors import BadInput, ModelError, told
from normscope.transforms import optimizers
from normscope.transforms.folding.carry_out import fold_into
from normscope.transforms.folding.checking import Call, Checked, check, copied
from normscope.transforms.folding.plan import Stays, Step, plan
from normscope.transforms.folding.report import Folded, FoldReport, folded
from normscope.transforms.folding.separate import separate
from normscope.transforms.onnx_folding.fold import fold_graph
from normscope.transforms.report import SiteChange

if TYPE_CHECKING:
    from normscope.targets.onnx_model import OnnxModel

__all__ = ["FoldReport", "Folded", "fold"]

Model = TypeVar("Model", bound=nn.Module)


@overload
def fold(
    model: str | Path,
    sample: Any = None,
    *,
    inplace: bool = False,
    dry_run: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    clone_shared: bool = False,
    gains: bool = True,
    center: bool = False,
) -> tuple[OnnxModel, FoldReport]: ...


@overload
def fold(
    model: Model,
    sample: Any = None,
    *,
    inplace: bool = False,
    dry_run: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    clone_shared: bool = False,
    gains: bool = True,
    center: bool = False,
) -> tuple[Model, FoldReport]: ...


def fold(
    model: Any,
    sample: Any = None,
    *,
    inplace: bool = False,
    dry_run: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    clone_shared: bool = False,
    gains: bool = True,
    center: bool = False,
) -> tuple[Any, FoldReport]:
    """Fold normalizations into the linear layers and convolutions beside them.

        batch norm, frozen batch norm, any norm by stored statistics, y = a x + b:
            into the layer that feeds it           W' = a W            bias' = a bias + b
            else into all layers that read it      W' = W a            bias' = bias + W b
        gain and bias of layer, RMS and group norm: into all layers that read it, in the same way
        centering of a layer norm (``center``): into the layer that feeds it, W' = W - mean; an RMS norm remains

    What feeds what is taken from a forward on the sample. A norm is left, and the report says why, where a fold would
    change the function: something stands between the two, the output has other readers (also a write through a view,
    NumPy, an attribute that keeps it), the layer that reads it pads with zeros (the shift would be missing at the
    border; where the shift is 0 it folds), a weight is tied, parametrized or used twice, the norm runs twice or looks
    at the batch, hooks would see other tensors, code calls a function.
    Branches of Python that the sample does not take are not seen.

    A folded norm becomes ``nn.Identity``, or loses gain and bias, under the same path and as the same object. New
    weights are computed in float64 and rounded once; parameters stay the objects they are, with device, dtype and
    memory format. Modes, hooks and everything else are kept. ``report.removed_keys`` and ``added_keys`` are the
    state-dict keys that change: those of the norm go, a bias comes where the layer had none. Which
    keys there are does not depend on values, as long as nothing is undone and all scales are finite.

    The result is checked on the sample: in float64 (a copy), and in the model's own dtype against float64. A norm whose
    fold does not hold is undone, and left with what was measured.

    An ONNX graph folds into a new one, compared in ONNX Runtime (`normscope.transforms.onnx_folding.fold`): only what
    is a scale by stored statistics, also where it is written as Mul and Add behind a layer.

    Args:
        model: a module in evaluation mode; a `normscope.OnnxModel` or the path of an ``.onnx`` file.
        sample: an input as for `normscope.check`: a tensor for ``model(x)``, a tuple for ``model(*args)``, a dict for
            ``model(**kwargs)``. Needs memory for up to five copies of the model. A graph is also compared without one,
            on random input of the sizes it declares.
        inplace: change ``model`` itself; by default a deep copy is changed and returned.
        dry_run: change nothing, return ``model`` and what would be done, as it was checked on a copy.
        optimizer: with ``inplace``: parameters that are gone leave its groups, new biases join those of their weights.
        clone_shared: a layer or norm that is registered under several names, or a tied weight, gets a copy of its own
            where that lets it fold. Costs their memory, and unties them.
        gains: also fold gains and biases of norms without stored statistics.
        center: also fold the centering of layer norms.

    Returns the model and a `FoldReport`: a `TransformReport` with ``.folds``, each with ``.growth``, how far the
    largest scale of a channel stands above the layer's median, which per-tensor quantization suffers from.

    Raises:
        Refused: the model is in training mode, where batch norms do not have the function that is folded; or lazy, on
            the meta device, or sharded; or it returns no floating point tensor that could be compared.
        BadInput: ``model`` is no module or cannot be copied, the sample is no input, or an optimizer is given without
            ``inplace``.
        ModelError: the model fails on the sample.
        Deviation: the folded model deviates although no single norm can be blamed for it; nothing was changed.

    Jacob et al. 2018, https://arxiv.org/abs/1712.05877, section 3.2 (batch norm); Ashkboos et al. 2024,
    https://arxiv.org/abs/2401.15024, section 3 (layer norm to RMS norm).

    >>> import torch, normscope
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> folded, report = normscope.transforms.fold(model, torch.randn(2, 3, 8, 8))
    >>> folded[1], report.folds[0].into, report.added_keys, len(report.left)
    (Identity(), ('0',), ('0.bias',), 0)
    """
    from normscope.targets.onnx_model import OnnxModel  # a floor above, and all that is special of a graph

    if isinstance(model, (str, Path, OnnxModel)):
        moot = {"inplace=True": inplace, "optimizer": optimizer is not None, "center=True": center}
        return fold_graph(
            model,
            sample,
            dry_run=dry_run,
            clone_shared=clone_shared,
            moot=[k for k, on in moot.items() if on],
        )
    arguments.module(model)
    optimizers.checked(optimizer, model, inplace=inplace)
    given = unwrap(model)
    _refuse_training(given)
    if sample is None:
        raise BadInput(
            "fold needs a sample: what feeds what is seen in a forward, and the result is checked on it"
        )
    args, kwargs, _ = arguments.on_device(model, sample)
    call: Call = (args or (), kwargs)
    before = list(given.state_dict())
    planned, copies = _planned(given, call, clone_shared=clone_shared, gains=gains, center=center)
    result = check(model, planned, copies, call)
    steps = [one for one in result.planned if isinstance(one, Step)]
    after = list(unwrap(result.model).state_dict())
    report = FoldReport(
        "fold",
        tuple(map(_change, result.planned)),
        result.agreements,
        (*result.notes, *_notes(steps, copies), *_of_optimizer(optimizer, given, result)),
        dry_run=dry_run,
        folds=tuple(map(folded, steps)),
        removed_keys=tuple(key for key in before if key not in after),
        added_keys=tuple(key for key in after if key not in before),
    )
    if dry_run or not steps:
        return model, report
    if not inplace:
        return result.model, report
    parameters = optimizers.named(given)
    made = fold_into(given, steps, copies)
    if optimizer is not None:
        optimizers.follow(optimizer, parameters, given, made)
    return model, report


def _refuse_training(model: nn.Module) -> None:
    if is_training(model):
        raise Refused(
            "the model is in training mode, where batch norms normalize by the batch and cannot be folded: call "
            "model.eval() first"
        )


def _planned(
    model: nn.Module, call: Call, *, clone_shared: bool, gains: bool, center: bool
) -> tuple[list[Step | Stays], tuple[str, ...]]:
    """The plan, and the names of what has to get a copy of its own for it."""
    try:
        planned = plan(model, *call, gains=gains, center=center)
    except Refused:
        raise
    except Exception as error:
        raise ModelError(f"the model fails on the sample: {told(error)}") from error
    copies: tuple[str, ...] = ()
    while clone_shared:
        shared = [
            name
            for one in planned
            if isinstance(one, Stays)
            for name in one.obstacle.shared
            if name not in copies
        ]
        if not shared:
            break
        apart = copied(model)
        more = (*copies, *dict.fromkeys(shared))
        separate(apart, more)
        again = plan(apart, *call, gains=gains, center=center)
        if _count(again) <= _count(planned):
            break
        planned, copies = again, more
    return planned, copies


def _count(planned: list[Step | Stays]) -> int:
    return sum(isinstance(one, Step) for one in planned)


def _change(one: Step | Stays) -> SiteChange:
    if isinstance(one, Step):
        return SiteChange(one.site, one.before, one.after)
    return SiteChange(one.site, one.before, "", one.obstacle.reason, one.aliases)


def _notes(steps: list[Step], copies: tuple[str, ...]) -> list[str]:
    notes = [step.remark for step in steps if step.remark]
    if copies:
        notes.append(f"no longer shared, copied so that it could fold: {listed(copies, 8)}")
    return notes


def _of_optimizer(optimizer: optimizers.Optimizer, given: nn.Module, result: Checked) -> list[str]:
    if optimizer is None or result.model is given:
        return []
    return [
        *optimizers.told(optimizer, optimizers.named(given), optimizers.named(result.model), result.made),
        "the optimizer still remembers the folded weights at their old scale (momentum, second moments)",
    ]
