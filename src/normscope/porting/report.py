"""What a port carried, converted and left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normscope.transforms.report import TransformReport


@dataclass(frozen=True)
class PortReport(TransformReport):
    """A `TransformReport` whose ``notes`` state every conversion.

    ``settings``: for a torch layer, the class of the target and the arguments that make it there; else empty, as a
    state says nothing of eps and momentum.

    >>> print(PortReport("port", (), notes=()))
    port: no normalization was found
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
