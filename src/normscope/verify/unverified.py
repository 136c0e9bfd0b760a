"""The normalizations of a model that the protocol cannot take, each with its reason: nothing is skipped silently."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from normscope.doctor.describe import describe
from normscope.doctor.graph_norm import GraphNorm
from normscope.doctor.report import SiteRow
from normscope.doctor.wording import listed
from normscope.reading import UnknownNormalization, read, readers
from normscope.reading.base import qualified_name

DECLARE = "verify it alone, as (layer, NormSpec)"
HOW = (
    "To verify a layer by what you say it computes, let the target return (layer, normscope.NormSpec(...)), or call "
    "normscope.verify.run_layer(layer, spec=...)."
)


@dataclass(frozen=True)
class Unverified:
    """One place where a model normalizes, or seems to, and why it was not verified."""

    site: str
    type_name: str
    why: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def unverified(model: nn.Module, verified: set[str], inputs: Any = None) -> tuple[Unverified, ...]:
    """What is not verified beside the modules at the paths ``verified``, by path.

    Without ``inputs``: modules that a reader refuses, and those that cannot be read and are called a norm. With them,
    one forward also finds calls of functions and norms written by hand, whatever they are called.
    """
    found = [*_refused(model)]
    refused = {item.site for item in found}
    if inputs is not None:  # what a refused module calls inside is told with it
        found += (item for item in _called(model, inputs) if not refused & {*_paths(item.site)})
    found += _by_name(model, {item.site.partition(":")[0] for item in found} | verified)
    first = {item.site: item for item in reversed(found)}
    return tuple(first[site] for site in sorted(first))


def blocked(
    model: nn.Module, reasons: dict[str, str], missed: tuple[Unverified, ...]
) -> tuple[Unverified, ...]:
    """``missed``, and the norms at the paths of ``reasons``, which can be read but not verified."""
    named = ((path, _type_name(model.get_submodule(path))) for path in reasons)
    items = [Unverified(path or name, name, reasons[path]) for path, name in named]
    return tuple(sorted([*missed, *items], key=lambda item: item.site))


def _type_name(module: nn.Module) -> str:
    return module.original_name if isinstance(module, GraphNorm) else qualified_name(type(module))


def _paths(site: str) -> Iterator[str]:
    """The path of a site and of every module around it."""
    parts = site.partition(":")[0].split(".")
    return (".".join(parts[: count + 1]) for count in range(len(parts)))


def _called(model: nn.Module, inputs: Any) -> Iterator[Unverified]:
    try:
        rows = describe(model, inputs)
    except Exception as error:  # the user's own forward
        why = f"the model raised {type(error).__name__} on its inputs, so only its modules were searched: {error}"
        yield Unverified("calls inside the forward", qualified_name(type(model)), why)
        return
    yield from (
        Unverified(row.name, row.type_name, _why(row)) for row in rows if row.kind not in ("module", "node")
    )


def _why(row: SiteRow) -> str:
    if row.kind == "hand-written":
        return f"written by hand; {DECLARE}"
    if row.kind in ("hand-written", "inlined"):
        return f"written by hand inside a larger forward; make it a module and {DECLARE}"
    return "called inside a forward, and the protocol takes modules; normscope check measures it where it is"


def _refused(model: nn.Module) -> Iterator[Unverified]:
    for path, module in model.named_modules():
        try:
            for reader in readers():
                if reader.read is not None and reader.needs in sys.modules:
                    reader.read(module, None)
        except (
            UnknownNormalization,
            ValueError,
        ) as error:  # ValueError: numbers that no specification can hold
            name = qualified_name(type(module))
            why = str(error).removeprefix(f"{name} ").rstrip(".")
            yield Unverified(path or name, name, why)


def _by_name(model: nn.Module, known: set[str]) -> Iterator[Unverified]:
    """Modules called a norm in which nothing is known yet; the innermost where several are nested."""
    for path, module in reversed([*model.named_modules()]):
        name = qualified_name(type(module))
        whole_model = path == "" and any(True for _ in module.children())
        inside = any(path in (other, "") or other.startswith(f"{path}.") for other in known)
        if "norm" in type(module).__name__.lower() and not inside and not whole_model:
            known = known | {path}
            on_weight = "parametrizations" in path.split(".")
            why = (
                "normalizes a weight, and the protocol takes layers"
                if on_weight
                else f"cannot be read; {DECLARE}"
            )
            yield Unverified(path or name, name, why)


def nothing_to_verify(model: nn.Module, missed: tuple[Unverified, ...]) -> UnknownNormalization:
    """The error where the protocol can take nothing of a model."""
    try:
        read(model)
    except UnknownNormalization as error:
        alone = not any(True for _ in model.children())
        if alone or not missed:
            return UnknownNormalization(f"{error} {HOW}" if alone else str(error), invalid=error.invalid)
    by: dict[str, list[str]] = {}
    for item in missed:
        by.setdefault(item.why, []).append(f"{item.site} ({item.type_name})")
    named = "; ".join(f"{listed(sites)}: {why}" for why, sites in by.items())
    name = qualified_name(type(model))
    if [item.site for item in missed] == [name]:
        return UnknownNormalization(f"{name} is {missed[0].why}")
    told = f"no norm of {name} can be verified: {named}"
    if all(item.why.startswith("not verifiable") for item in missed):  # a declaration would not help
        return UnknownNormalization(told)
    return UnknownNormalization(f"{told}. {HOW}")
