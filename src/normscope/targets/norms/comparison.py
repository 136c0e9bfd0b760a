"""``compare_norms``: the normalizations of two targets, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.doctor.report import plain
from normscope.doctor.wording import listed, plural
from normscope.errors import BadInput, BadTarget, printable
from normscope.targets.norms.differences import (
    NormDifference,
    counters_differ,
    differences,
    one_more,
)
from normscope.targets.norms.listed import FILE, GRAPH, ListedNorm, NormList
from normscope.targets.norms.pairing import Pairing, paired

if TYPE_CHECKING:
    from normscope.doctor.site import Site

SHOWN = 8
"""norms that a text names of one kind of difference, the gravest first"""


@dataclass(frozen=True)
class NormPair:
    """One normalization that both targets have."""

    name: str
    a: str
    b: str
    """its name in each"""
    type_a: str
    type_b: str
    differences: tuple[NormDifference, ...]
    """none where the two are the same"""


@dataclass(frozen=True)
class NormsComparison:
    """Whether two targets hold the same normalizations. ``bool`` is True only where they do; ``str`` is for reading.

    Attributes:
        same: None where neither holds any.
        pairs: every normalization that both have, in the order of the first.
        only_a, only_b: names of those that one alone has.
        prefixes: what was taken off the names of each to pair them up.
        notes: what else to know.
    """

    source_a: str
    source_b: str
    pairs: tuple[NormPair, ...] = ()
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    prefixes: tuple[str, str] = ("", "")
    notes: tuple[str, ...] = field(default=())

    @property
    def same(self) -> bool | None:
        if not self.pairs and not self.only_a and not self.only_b:
            return None
        return not (self.only_a or self.only_b or self.different)

    @property
    def different(self) -> tuple[NormPair, ...]:
        """The pairs that differ."""
        return tuple(pair for pair in self.pairs if pair.differences)

    def __bool__(self) -> bool:
        return self.same is True

    def __str__(self) -> str:
        verdict = {True: "the same normalizations", False: "not the same", None: "no normalization in either"}
        lines = [f"{self.source_a} and {self.source_b}: {verdict[self.same]}"]
        if self.same is not None:
            lines.append(
                f"  {plural(len(self.pairs), 'normalization')} in both, {len(self.different)} of them different"
            )
        for names, source in ((self.only_a, self.source_a), (self.only_b, self.source_b)):
            if names:
                lines.append(f"  {len(names)} only in {source}: {listed(names, SHOWN)}")
        lines += [f"  - {line}" for line in self._told()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(map(printable, lines))

    def _told(self) -> Iterator[str]:
        """A line for each field or tensor, with the norms where it differs, those that differ most first."""
        found = [(d, pair.name or "the model") for pair in self.pairs for d in pair.differences]
        order = {d.field: place for place, (d, _) in reversed([*enumerate(found)])}
        found.sort(key=lambda each: (order[each[0].field], -_weight(each[0])))
        for _, group in groupby(found, key=lambda each: each[0].field):
            here = [*group]
            if math.isnan(here[0][0].size):
                for said, alike in groupby(
                    sorted(here, key=lambda each: str(each[0])), key=lambda each: str(each[0])
                ):
                    yield f"{said}, at {listed([name for _, name in alike], SHOWN)}"
                continue
            names = [name for _, name in here]
            rest = f"; also {listed(names[1:], SHOWN)}" if len(names) > 1 else ""
            most = ", most at" if len(names) > 1 else " at"
            yield f"{here[0][0].field} of {plural(len(names), 'normalization')}{most} {names[0]}: " + (
                str(here[0][0]).partition(": ")[2] + rest
            )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; NaN and infinities as strings, what was not measured as null."""
        return {
            "schema": 1,
            "a": self.source_a,
            "b": self.source_b,
            "same": self.same,
            "prefixes": list(self.prefixes),
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "pairs": [
                {
                    "name": pair.name,
                    "a": {"name": pair.a, "type": pair.type_a},
                    "b": {"name": pair.b, "type": pair.type_b},
                    "differences": [_as_json(d) for d in pair.differences],
                }
                for pair in self.pairs
            ],
            "notes": list(self.notes),
        }


