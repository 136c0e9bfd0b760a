"""Changes of a model; each returns ``(model, TransformReport)``.

Every transform can be rehearsed (``dry_run=True``), is checked on a sample where one is given, and says of each
normalization what it did or why it left it alone.
"""

from __future__ import annotations

from normscope.transforms.accelerate import accelerate
from normscope.transforms.agreement import Deviation
from normscope.transforms.average import average, check_average
from normscope.transforms.convert import ConvertReport, convert
from normscope.transforms.fold import Folded, FoldReport, fold
from normscope.transforms.freeze import freeze, unfreeze
from normscope.transforms.recalibrate import RecalibrationReport, recalibrate
from normscope.transforms.report import Agreement, SiteChange, TransformReport
from normscope.transforms.sensitivity import StateSensitivity, state_sensitivity

__all__ = [
    "Agreement",
    "ConvertReport",
    "Deviation",
    "FoldReport",
    "Folded",
    "RecalibrationReport",
    "SiteChange",
    "StateSensitivity",
    "TransformReport",
    "accelerate",
    "average",
    "check_average",
    "convert",
    "fold",
    "freeze",
    "recalibrate",
    "state_sensitivity",
    "unfreeze",
]
