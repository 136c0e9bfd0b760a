"""Freezing normalizations so that they stay frozen, and the way back to the bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from normscope.doctor import arguments
from normscope.doctor.refusals import unwrap
from normscope.transforms.chosen import HAND_WRITTEN, Chosen, Model, Select, chosen, copied, one_of
from normscope.transforms.elsewhere import elsewhere
from normscope.transforms.frozen import freeze_affine, freeze_statistics, frozen_parts, thaw
from normscope.transforms.report import UNSAMPLED, Agreement, SiteChange, TransformReport
from normscope.transforms.still import still

PARTS = {"statistics": ("statistics",), "affine": ("affine",), "both": ("statistics", "affine")}
WORDS = {"statistics": "statistics", "affine": "gain and bias"}
STORED = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
NO_STATISTICS = "stores no statistics: it normalizes by its input in training as in evaluation"

NO_MODULE = "a call or arithmetic, not a module: only the code around it can freeze it"


@dataclass(frozen=True)
class _Step:
    site: Chosen
    parts: tuple[str, ...]
    """what is frozen or thawed; empty where it is left"""
    change: SiteChange


def freeze(
    model: Model,
    policy: str = "statistics",
    *,
    select: Select = None,
    sample: Any = None,
    inplace: bool = False,
    dry_run: bool = False,
) -> tuple[Model, TransformReport]:
    """Freeze the normalizations of a model, so that ``train()`` does not thaw them.

    ``"statistics"``: every norm that stores statistics normalizes by them, in training as in evaluation, and nothing
    moves them: y = weight * (x - running_mean) / sqrt(running_var + eps) + bias. Gain and bias go on training.
    ``"affine"``: ``requires_grad`` is off for gain and bias, also of norms without stored statistics; the statistics go
    on following the data. ``"both"``: both.

    Frozen are batch, synchronized and tracking instance norms of torch.nn and `normscope.nn`, and their subclasses,
    also those with a forward of their own. The modules stay the objects they are; their class becomes a subclass of
    their own class that overrides ``train``. Keys and values of the state dict, momentum, flags, hooks and optimizer
    stay. The freeze survives ``train()``, ``eval()``, ``copy.deepcopy``, pickling, ``load_state_dict`` and
    ``torch.compile``; it is not part of a state dict. ``unfreeze(freeze(model))`` is ``model`` to the bit.

    Args:
        model: any module; one that is itself a norm, compiled or data-parallel too.
        policy: what is frozen.
        select: of which norms: a module path (it and all inside), a pattern such as ``"layer?.*.bn1"``, several of
            these, or a function ``(path, module) -> bool``. All, by default.
        sample: an input as for `normscope.check`. Outputs in eval are compared before and after, which must be the same
            bits, and after ``train()`` a forward pass must leave every frozen statistic as it is.
        inplace: change ``model`` itself, not a deep copy.
        dry_run: change nothing; return ``model`` and the plan.

    Returns the model and a report of what was frozen, and what was left and why.

    Raises:
        BadInput: another policy; ``select`` names no normalization; the model cannot be copied.
        Deviation: the sample shows that a frozen norm moves or computes something else; the model is as it was.

    Wu and Johnson 2021, Rethinking "Batch" in BatchNorm, https://arxiv.org/abs/2105.07576, section 3.2.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> frozen, report = freeze(model)
    >>> frozen.train()[1].training, frozen.training, model[1].training
    (False, True, True)
    >>> thawed, _ = unfreeze(frozen)
    >>> thawed[1].training, type(thawed[1]) is nn.BatchNorm2d
    (True, True)
    """
    arguments.module(model)
    parts = PARTS[one_of("policy", policy, PARTS)]
    steps = [_freezing(site, parts, model) for site in chosen(model, select)]
    return _done("freeze", model, steps, sample, inplace, dry_run)


def unfreeze(
    model: Model,
    policy: str = "both",
    *,
    select: Select = None,
    inplace: bool = False,
    dry_run: bool = False,
) -> tuple[Model, TransformReport]:
    """Take back what `freeze` did: classes, training flags and ``requires_grad`` are as they were, to the bit.

    A norm comes back in the mode that ``train()`` or ``eval()`` asked for last. Norms that are frozen by their class
    (`normscope.nn.FrozenBatchNorm`, torchvision's) are left.

    Args: as of `freeze`; ``policy`` is what is thawed.

    Raises BadInput as `freeze` does.

    >>> frozen, _ = freeze(nn.BatchNorm1d(3), "both")
    >>> print(unfreeze(frozen, "affine")[1].done[0].after)
    torch.nn.BatchNorm1d, statistics frozen
    """
    arguments.module(model)
    parts = PARTS[one_of("policy", policy, PARTS)]
    steps = [_thawing(site, parts) for site in chosen(model, select)]
    return _done("unfreeze", model, steps, None, inplace, dry_run)


def _done(
    name: str, model: Model, steps: list[_Step], sample: Any, inplace: bool, dry_run: bool
) -> tuple[Model, TransformReport]:
    changes = tuple(step.change for step in steps)
    notes = _notes(steps) if name == "freeze" else ()
    agreements: tuple[Agreement, ...] = ()
    after = None
    if sample is not None:
        args, kwargs, _ = arguments.on_device(model, sample)
        after = _changed(copied(model, name), steps, name)
        agreement, unseen = still(model, after, _paths(steps), args or (), kwargs)
        agreements, notes = (agreement,), notes + unseen
        known = {path for change in changes for path in (change.name, *change.aliases)}
        others = elsewhere(unwrap(model), args or (), kwargs, known)
        changes += tuple(
            other if other.reason == HAND_WRITTEN else replace(other, reason=NO_MODULE) for other in others
        )
    elif name == "freeze":
        notes += UNSAMPLED
    report = TransformReport(name, changes, agreements, notes, dry_run)
    if dry_run:
        return model, report
    if inplace:
        return _changed(model, steps, name), report
    return after if after is not None else _changed(copied(model, name), steps, name), report


def _changed(model: Model, steps: list[_Step], name: str) -> Model:
    modules = dict(unwrap(model).named_modules())
    for step in steps:
        module = modules[step.site.path]
        if step.parts and name == "unfreeze":
            thaw(module, "statistics" in step.parts, "affine" in step.parts)
            continue
        if "affine" in step.parts:
            freeze_affine(module)
        if "statistics" in step.parts:
            freeze_statistics(module)
    return model


def _freezing(site: Chosen, wanted: tuple[str, ...], model: nn.Module) -> _Step:
    reasons, parts = [], []
    for part in wanted:
        fault = _statistics_fault(site) if part == "statistics" else _affine_fault(site, model)
        if fault:
            reasons.append(fault)
        else:
            parts.append(part)
    return _step(site, tuple(parts), tuple(dict.fromkeys(reasons)), (*frozen_parts(site.module), *parts))


def _thawing(site: Chosen, wanted: tuple[str, ...]) -> _Step:
    held = frozen_parts(site.module)
    parts = tuple(part for part in wanted if part in held)
    reason = () if parts else ("was not frozen by normscope.transforms.freeze",)
    return _step(site, parts, reason, tuple(part for part in held if part not in parts))


def _step(site: Chosen, parts: tuple[str, ...], reasons: tuple[str, ...], now: tuple[str, ...]) -> _Step:
    frozen = " and ".join(WORDS[part] for part in PARTS["both"] if part in now)
    after = (f"{site.type_name}, {frozen} frozen" if frozen else site.type_name) if parts else ""
    reason = "" if parts else "; ".join(reasons)
    before = site.type_name
    held = " and ".join(WORDS[part] for part in frozen_parts(site.module))
    return _Step(
        site,
        parts,
        SiteChange(site.name, f"{before}, {held} frozen" if held else before, after, reason, site.aliases),
    )


def _statistics_fault(site: Chosen) -> str:
    """Why the statistics cannot be frozen, "" where they can."""
    module, reading = site.module, site.reading
    if "statistics" in frozen_parts(module):
        return "its statistics are frozen already"
    if _lazy(module):
        return site.reason
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted or traced: freeze the model it was made from"
    if parametrize.is_parametrized(module):
        return "is parametrized, and torch takes its class apart again: freeze first, parametrize then"
    if reading is not None and reading.mode_train == "frozen":
        return "its statistics are frozen by its class: nothing moves them"
    tracking = isinstance(module, STORED) and getattr(module, "running_mean", None) is not None
    if reading is None:
        return "" if tracking else site.reason
    if "running_mean" not in reading.tensors:
        return NO_STATISTICS
    if reading.mode_eval != "running":
        return (
            "track_running_stats is False while it has buffers: it normalizes by its input in evaluation too. Set the "
            "flag to True, or running_mean and running_var to None"
        )
    return ""


def _affine_fault(site: Chosen, model: nn.Module) -> str:
    module = site.module
    if "affine" in frozen_parts(module):
        return "its gain and bias are frozen already"
    if _lazy(module):
        return site.reason
    mine = {id(parameter) for parameter in module.parameters()}
    if not mine:
        return "has no gain or bias that is a parameter"
    inside = set(module.modules())
    for path, other in unwrap(model).named_modules():
        shared = other not in inside and any(id(p) in mine for p in other.parameters(recurse=False))
        if shared:
            return f"shares a parameter with {path or 'the model itself'}, which would stop training too"
    return ""


def _notes(steps: list[_Step]) -> tuple[str, ...]:
    """What to know of the freeze, each with its sites counted."""
    notes = []
    frozen = [step.site for step in steps if "statistics" in step.parts]
    fresh = [site for site in frozen if _at_initialization(site.module)]
    if fresh:
        notes.append(
            f"{_sites(fresh)} frozen at mean 0 and variance 1, as at initialization: load or recalibrate statistics "
            "before training against them"
        )
    own = [site for site in frozen if site.reading is None]
    if own:
        notes.append(
            f"{_sites(own)} computed by a forward of its own, which stays: what it does in eval is what is frozen"
        )
    stale = [
        s.site
        for s in steps
        if "affine" in s.parts and any(p.grad is not None for p in s.site.module.parameters())
    ]
    if stale:
        notes.append(
            f"{_sites(stale)} holding a gradient of an earlier backward pass: call zero_grad() before the next step"
        )
    return tuple(notes)


def _paths(steps: list[_Step]) -> list[str]:
    return [step.site.path for step in steps if "statistics" in step.parts]


def _sites(sites: list[Chosen]) -> str:
    names = ", ".join(site.name or "the model itself" for site in sites[:4])
    more = f" and {len(sites) - 4} more" if len(sites) > 4 else ""
    return f"{names}{more}:"


def _lazy(module: nn.Module) -> bool:
    return any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))


def _at_initialization(module: Any) -> bool:
    names = getattr(module, "statistics", ("running_mean", "running_var"))
    mean, second = getattr(module, names[0]), getattr(module, names[1])
    if mean.is_meta:
        return False
    start = (
        1.0 if names[1] == "running_var" else torch.eye(second.shape[-1]).to(second)
    )  # a matrix, of whitening
    return bool((mean == 0).all()) and bool((second == start).all())
