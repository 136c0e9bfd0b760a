"""Normscope: what each normalization in a model is, whether it is right, and how to change it safely.

Names load on first use (PEP 562): ``import normscope`` imports neither torch nor NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> module that defines it; "" marks a subpackage that is itself the public name
_HOME = {
    "NormSpec": "normscope.spec",
    "Running": "normscope.spec",
    "Cast": "normscope.spec",
    "families": "normscope.spec",
    "spec": "",
    "reference": "",
    "verify": "",
    "kernels": "",
    "functional": "",
    "nn": "",
    "normalize": "normscope.functional",
    "spec_of": "normscope.reading",
    "RunningState": "normscope.spec",
    "check": "normscope.doctor.check",
    "check_state": "normscope.doctor.check_state",
    "OnnxModel": "normscope.targets.onnx_model",
    "Monitor": "normscope.monitor.monitor",
    "explain": "normscope.doctor.explain",
    "Report": "normscope.doctor.report",
    "Finding": "normscope.doctor.report",
    "identify": "",
    "Identification": "normscope.identify.result",
    "compare": "normscope.identify.compare",
    "Comparison": "normscope.identify.compare_result",
    "compare_norms": "normscope.targets.norms.comparison",
    "NormsComparison": "normscope.targets.norms.comparison",
    "transforms": "",
    "studies": "",
    "state_sensitivity": "normscope.transforms.sensitivity",
    "port": "normscope.porting.port",
    "tune_allocator": "normscope.allocator",
}

if TYPE_CHECKING:
    from normscope import functional as functional
    from normscope import kernels as kernels
    from normscope import nn as nn
    from normscope import reference as reference
    from normscope import spec as spec
    from normscope import studies as studies
    from normscope import transforms as transforms
    from normscope import verify as verify
    from normscope.allocator import tune_allocator as tune_allocator
    from normscope.doctor.check import check as check
    from normscope.doctor.check_state import check_state as check_state
    from normscope.doctor.explain import explain as explain
    from normscope.doctor.report import Finding as Finding
    from normscope.doctor.report import Report as Report
    from normscope.functional import normalize as normalize
    from normscope.identify import identify as identify
    from normscope.identify.compare import compare as compare
    from normscope.identify.compare_result import Comparison as Comparison
    from normscope.identify.result import Identification as Identification
    from normscope.monitor.monitor import Monitor as Monitor
    from normscope.porting.port import port as port
    from normscope.reading import spec_of as spec_of
    from normscope.spec import Cast as Cast
    from normscope.spec import NormSpec as NormSpec
    from normscope.spec import Running as Running
    from normscope.spec import RunningState as RunningState
    from normscope.spec import families as families
    from normscope.targets.norms.comparison import NormsComparison as NormsComparison
    from normscope.targets.norms.comparison import compare_norms as compare_norms
    from normscope.targets.onnx_model import OnnxModel as OnnxModel
    from normscope.transforms.sensitivity import state_sensitivity as state_sensitivity

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'normscope' has no attribute {name!r}")
    value = import_module(f"normscope.{name}") if home == "" else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
