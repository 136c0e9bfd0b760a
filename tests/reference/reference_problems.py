"""Random problems for the reference: any pattern, any convention, any mask; and a slow second opinion."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from normscope.reference import RunningState
from normscope.spec import NormSpec, Running

Array = np.ndarray[Any, Any]


@dataclass
class Problem:
    spec: NormSpec
    x: Array
    weight: Array | None
    bias: Array | None
    mask: Array | None
    names: list[list[str]]
    """names on each input axis"""
    sizes: dict[str, int]
    running: RunningState | None = None
    training: bool = True
    keywords: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.keywords = {"running": self.running, "training": self.training, "mask": self.mask}

    def coordinates(self, index: tuple[int, ...]) -> dict[str, int]:
        """Name -> coordinate of one element, by counting."""
        found: dict[str, int] = {}
        for position, group in zip(index, self.names, strict=True):
            cells = itertools.product(*(range(self.sizes[name]) for name in group))
            found |= dict(zip(group, next(itertools.islice(cells, position, None)), strict=True))
        return found

    def entry(self, pattern: str, where: dict[str, int]) -> tuple[int, ...]:
        """Index into a parameter on ``pattern`` (names, or one parenthesis)."""
        if pattern.startswith("("):
            group = pattern.strip("()").split()
            cells = list(itertools.product(*(range(self.sizes[name]) for name in group)))
            return (cells.index(tuple(where[name] for name in group)),)
        return tuple(where[name] for name in pattern.split())


def second_opinion(p: Problem) -> Array:
    """The forward, element by element, from exactly rounded sums."""
    spec, right = p.spec, p.spec.stats.partition("->")[2].split()
    y = np.zeros(p.x.shape)
    mask = np.ones(p.x.shape, bool) if p.mask is None else np.broadcast_to(p.mask, p.x.shape)
    cells = {index: p.coordinates(index) for index in np.ndindex(p.x.shape)}
    sets: dict[tuple[int, ...], list[float]] = {}
    for index, where in cells.items():
        members = sets.setdefault(tuple(where[name] for name in right), [])
        if mask[index]:
            members.append(float(p.x[index]))
    for index, where in cells.items():
        if not mask[index]:
            continue
        members = sets[tuple(where[name] for name in right)]
        n, mean = len(members), math.fsum(members) / len(members)
        about = mean if spec.center or spec.scale == "std" else 0.0
        square = math.fsum((value - about) ** 2 for value in members)
        v = {
            "std": square / (n - spec.correction) if n > spec.correction else math.nan,
            "rms": square / n,
        }.get(spec.scale, square)
        if p.running is not None and not p.training:
            over = tuple(where[name] for name in right if name not in ("b", "v"))
            mean, v = float(p.running.mean[over]), float(p.running.var[over])
        eps = float(spec.eps)
        s = {
            "variance": math.sqrt(v + eps),
            "std": math.sqrt(v) + eps,
            "max": max(math.sqrt(v), eps),
            "max_variance": math.sqrt(max(v, eps)),
        }[spec.eps_at]
        gain = 1.0 if p.weight is None else spec.weight_offset + p.weight[p.entry(spec.weight, where)]
        shift = 0.0 if p.bias is None else p.bias[p.entry(spec.bias, where)]
        y[index] = gain * spec.gain * (p.x[index] - mean * spec.center) / s + shift
    return y


@st.composite
def problems(draw: st.DrawFn, *, state: bool = True) -> Problem:
    """A random problem: 1 to 4 input axes, some factored, in random order, at most about 100 elements."""
    pool = list("bvtcghwd")
    names, sizes, fixed = [], {}, {}
    for _ in range(draw(st.integers(1, 4))):
        group = [pool.pop(0) for _ in range(draw(st.sampled_from([1, 1, 2])))]
        names.append(group)
        sizes |= {name: draw(st.integers(1, 3)) for name in group}
        fixed |= {name: sizes[name] for name in group[1:]}
    flat = [name for group in names for name in group]
    left = " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in names)
    right = draw(st.lists(st.sampled_from(flat), unique=True, max_size=len(flat) - 1))
    factored = [f"({' '.join(group)})" for group in names if len(group) == 2]

    def parameter() -> str | None:
        kind = draw(st.sampled_from(["none", "scalar", "names", "names", "factored"]))
        if kind == "factored" and factored:
            return draw(st.sampled_from(factored))
        if kind == "names":
            return " ".join(draw(st.lists(st.sampled_from(flat), unique=True, min_size=1, max_size=2)))
        return None if kind == "none" else ""

    scale = draw(st.sampled_from(["std", "std", "rms", "l2"]))
    weight = parameter()
    running = Running() if state and draw(st.booleans()) else None
    spec = NormSpec(
        f"{left} -> {' '.join(right)}",
        sizes=fixed,
        sample_axis="" if "b" not in flat else None,
        weight=weight,
        bias=parameter(),
        center=draw(st.booleans()),
        scale=scale,
        correction=draw(st.sampled_from([0, 0, 1, 0.5])) if scale == "std" else 0,
        eps=draw(st.sampled_from([0.1, 0.5, 1.5])),
        eps_at=draw(st.sampled_from(["variance", "std", "max", "max_variance"])),
        weight_offset=draw(st.sampled_from([0.0, 1.0])) if weight is not None else 0.0,
        gain=draw(st.sampled_from([1.0, 0.7])),
        running=running,
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = tuple(math.prod(sizes[name] for name in group) for group in names)

    def values(pattern: str | None) -> Array | None:
        if pattern is None or draw(st.integers(0, 4)) == 0:
            return None
        if pattern.startswith("("):
            return rng.normal(0.5, 1, math.prod(sizes[name] for name in pattern.strip("()").split()))
        return rng.normal(0.5, 1, [sizes[name] for name in pattern.split()])

    mask = None
    if draw(st.booleans()):
        thin = [n if draw(st.booleans()) else 1 for n in shape]
        mask = rng.random(thin) < 0.7
    kept = spec.stats.partition("->")[2].split()  # in the order of the input
    stored = [sizes[name] for name in kept if name not in ("b", "v")]
    return Problem(
        spec,
        rng.normal(draw(st.sampled_from([0.0, 3.0])), 1.5, shape),
        values(spec.weight),
        values(spec.bias),
        mask,
        names,
        sizes,
        None if running is None else RunningState(rng.normal(1, 1, stored), rng.uniform(0.3, 2, stored)),
        running is None or draw(st.booleans()),
    )
