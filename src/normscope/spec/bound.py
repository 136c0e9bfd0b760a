"""A specification together with an input shape: every size that follows from the two."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from normscope.spec.pattern import ELLIPSIS, Axis, Group, Pattern, PatternError, tokenize

if TYPE_CHECKING:
    from normscope.spec.normspec import NormSpec


@dataclass(frozen=True)
class BoundSpec:
    """The elementary axes of a specification on one input shape, and what they imply.

    >>> from normscope.spec import families
    >>> b = families.group_norm(2).bind((8, 6, 5, 5))
    >>> b.shape, b.kept, b.erased, b.set_size, b.sets, b.weight_shape
    ((8, 2, 3, 5, 5), ('b', 'g'), ('c', '...0', '...1'), 75, 16, (6,))
    """

    axes: tuple[Axis, ...]
    weight_shape: tuple[int, ...] | None
    """None without a weight, () for one scalar"""
    bias_shape: tuple[int, ...] | None
    running_shape: tuple[int, ...] | None
    """shape of the stored mean; None without running state"""
    sample_dim: int | None
    """input dimension that holds the samples; None where there is none"""
    segments: tuple[int, ...] = ()
    """sizes of the virtual batches along `sample_dim` where they differ (a remainder); () where they do not.
    `axes` then give the number of virtual batches and the size of the largest, and `shape` is no reshape."""

    @property
    def ragged(self) -> bool:
        """Virtual batches of different sizes: not one reduction but one per segment."""
        return bool(self.segments)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the elementary axes: reshape the input to it."""
        return tuple(axis.size for axis in self.axes)

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes if axis.kept)

    @property
    def erased(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes if not axis.kept)

    @property
    def set_size(self) -> int:
        """Elements per statistic set; of the smallest where the segments differ."""
        return min(self.set_sizes)

    @property
    def set_sizes(self) -> tuple[int, ...]:
        """Elements per statistic set: one number, or one per segment where virtual batches differ."""
        size = prod(axis.size for axis in self.axes if not axis.kept)
        if not self.segments:
            return (size,)
        return tuple(size // max(self.segments) * segment for segment in self.segments)

    @property
    def sets(self) -> int:
        """Number of statistic sets."""
        return prod(axis.size for axis in self.axes if axis.kept)

    def size_of(self, name: str) -> int:
        """Size of one elementary axis. Raises KeyError with the names there are."""
        for axis in self.axes:
            if axis.name == name:
                return axis.size
        raise KeyError(f"no axis {name!r}; there are {', '.join(axis.name for axis in self.axes)}")


def split_samples(
    samples: int, sizes: dict[str, int], virtual: str, inner: str, remainder: str
) -> tuple[int, ...]:
    """Sizes of the virtual batches that ``samples`` samples fall into.

    ``sizes`` fixes the size of a batch (``inner``) or their number (``virtual``). ``"short"`` fills batch
    after batch and leaves a short last one; ``"balanced"`` keeps that number of batches and lets sizes differ
    by one.

    >>> split_samples(33, {"b": 32}, "v", "b", "short"), split_samples(33, {"b": 32}, "v", "b", "balanced")
    ((32, 1), (17, 16))
    >>> split_samples(33, {"v": 4}, "v", "b", "short"), split_samples(33, {"v": 4}, "v", "b", "balanced")
    ((9, 9, 9, 6), (9, 8, 8, 8))
    """
    if samples == 0:
        return ()
    size = sizes[inner] if inner in sizes else -(-samples // sizes[virtual])
    if remainder == "short":
        return tuple(min(size, samples - start) for start in range(0, samples, size))
    count = min(sizes[virtual], samples) if virtual in sizes else -(-samples // size)
    least, longer = divmod(samples, count)
    return (least + 1,) * longer + (least,) * (count - longer)


def evened(spec: NormSpec, shape: tuple[int, ...]) -> NormSpec:
    """The specification, with ``remainder="balanced"`` where the samples do not fall into its virtual batches.

    For where that is no error: stored statistics normalize each element alone.

    >>> from normscope.spec import families
    >>> evened(families.ghost_batch_norm(size=4), (6, 3)).bind((6, 3)).set_sizes
    (3,)
    """
    group = spec.sample_group or ()
    if len(group) != 2 or "t" in group or spec.remainder != "error":
        return spec
    try:
        spec.bind(shape)
    except PatternError:
        return spec.replace(remainder="balanced")
    return spec


def bind(spec: NormSpec, shape: tuple[int, ...]) -> BoundSpec:
    """See `NormSpec.bind`."""
    pattern = spec.pattern
    sizes = dict(spec.sizes)
    shape = tuple(int(n) for n in shape)
    _check_rank(spec, shape)
    segments: tuple[int, ...] = ()
    if spec.remainder != "error" and len(shape) >= pattern.min_ndim:
        group = spec.sample_group
        assert group is not None  # validated: a remainder has a sample axis of two factors
        samples = shape[_dim_of(pattern, group, len(shape))]
        segments = split_samples(samples, sizes, group[0], group[1], spec.remainder)
        if len(set(segments)) <= 1:
            segments = ()
        elif segments:
            # Bind a whole number of largest batches, then put the true number of samples back.
            sizes |= {group[0]: len(segments), group[1]: max(segments)}
            whole = list(shape)
            whole[_dim_of(pattern, group, len(shape))] = len(segments) * max(segments)
            return _assemble(spec, pattern.bind(whole, sizes), segments)
        if samples:
            parts = split_samples(samples, sizes, group[0], group[1], spec.remainder)
            sizes |= {group[0]: len(parts), group[1]: parts[0]}
    return _assemble(spec, pattern.bind(shape, sizes), segments)


def _assemble(spec: NormSpec, axes: tuple[Axis, ...], segments: tuple[int, ...]) -> BoundSpec:
    running = None if spec.running is None else spec.running_axes
    return BoundSpec(
        axes=axes,
        weight_shape=_shape_on(spec.weight, axes),
        bias_shape=_shape_on(spec.bias, axes),
        running_shape=_shape_on(running, axes),
        sample_dim=_sample_dim(spec, axes),
        segments=segments,
    )


def _check_rank(spec: NormSpec, shape: tuple[int, ...]) -> None:
    if spec.ndim is None:
        return
    low, high = spec.ndim
    if len(shape) < low or (high is not None and len(shape) > high):
        if high == low:
            wanted = f"{low}"
        else:
            wanted = f"{low} or more" if high is None else f"{low} to {high}"
        raise spec.pattern.misfit(
            shape, spec.sizes, f"the input has {wanted} axes, the shape has {len(shape)}"
        )


def _dim_of(pattern: Pattern, group: Group, ndim: int) -> int:
    before = pattern.left.index(group)
    spread = (ELLIPSIS,) in pattern.left[:before]
    return before + (ndim - pattern.min_ndim - 1 if spread else 0)


def _sample_dim(spec: NormSpec, axes: tuple[Axis, ...]) -> int | None:
    group = spec.sample_group
    if group is None:
        return None
    first = f"{ELLIPSIS}0" if group == (ELLIPSIS,) else group[0]
    return next((axis.dim for axis in axes if axis.name == first), None)


def _shape_on(where: str | None, axes: tuple[Axis, ...]) -> tuple[int, ...] | None:
    if where is None:
        return None
    sizes = {axis.name: axis.size for axis in axes}
    shape: list[int] = []
    for group in tokenize(where):
        if group == (ELLIPSIS,):
            shape += [axis.size for axis in axes if axis.name.startswith(ELLIPSIS)]
        else:
            shape.append(prod(sizes[name] for name in group))
    return tuple(shape)
