"""What of a normalization can move into a neighbouring linear map.

A linear map here is a linear layer or a convolution that produces (before) or reads (after) one feature axis,
with nothing between it and the norm. The axis is the input axis of the norm that holds the parameters in
question.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from normscope.spec.pattern import ELLIPSIS, Group, tokenize, untokenize

if TYPE_CHECKING:
    from normscope.spec.normspec import NormSpec

PADDING = "no zero padding: at a padded border the shift would be wrong"


@dataclass(frozen=True)
class Fold:
    """One part of a norm that a neighbour can take over."""

    part: str
    """``"norm"`` (all of it), ``"gain"``, ``"bias"``, or ``"centering"``"""
    into: str
    """``"before"`` (the linear map that feeds the norm) or ``"after"`` (the one that it feeds)"""
    axis: str
    """the feature axis, as in the pattern"""
    mode: str
    """``"running"``: in evaluation by stored statistics; ``"any"``"""
    condition: str = ""
    """what the neighbour must satisfy besides"""

    def __str__(self) -> str:
        when = " by stored statistics" if self.mode == "running" else ""
        which = {"before": "that feeds it", "after": "that it feeds"}[self.into]
        text = f"{self.part} on {self.axis}{when} into the linear map {which}"
        return f"{text}; {self.condition}" if self.condition else text


def folds(spec: NormSpec) -> tuple[Fold, ...]:
    """All folds of a specification.

    - By stored statistics the norm is y = a x + b with a, b on the state's axis (a matrix where it whitens):
    it folds
      into the map before, W' = a W, and into the map after where that does not pad.
    - Gain and bias are last, so they fold into the map after if they live on its feature axis.
    - Centering over exactly the feature axis is the projection I - 11^T / n, and folds into the map before; what
      is left of a layer norm is an RMS norm.

    >>> from normscope.spec import families
    >>> [str(f) for f in families.rms_norm().properties().folds]
    ['gain on d into the linear map that it feeds']
    """
    found: list[Fold] = []
    affine = {what: _feature_axis(spec, getattr(spec, what)) for what in ("weight", "bias")}
    if spec.running is not None and spec.source == "parameter":
        axis = _feature_axis(spec, spec.running_axes)
        fits = all(getattr(spec, what) in (None, "") or affine[what] == axis for what in affine)
        if axis is not None and fits:
            found.append(Fold("norm", "before", untokenize([axis]), "running"))
            found.append(Fold("norm", "after", untokenize([axis]), "running", PADDING))
    if spec.source == "parameter":
        if spec.weight == "" or (spec.weight is None and spec.gain != 1):
            found.append(Fold("gain", "after", "every axis", "any"))
        if affine["weight"] is not None:
            found.append(Fold("gain", "after", untokenize([affine["weight"]]), "any"))
        if affine["bias"] is not None:
            found.append(Fold("bias", "after", untokenize([affine["bias"]]), "any", PADDING))
    centered = _feature_axis(spec, " ".join(spec.pattern.erased))
    if spec.center and centered is not None and spec.running is None:
        found.append(Fold("centering", "before", untokenize([centered]), "any"))
    return tuple(found)


def _feature_axis(spec: NormSpec, where: str | None) -> Group | None:
    """The one input axis that ``where`` makes up whole and that can hold features: no samples, no steps."""
    if not where:
        return None
    names = [name for group in tokenize(where) for name in group]
    group = spec.pattern.group_of(names[0])
    if set(names) != set(group) or group == (ELLIPSIS,) or group == spec.sample_group or "t" in group:
        return None
    return group
