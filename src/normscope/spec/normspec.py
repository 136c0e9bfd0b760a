"""NormSpec: exactly what one normalization computes, with every convention that implementations differ in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from normscope.spec import bound, text, validate
from normscope.spec.bound import BoundSpec
from normscope.spec.parts import Cast, Running, Sizes
from normscope.spec.pattern import Group, Pattern, tokenize, untokenize

if TYPE_CHECKING:
    from normscope.spec.laws import Properties
    from normscope.spec.sameness import Sameness


@dataclass(frozen=True, repr=False)
class NormSpec:
    """A normalization ``y = (weight_offset + weight) * gain * (x - mean) / denominator + bias``.

    Without a weight the factor (weight_offset + weight) is 1. The mode (batch, running, frozen, input) is no
    part of it: one layer has one spec in training and in evaluation.

    Arguments:
        stats: the axes as an einops reduction, ``"b c ... -> c"``: what stands right of the arrow is kept
            (indexes the statistic sets), what vanishes is erased (is averaged over).
        ndim: bounds ``(low, high)`` of the input's number of axes, ``high`` None for no bound; a number for
            exactly that many. A wrong rank is otherwise silent.
        sample_axis: name of an axis (or ``"..."``: its first axis) whose input axis holds the samples; ``""`` for
            none. None: the input axis that holds ``b``, else the first axis of a ``...`` that comes first,
            else none.
        sizes: sizes of named axes, ``{"g": 32}``; each factored axis needs all but one.
        remainder: what a sample axis ``(v b)`` does when it does not divide: ``"error"``, ``"short"`` (33 =
            32 + 1) or ``"balanced"`` (33 = 17 + 16). Needs exactly one of the two sizes.
        weight, bias: the axes each lives on, composed as in the input, ``"(g c)"`` for one axis of both.
            None: there is none. ``""``: one scalar.
        source: ``"parameter"``, or ``"input"`` where gain and bias are computed (adaptive, conditional).
        center: subtract the mean.
        scale: v under the denominator: ``"std"`` the variance, about the mean whether or not it is subtracted;
            ``"rms"`` the mean square and ``"l2"`` the sum of squares, both of what is divided: x - mean where
            ``center``, else x; or the covariance over `whiten`: ``"zca"``, ``"cholesky"``, ``"iternorm"``.
        whiten: kept axes that are decorrelated jointly, ``"c"``; only with a whitening scale.
        iterations: steps of Newton's method, for ``"iternorm"``.
        whiten_state: whether running state is the ``"covariance"`` or the ``"whitening"`` matrix.
        correction: the variance that normalizes is sum((x - mean)^2) / (n - correction).
        eps: the constant; None is the machine epsilon of the computing dtype. Zero and negative numbers can
            be written down, since modules can be built so; `properties` says what is wrong with them.
        eps_at: where it stands, with v as `scale` says: ``"variance"`` sqrt(v + eps), ``"std"`` sqrt(v) +
            eps, ``"max"`` max(sqrt(v), eps), ``"max_variance"`` sqrt(max(v, eps)); with a whitening scale and
            covariance S of size k: ``"variance"`` S + eps I, ``"trace"`` S + eps trace(S) / k I.
        weight_offset: 1.0 where the stored weight is the distance from one.
        gain: a fixed factor, such as alpha * v_threshold.
        running: `Running`, or None where no statistics are stored.
        cast: `Cast`, the dtype of the arithmetic.

    Raises PatternError (the pattern) and SpecError (any other field), both ValueError.

    >>> spec = NormSpec("b (g c) ... -> b g", sizes={"g": 32}, weight="(g c)", bias="(g c)")
    >>> print(spec)
    b (g c) ... -> b g, g=32; centered; std, biased; eps 1e-05 inside the root; weight (g c); bias (g c)
    >>> NormSpec.parse(str(spec)) == spec
    True
    """

    stats: str
    _: KW_ONLY
    ndim: tuple[int, int | None] | None = None
    sample_axis: str | None = None
    sizes: Mapping[str, int] = field(default_factory=Sizes)
    remainder: str = "error"
    weight: str | None = None
    bias: str | None = None
    source: str = "parameter"
    center: bool = True
    scale: str = "std"
    whiten: str = ""
    iterations: int = 5
    whiten_state: str = "covariance"
    correction: float = 0
    eps: float | None = 1e-5
    eps_at: str = "variance"
    weight_offset: float = 0.0
    gain: float = 1.0
    running: Running | None = None
    cast: Cast = field(default_factory=Cast)

    def __post_init__(self) -> None:
        pattern = Pattern.parse(self.stats)
        tidy: dict[str, Any] = {
            "stats": str(pattern),
            "ndim": validate.tidy_ndim(self.ndim, pattern),
            "sizes": Sizes(self.sizes),
            "weight": None if self.weight is None else untokenize(tokenize(self.weight)),
            "bias": None if self.bias is None else untokenize(tokenize(self.bias)),
            "sample_axis": None if self.sample_axis == pattern.usual_samples else self.sample_axis,
        }
        for name, value in tidy.items():
            object.__setattr__(self, name, value)
        validate.check(self)
        if self.running is not None and self.running.over is not None:
            # one way to say one thing: the usual axes are None
            over = untokenize(tokenize(self.running.over))
            usual = replace(self, running=replace(self.running, over=None)).running_axes
            object.__setattr__(self, "running", replace(self.running, over=None if over == usual else over))

    # The axes ---------------------------------------------------------------------------------------------------

    @property
    def pattern(self) -> Pattern:
        """`stats`, parsed."""
        return Pattern.parse(self.stats)

    @property
    def sample_group(self) -> Group | None:
        """The input axis that holds the samples, as its factors; ``("...",)`` for the first axis of the ellipsis."""
        name = self.pattern.usual_samples if self.sample_axis is None else self.sample_axis
        return self.pattern.group_of(name) if name else None

    @property
    def running_axes(self) -> str:
        """The axes that running state lives on (or would): `Running.over`, else the kept axes that are no samples."""
        if self.running is not None and self.running.over is not None:
            return self.running.over
        samples = {"b", "v", self.sample_axis}
        return " ".join(name for name in self.pattern.kept if name not in samples)

    def bind(self, shape: Sequence[int]) -> BoundSpec:
        """Bind to an input shape: sizes of the elementary axes and everything that follows.

        Raises PatternError with what is wrong, the pattern, the shape and the sizes.

        >>> NormSpec("... d -> ...", weight="d").bind((2, 7, 16)).set_size
        16
        """
        return bound.bind(self, tuple(shape))

    # What follows -----------------------------------------------------------------------------------------------

    def properties(self, shape: Sequence[int] | None = None) -> Properties:
        """What follows from the specification by algebra; with an input shape, sizes too. See `Properties`."""
        from normscope.spec.laws import properties

        return properties(self, shape)

    def canonical(self, set_size: int | None = None) -> NormSpec:
        """The same function with correction 0, offset 0, gain 1 and rms units. See `sameness.canonical`."""
        from normscope.spec.sameness import canonical

        return canonical(self, set_size)

    def same_function(
        self, other: NormSpec, *, layout: Mapping[str, str] | None = None, shape: Sequence[int] | None = None
    ) -> Sameness:
        """Whether two specifications are one function, and if not, why. See `sameness.same_function`."""
        from normscope.spec.sameness import same_function

        return same_function(self, other, layout=layout, shape=shape)

    # Copies and text --------------------------------------------------------------------------------------------

    def replace(self, **changes: Any) -> NormSpec:
        """A copy with some fields changed, validated anew."""
        copy: NormSpec = replace(self, **changes)
        return copy

    def changes(self) -> dict[str, Any]:
        """The fields that differ from their defaults, `stats` aside."""
        changed = {}
        for f in fields(self):
            usual = f.default_factory() if f.default_factory is not MISSING else f.default
            if f.name != "stats" and getattr(self, f.name) != usual:
                changed[f.name] = getattr(self, f.name)
        return changed

    def __repr__(self) -> str:
        said = "".join(f", {name}={value!r}" for name, value in self.changes().items())
        return f"NormSpec({self.stats!r}{said})"

    def __str__(self) -> str:
        return text.to_text(self)

    @staticmethod
    def parse(line: str) -> NormSpec:
        """Read what ``str`` wrote. Raises SpecError naming the clause that cannot be read."""
        return NormSpec(**text.from_text(line))

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values, with the version of the format under ``"normspec"``."""
        return text.to_json(self)

    @staticmethod
    def from_json(data: str | Mapping[str, Any]) -> NormSpec:
        """Read what `to_json` gave, as a mapping or as JSON text. Raises SpecError on unknown fields or versions.

        >>> spec = NormSpec("b c ... -> c", weight="c", running=Running())
        >>> NormSpec.from_json(spec.to_json()) == spec
        True
        """
        return NormSpec(**text.from_json(data))
