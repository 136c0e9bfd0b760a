"""Which normalization of one target is which of the other: by their names, behind prefixes that one of them has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from normscope.targets.norms.listed import ListedNorm

DEPTH = 3
"""components of a prefix at most: ``base_model.model.encoder.``"""
USUAL = 0.5
"""share of the names that have a prefix: ``model.`` stands before all layers of a language model and not its head"""


@dataclass(frozen=True)
class Pairing:
    pairs: tuple[tuple[ListedNorm, ListedNorm], ...]
    only_a: tuple[ListedNorm, ...]
    only_b: tuple[ListedNorm, ...]
    prefixes: tuple[str, str] = ("", "")
    """taken off the names of each"""
    by_order: bool = False
    """no name is in both: paired as they come, since kind and sizes agree one by one"""


def paired(a: Sequence[ListedNorm], b: Sequence[ListedNorm]) -> Pairing:
    """Pair up by name, with the prefixes that make most names agree, the shortest first; else by order."""
    best = max(
        ((mine, theirs) for mine in _prefixes(a) for theirs in _prefixes(b)),
        key=lambda prefixes: (_common(a, b, *prefixes), -len("".join(prefixes))),
    )
    by_name = dict(zip(_bare(b, best[1]), b, strict=True))
    pairs = [
        (norm, by_name[name]) for norm, name in zip(a, _bare(a, best[0]), strict=True) if name in by_name
    ]
    if not pairs and a and len(a) == len(b) and all(_alike(*both) for both in zip(a, b, strict=True)):
        return Pairing(tuple(zip(a, b, strict=True)), (), (), by_order=True)
    taken = {id(norm) for pair in pairs for norm in pair}
    only_a, only_b = (tuple(norm for norm in norms if id(norm) not in taken) for norms in (a, b))
    return Pairing(tuple(pairs), only_a, only_b, best if pairs else ("", ""))


def _prefixes(norms: Sequence[ListedNorm]) -> list[str]:
    """Beginnings of most names, and none. Names that would become one without it keep it."""
    counts: Counter[str] = Counter()
    for norm in norms:
        parts = norm.name.split(".")
        counts.update(".".join(parts[:depth]) + "." for depth in range(1, min(DEPTH + 1, len(parts))))
    usual = [prefix for prefix, count in counts.items() if count >= max(1, USUAL * len(norms))]
    return ["", *(prefix for prefix in usual if len(set(_bare(norms, prefix))) == len(norms))]


def _bare(norms: Sequence[ListedNorm], prefix: str) -> list[str]:
    return [norm.name.removeprefix(prefix) for norm in norms]


def _common(a: Sequence[ListedNorm], b: Sequence[ListedNorm], mine: str, theirs: str) -> int:
    return len(set(_bare(a, mine)) & set(_bare(b, theirs)))


def _alike(a: ListedNorm, b: ListedNorm) -> bool:
    """Both hold the same kinds of tensors, but for a counter, which a graph has not."""
    return {*a.tensors} - {"num_batches_tracked"} == {*b.tensors} - {"num_batches_tracked"} != set()
