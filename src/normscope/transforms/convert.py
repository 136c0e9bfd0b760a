"""Norms of one kind made into norms of another: the function changes, and the report says how."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normscope.doctor import arguments
from normscope.doctor.refusals import unwrap
from normscope.doctor.session import Session
from normscope.errors import BadInput, printable
from normscope.reading import Reading, read
from normscope.reading.base import qualified_name
from normscope.transforms import optimizers
from normscope.transforms.chosen import Chosen, Model, Select, chosen, copied, one_of
from normscope.transforms.conversions import KINDS, SAME, Old, make
from normscope.transforms.report import SiteChange, TransformReport

FIRST = "THE FUNCTION CHANGES: validate the model again, and train it further where it got worse"
STAYS = "the specification stays, and the outputs were not compared"
UNLISTED = ("folds", "caution")
"""properties that say what could be done, not what the function is"""


@dataclass(frozen=True)
class ConvertReport(TransformReport):
    """Result of `convert`: sites as in every report, and the properties that change."""

    properties: tuple[tuple[str, str, str], ...] = ()
    """(property, before, after) of all that was converted, each once"""
    function_changes: bool = True
    """False between layers of torch.nn and their counterparts in normscope.nn"""

    def to_json(self) -> str:
        """Everything, as JSON."""
        changes = bool(self.done) and self.function_changes
        more = {"function_changes": changes, "properties": [list(row) for row in self.properties]}
        return json.dumps(json.loads(super().to_json()) | more, indent=2)

    def __str__(self) -> str:
        lines = [f"convert: {FIRST if self.function_changes else STAYS}"] if self.done else []
        lines.append(super().__str__())
        lines += [
            printable(f"  {name}: was {before}; now {after}") for name, before, after in self.properties
        ]
        return "\n".join(lines)


def convert(
    model: Model,
    to: str,
    *,
    groups: int | None = None,
    size: int | None = None,
    remainder: str = "error",
    select: Select = None,
    sample: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    inplace: bool = False,
    dry_run: bool = False,
) -> tuple[Model, ConvertReport]:
    """Make norms of a model into norms of another kind. What the model computes changes.

    ``to``: ``"group"`` (torch.nn.GroupNorm), ``"layer"`` (normscope.nn.ChannelsFirstLayerNorm, over the channels of
    each position), ``"instance"``, ``"batch"``, ``"sync"`` (torch.nn), ``"frozen"`` (normscope.nn.FrozenBatchNorm),
    ``"renorm"`` (normscope.nn.BatchRenorm, with the limits of the paper at the step that the counter says) or
    ``"ghost"`` (normscope.nn.GhostBatchNorm of ``size``). From any of these; layers of normscope.nn stay in it where
    torch.nn has the kind too. ``"ours"`` and ``"torch"``: batch, instance and group norms of torch.nn made those of
    normscope.nn, and back, which computes the same. Gain, bias, eps, momentum, flags and mode are carried over,
    parameters as the objects they are; statistics and counters where both kinds store them.

    Groups: as many as divide the channels, at most 32, with at least two channels each, else one; or ``groups``. What
    would have sets of one element is left, with the reason, and so are subclasses, whose own code would be gone (time
    axes of step modes among it), norms with hooks, and norms that are frozen.

    Args:
        model: any module that holds the norms; one that is itself a norm is returned as another.
        size, remainder: with ``"ghost"``, samples of a virtual batch, and what a batch does that is no multiple:
            ``"error"``, ``"short"`` or ``"balanced"``.
        select: which norms, as in `freeze`.
        sample: an input as for `normscope.check`; it shows the shapes that come into norms, which some need.
        optimizer: with ``inplace``: gains and biases that became buffers (``"frozen"``) leave its groups with their
            state; all others stay in place. New ones (of what was frozen) join none, which the report says.
        inplace: change ``model`` itself, not a deep copy. dry_run: change nothing; return ``model`` and the plan.

    Returns the model and a report that lists which properties change (the axes of the statistics, what is removed,
    whether samples are coupled, what is stored, modes). It is never verified: there is nothing that stays the same.

    Raises:
        BadInput: another word, ``groups`` or ``size`` below 1 or for another kind, ``"ghost"`` without ``size``,
            ``select`` names nothing, ``inplace`` where the model itself is the norm, or an optimizer without
            ``inplace`` or of another model.

    Wu and He 2018, Group Normalization, https://arxiv.org/abs/1803.08494, section 4 (32 groups).

    >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64))
    >>> converted, report = convert(model, "group")
    >>> converted[1].num_groups, report.properties[0]
    (32, ('statistics', 'b c ... -> c', 'b (g c) ... -> b g, g=32'))
    """
    arguments.module(model)
    optimizers.checked(optimizer, model, inplace=inplace)
    one_of("to", to, KINDS)
    for name, value, kind in (("groups", groups, "group"), ("size", size, "ghost")):
        if value is not None:
            if to != kind:
                raise BadInput(f"{name} is of to={kind!r}; got to={to!r}")
            arguments.whole_number(name, value, 1, 2**31)
    if to == "ghost" and size is None:
        raise BadInput("to='ghost' needs the size of a virtual batch; got none. Write size=32")
    one_of("remainder", remainder, ("error", "short", "balanced"))
    sites = chosen(model, select)
    if inplace and any(not site.path for site in sites):
        raise BadInput(
            "the model itself is the norm, which cannot become another in place: leave inplace out"
        )
    shapes = _shapes(model, sites, sample)
    subject = model if inplace and not dry_run else copied(model, "convert")
    modules = dict(unwrap(subject).named_modules())
    changes, rows, made = [], [], {}
    for site in sites:
        new = _made(to, site, Old(modules[site.path], shapes.get(site.path, ()), groups, size, remainder))
        after, reason = ("", new) if isinstance(new, str) else (qualified_name(type(new)), "")
        changes.append(SiteChange(site.name, site.type_name, after, reason, site.aliases))
        if isinstance(new, nn.Module) and site.reading is not None:
            made[modules[site.path]] = new
            rows += _differences(site.reading, read(new))
    notes = _notes(to, sites, made, modules)
    before = optimizers.named(model)
    subject = _replaced(subject, made)
    notes += optimizers.told(optimizer, before, optimizers.named(subject))
    if optimizer is not None and not dry_run:
        optimizers.follow(optimizer, before, subject)
    report = ConvertReport(
        "convert",
        tuple(changes),
        notes=notes,
        dry_run=dry_run,
        properties=tuple(dict.fromkeys(rows)),
        function_changes=to not in SAME,
    )
    return (model if dry_run else subject), report


def _made(to: str, site: Chosen, old: Old) -> nn.Module | str:
    return site.reason if site.reading is None else make(to, old)


def _shapes(model: nn.Module, sites: list[Chosen], sample: Any) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Path -> shapes of the inputs of a norm in one forward in eval."""
    if sample is None:
        return {}
    args, kwargs, _ = arguments.on_device(model, sample)
    found: dict[str, tuple[tuple[int, ...], ...]] = {}

    class Watch:
        def __enter__(self) -> None:
            self.handles = [site.module.register_forward_pre_hook(self.entered(site.path)) for site in sites]

        def entered(self, path: str) -> Any:
            def seen(module: nn.Module, given: tuple[Any, ...]) -> None:
                found[path] = (*found.get(path, ()), *(tuple(x.shape) for x in given[:1]))

            return seen

        def __exit__(self, *exc_info: object) -> None:
            for handle in self.handles:
                handle.remove()

    with Session(model) as session:
        session.forward(args or (), kwargs, mode="eval", watch=(Watch(),))
    return found


