"""The normalizations of a model that a transform may touch, and the copy that it works on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from normscope.doctor.modes import has_running_state
from normscope.doctor.refusals import Refused, unwrap
from normscope.doctor.wording import clean_path
from normscope.errors import BadInput, shortened, told
from normscope.reading import Reading, UnknownNormalization, read
from normscope.reading.base import qualified_name

Model = TypeVar("Model", bound=nn.Module)
Select = str | Iterable[str] | Callable[[str, nn.Module], bool] | None
"""``"backbone"`` (it and all inside), ``"layer?.*.bn1"`` (a pattern), several, or ``(path, module) -> bool``"""
REASON = 100
"""letters of the reason why a model cannot be copied: torch tells a story"""
HAND_WRITTEN = (
    "is written by hand, and only layers that can be read are changed: write a layer of torch.nn in its place; for "
    "fold, freeze and recalibrate a method __normscope__ that says what it computes is enough"
)
SHOWN = 6
"""paths that a message names"""


@dataclass(frozen=True)
class Chosen:
    """One normalization module."""

    path: str
    """as ``named_modules`` of the model inside its wrappers gives it"""
    module: nn.Module
    reading: Reading | None
    reason: str = ""
    """why it cannot be read, "" where it can"""
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return clean_path(self.path)

    @property
    def type_name(self) -> str:
        return self.reading.type_name if self.reading else qualified_name(type(self.module))


def chosen(model: nn.Module, select: Select = None) -> list[Chosen]:
    """Modules that normalize, in the order of ``named_modules``, of those that ``select`` names.

    Modules that hold running statistics and are no known normalization are listed too, with the reason.

    Raises:
        BadInput: ``select`` names none of them.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, module in unwrap(model).named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    wanted = _wanted(select)
    found, passed = [], []
    for module, (path, *others) in paths.items():
        site = _site(path, module, tuple(dict.fromkeys(clean_path(other) for other in others)))
        if site is None:
            continue
        if any(wanted(name, module) for name in (site.name, *site.aliases)):
            found.append(site)
        else:
            passed.append(site.name)
    if passed and not found:
        raise BadInput(
            f"select={select!r} names none of the {len(passed)} normalizations; their paths: "
            f"{', '.join(passed[:SHOWN])}{' ...' if len(passed) > SHOWN else ''}"
        )
    return found


def _site(path: str, module: nn.Module, aliases: tuple[str, ...]) -> Chosen | None:
    try:
        return Chosen(path, module, read(module), "", aliases)
    except UnknownNormalization as error:
        if not error.recognized and not has_running_state(module):
            return None
        return Chosen(path, module, None, str(error) if error.recognized else HAND_WRITTEN, aliases)


def _wanted(select: Select) -> Callable[[str, nn.Module], bool]:
    if select is None:
        return lambda path, module: True
    if callable(select):
        return select
    patterns = [select] if isinstance(select, str) else list(select)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise BadInput(
            f"select is a module path, a pattern such as 'backbone.*.bn?', several of these, or a function "
            f"(path, module) -> bool; got {select!r}"
        )

    def matches(path: str, module: nn.Module) -> bool:
        return any(
            path == one or path.startswith(f"{one}.") or not one or fnmatchcase(path, one) for one in patterns
        )

    return matches


def copied(model: Model, doing: str) -> Model:
    """A deep copy.

    Raises:
        Refused: lazy parameters.
        BadInput: torch cannot copy the model.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise Refused(
                f"{clean_path(name)} is lazy: it gets its shape in the first forward pass, and torch cannot copy it "
                f"before. Run the model once on a batch, then {doing} it"
            )
    try:
        with torch.inference_mode(False):  # or the copy could never be written outside
            return copy.deepcopy(model)
    except Exception as error:
        reason = shortened(told(error), lines=1, width=REASON)
        raise BadInput(
            f"{type(model).__name__} cannot be copied ({reason}); pass inplace=True to change the model itself"
        ) from error


def one_of(name: str, value: Any, known: Iterable[str]) -> str:
    """``value``, where it is one of the known words.

    Raises:
        BadInput: it is not.
    """
    words = tuple(known)
    if value not in words:
        raise BadInput(f"{name} is one of {', '.join(map(repr, words))}; got {value!r}")
    return str(value)
