"""torch.nn's normalizations, and recognized hand-written ones, become those of normscope.nn."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from normscope.doctor import arguments
from normscope.doctor.refusals import Refused, unwrap
from normscope.doctor.wording import clean_path
from normscope.errors import BadInput, shortened, told
from normscope.reading.base import qualified_name
from normscope.transforms.agreement import compare
from normscope.transforms.elsewhere import elsewhere
from normscope.transforms.report import UNSAMPLED, SiteChange, TransformReport
from normscope.transforms.swap import Left, Replacement, replacement, swap

Model = TypeVar("Model", bound=nn.Module)
FLOAT32 = "float32_statistics"
"""attribute of the layers with running statistics"""
REASON = 100
"""letters of the reason why a model cannot be copied: torch tells a story"""


@dataclass(frozen=True)
class _Step:
    path: str
    """as ``named_modules`` of the model inside its wrappers gives it"""
    by: Replacement | None
    change: SiteChange


def accelerate(
    model: Model, sample: Any = None, *, inplace: bool = False, dry_run: bool = False
) -> tuple[Model, TransformReport]:
    """Replace normalizations by those of `normscope.nn`, which compute the same, faster and more exactly.

    BatchNorm1d to 3d, InstanceNorm1d to 3d, LayerNorm, GroupNorm and RMSNorm of torch.nn, their subclasses that
    override nothing that computes, and the hand-written norms of transformers that are proved to follow the convention
    of Llama, T5, Gemma or Olmo 2. The modules stay the objects they are and change their class: state-dict keys,
    parameters, buffers, hooks, flags, dtype, device, parametrizations, attributes and shared modules are as they were
    (a hand-written norm reads ``eps`` from then on; its ``variance_epsilon`` stays, and is no longer read).
    Everything else is left, and the report says why. Calls of functions and other hand-written norms stay as they are;
    they only show in a forward, so the report lists them where a sample is given.

    Args:
        model: any module; one that is itself a norm, in training or not, compiled, data-parallel, a graph module.
        sample: an input as for `normscope.check`: a tensor for ``model(x)``, a tuple for ``model(*args)``, a dict for
            ``model(**kwargs)``. Outputs before and after are compared, in eval, and normalizing by the batch as in
            train with dropout off; against each other, and both against a copy of the model in float64. Needs memory
            for that copy besides the one below. No run leaves a trace in the model.
        inplace: change ``model`` itself; its parameters stay the same objects, so an optimizer goes on. By default the
            model is left alone and a deep copy is returned, which takes its memory once more.
        dry_run: change nothing, return ``model`` and what would be done (with a sample: what was compared on a copy).

    Returns the accelerated model, and a report: ``str(report)``, ``report.to_json()``, ``report.done``,
    ``report.left``.

    Raises:
        BadInput: ``model`` is no module or cannot be copied, or the sample is no input.
        ModelError: the model fails on the sample.
        Refused: the model is sharded by FSDP over several ranks; or has lazy parameters, which can be neither run
            nor copied; or a sample was given, and the model has meta parameters.
        Deviation: outputs differ by more than the dtype allows: twice the error of the original, or 1e-5 of the
            largest output (float32), 1e-10 (float64), 4 units of a half type, whichever is more; or the
            accelerated model fails where the original runs (on a ``.view`` behind an instance norm, for instance: ours
            keeps the memory format of its input). The text names the first module; the model given is as it was.

    >>> import torch, normscope
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU())
    >>> faster, report = normscope.transforms.accelerate(model, torch.randn(4, 3))
    >>> type(faster[1]).__module__, type(model[1]).__module__
    ('normscope.nn.layer_norm', 'torch.nn.modules.normalization')
    >>> list(faster.state_dict()) == list(model.state_dict()), len(report.done), report.left
    (True, 1, ())
    """
    arguments.module(model)
    steps = _plan(unwrap(model))
    changes = tuple(step.change for step in steps)
    notes = _half_statistics(steps)
    if sample is None:
        report = TransformReport("accelerate", changes, (), UNSAMPLED + notes, dry_run)
        if dry_run:
            return model, report
        return _swapped(model if inplace else _copied(model, "pass inplace=True"), steps), report
    args, kwargs, _ = arguments.on_device(model, sample)
    _refuse_meta(model)
    after = _swapped(
        _copied(model, "leave the sample out, so that nothing is compared, and pass inplace=True"), steps
    )
    specs = {step.path: step.by.written for step in steps if step.by}
    agreements, remarks = compare(unwrap(model), unwrap(after), specs, args or (), kwargs)
    others, unseen = _elsewhere(model, args or (), kwargs, changes)
    report = TransformReport("accelerate", changes + others, agreements, (*remarks, *unseen, *notes), dry_run)
    if dry_run:
        return model, report
    return _swapped(model, steps) if inplace else after, report


def _plan(model: nn.Module) -> list[_Step]:
    """Each module that normalizes, in the order of ``named_modules``."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    steps = []
    for module, (path, *others) in paths.items():
        found = replacement(module)
        if found is None:
            continue
        by, reason = (found, "") if isinstance(found, Replacement) else (None, found.reason)
        change = SiteChange(
            name=clean_path(path),
            before=qualified_name(type(module)),
            after=by.name if by else "",
            reason=reason,
            aliases=tuple(dict.fromkeys(clean_path(other) for other in others)),
            already=isinstance(found, Left) and found.already,
        )
        steps.append(_Step(path, by, change))
    return steps


def _swapped(model: Model, steps: list[_Step]) -> Model:
    modules = dict(unwrap(model).named_modules())
    for step in steps:
        if step.by is not None:
            swap(modules[step.path], step.by)
    return model


def _copied(model: Model, instead: str) -> Model:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise Refused(
                f"{clean_path(name)} is lazy: it gets its shape in the first forward pass, and torch cannot copy it "
                "before. Run the model once on a batch, then accelerate it"
            )
    try:
        return copy.deepcopy(model)
    except Exception as error:
        reason = shortened(told(error), lines=1, width=REASON)
        raise BadInput(
            f"{type(model).__name__} cannot be copied ({reason}); {instead} to change the model itself"
        ) from error


def _refuse_meta(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise Refused(
                f"{clean_path(name)} is on the meta device: it has a shape but no values, so no outputs can be "
                "compared. Load the weights (model.to_empty(device=...), then load_state_dict) and accelerate then, or "
                "leave the sample out"
            )


def _elsewhere(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], changes: tuple[SiteChange, ...]
) -> tuple[tuple[SiteChange, ...], tuple[str, ...]]:
    """The normalizations that are no modules, or a note why they were not found."""
    known = {name for change in changes for name in (change.name, *change.aliases)}
    try:
        return elsewhere(model, args, kwargs, known), ()
    except Exception as error:  # the model ran, but may not run while it is followed
        return (), (f"calls of functions and hand-written norms were not looked for: {told(error)}",)


def _half_statistics(steps: list[_Step]) -> tuple[str, ...]:
    """A note on running statistics that were half, which a swap keeps."""
    kept = [step.change.name for step in steps if step.by and not step.by.attributes.get(FLOAT32, True)]
    if not kept:
        return ()
    sites = "1 site keeps" if len(kept) == 1 else f"{len(kept)} sites keep"
    return (
        f"{sites} running statistics in a half type, as the model had them, where updates may stall. To make them "
        f"float32, set {FLOAT32} = True on each such layer and then call its .to(layer.running_mean.dtype); or "
        "accelerate the model before it is cast",
    )