def _differences(before: Reading, after: Reading) -> list[tuple[str, str, str]]:
    """What follows from one specification and not from the other, and the modes."""
    one, two = _table(before), _table(after)
    return [
        (name, one.get(name, "none"), two.get(name, "none"))
        for name in dict.fromkeys((*one, *two))
        if one.get(name) != two.get(name)
    ]


def _table(reading: Reading) -> dict[str, str]:
    spec = reading.spec
    clauses = str(spec).split("; ")
    found = {
        "statistics": clauses[0],
        "gains on": spec.weight or "none",
        "stored": next((clause for clause in clauses if clause.startswith("running ")), "nothing"),
    }
    for line in str(spec.properties()).splitlines():
        name, _, value = line.partition(": ")
        if name not in UNLISTED:
            found[name] = value
    ranks = " over all ranks" if reading.synchronized else ""
    return found | {"in training by": f"{reading.mode_train}{ranks}", "in evaluation by": reading.mode_eval}


def _notes(
    to: str, sites: list[Chosen], made: dict[nn.Module, nn.Module], modules: dict[str, nn.Module]
) -> tuple[str, ...]:
    if to not in ("batch", "sync", "renorm", "ghost"):
        return ()
    fresh = [
        site.name
        for site in sites
        if getattr(made.get(modules[site.path]), "running_mean", None) is not None
        and site.reading
        and "running_mean" not in site.reading.tensors
    ]
    if not fresh:
        return ()
    return (f"{', '.join(fresh)}: starts from mean 0 and variance 1; recalibrate before evaluation",)


def _replaced(model: Model, made: dict[nn.Module, nn.Module]) -> Model:
    inner = unwrap(model)
    if inner in made:
        new: Any = made[inner]
        return new  # type: ignore[no-any-return]
    for module in list(inner.modules()):
        for name, child in list(module._modules.items()):  # also under a second name
            if child in made:
                setattr(module, name, made[child])
    return model
