"""What a normalization is, exactly: the axis language, the specification, named ones, and their laws.

Imports neither torch nor NumPy.
"""

from __future__ import annotations

from normscope.spec import families
from normscope.spec.bound import BoundSpec
from normscope.spec.folds import Fold
from normscope.spec.laws import Properties
from normscope.spec.normspec import NormSpec
from normscope.spec.parts import Cast, Running, RunningState, Sizes, SpecError
from normscope.spec.pattern import Axis, Pattern, PatternError
from normscope.spec.sameness import Sameness, canonical_factor

__all__ = [
    "Axis",
    "BoundSpec",
    "Cast",
    "Fold",
    "NormSpec",
    "Pattern",
    "PatternError",
    "Properties",
    "Running",
    "RunningState",
    "Sameness",
    "Sizes",
    "SpecError",
    "canonical_factor",
    "families",
]