def compare_norms(a: Any, b: Any, *, progress: Callable[[str], None] | None = None) -> NormsComparison:
    """Whether two targets hold the same normalizations: which stand in one alone, and in what those of both differ.

    They are paired by name, behind a prefix that one of them has (``module.``, ``model.``); where no name is in both,
    in order. Compared are eps, momentum, axes and the other fields, as far as both tell them, and every parameter and
    stored statistic: the largest difference, relative to the largest number of both, of statistics also in standard
    deviations. Equal means equal: of tensors in two dtypes up to the rounding of the coarser one.

    Of a file of weights the tensors of one norm are read at a time, so that memory does not grow with it.

    Arguments:
        a, b: each a state dict, the path of a file or folder of weights (as `check_state` reads them), of an ``.onnx``
            file, a `torch.nn.Module`, or a `NormList`.
        progress: called with a name before each pair.

    Raises:
        BadTarget: a file cannot be read.
        BadInput: neither of these, or a sparse tensor.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    >>> state = {f"module.{name}": tensor.clone() for name, tensor in net.state_dict().items()}
    >>> compare_norms(net, state).same
    True
    >>> state["module.1.weight"][2] = 1.5
    >>> [(pair.name, str(d)) for pair in compare_norms(net, state).pairs for d in pair.differences]
    [('1', 'weight: 1 against 1.5 at [2], off by up to 0.5 (33.3 % of the largest)')]
    """
    one, two = _list(a, "first"), _list(b, "second")
    left, notes = _comparable(one, two)
    found = paired(*left)
    pairs, counts, more = [], [], []
    for mine, theirs in found.pairs:
        name = mine.name.removeprefix(found.prefixes[0])
        if progress is not None:
            progress(name)
        site_a, site_b = _read(mine, one), _read(theirs, two)
        pairs.append(_pair(name, mine, theirs, site_a, site_b))
        if counters_differ(site_a, site_b):
            counts.append(name)
        if one_more(site_a, site_b):
            more.append(name)
    if counts:
        notes.append(f"counters of batches differ, which changes no output, at {listed(counts)}")
    if more:
        notes.append(
            f"the graph multiplies by 1 + the weight of the file at {listed(more)}; that the model does so is not in a "
            "file of weights"
        )
    return NormsComparison(
        one.source,
        two.source,
        tuple(pairs),
        tuple(_title(norm) for norm in found.only_a),
        tuple(_title(norm) for norm in found.only_b),
        found.prefixes,
        (*_how(found, one, two), *notes),
    )


def _pair(name: str, a: ListedNorm, b: ListedNorm, site_a: Site, site_b: Site) -> NormPair:
    return NormPair(
        name, _title(a), _title(b), site_a.type_name, site_b.type_name, tuple(differences(site_a, site_b))
    )


def _read(norm: ListedNorm, of: NormList) -> Site:
    site = norm.load()
    if norm.tensors and not site.tensors:
        raise BadTarget(f"{of.source}: {_title(norm)} holds more numbers than any norm; it is not read")
    for role, tensor in site.tensors.items():
        if str(tensor.layout).startswith("torch.sparse"):
            raise BadInput(
                f"tensors are compared number by number; {role} of {_title(norm)} in {of.source} is sparse "
                f"({tensor.layout}). Pass tensor.to_dense()"
            )
    return site


def _title(norm: ListedNorm) -> str:
    return norm.title or "the model"


def _list(target: Any, which: str) -> NormList:
    from normscope.targets.norms import lists

    if isinstance(target, NormList):
        return target
    if isinstance(target, (str, Path)):
        return lists.of_graph(target) if str(target).lower().endswith(".onnx") else lists.of_state(target)
    if isinstance(target, Mapping):
        return lists.of_state(target)
    import torch

    if isinstance(target, torch.nn.Module):
        return lists.of_model(target)
    raise BadInput(
        f"compare_norms takes models, state dicts and the paths of files; the {which} is a {type(target).__name__}. "
        "Of a single layer or a function, use normscope.compare"
    )


def _comparable(
    a: NormList, b: NormList
) -> tuple[tuple[tuple[ListedNorm, ...], tuple[ListedNorm, ...]], list[str]]:
    """Beside a file of weights only norms that hold tensors: others cannot stand in it.

    A vector of a file is the gain of a norm where the other target has a norm with a gain alone under its name.
    """
    sides, notes = [], [f"{each.source}: {note}" for each in (a, b) for note in each.notes]
    for own, other in ((a, b), (b, a)):
        bare = [norm for norm in own.norms if not norm.tensors] if other.kind == FILE else []
        gains = {norm.name for norm in other.norms if norm.tensors == ("weight",)}
        also = tuple(norm for norm in own.maybe if norm.name in gains)
        sides.append((*(norm for norm in own.norms if norm not in bare), *also))
        if left := [name for name in own.vectors if name not in {norm.name for norm in also}]:
            notes.append(
                f"{own.source}: {plural(len(left), 'vector')} without a bias under no norm's name were left out: "
                f"{listed(left)}"
            )
        if bare:
            notes.append(
                f"left out of {own.source}, since without tensors they stand in no file of weights: "
                f"{listed([norm.title for norm in bare])}"
            )
    return (sides[0], sides[1]), notes


def _how(found: Pairing, a: NormList, b: NormList) -> Iterator[str]:
    for prefix, each in zip(found.prefixes, (a, b), strict=True):
        if prefix:
            yield f"paired without the prefix {prefix!r} of {each.source}"
    if found.by_order:
        yield "no name is in both: paired in the order in which they come"

    lacking = found.only_b if a.kind == GRAPH else found.only_a
    if (a.kind == GRAPH) != (b.kind == GRAPH) and any("running_var" in norm.tensors for norm in lacking):
        yield "a batch norm that an exporter folded into the layer before it is none of the graph's any more"


def _weight(difference: NormDifference) -> float:
    """Statistics by their standard deviations, everything else by its relative size."""
    for value in (difference.size if math.isinf(difference.size) else math.nan, difference.deviations):
        if not math.isnan(value):
            return value
    return 0.0 if math.isnan(difference.relative) else difference.relative


def _as_json(d: NormDifference) -> dict[str, Any]:
    numbers = {"size": d.size, "relative": d.relative, "deviations": d.deviations}
    measured = {name: None if math.isnan(value) else plain(value) for name, value in numbers.items()}
    return {"field": d.field, "a": d.a, "b": d.b, **measured, "place": list(d.place)}
