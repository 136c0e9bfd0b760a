"""``describe``: the sites of a model without any check."""

from __future__ import annotations

from typing import Any

import torch

from normscope.doctor.arguments import module, on_device
from normscope.doctor.check import find, row
from normscope.doctor.report import SiteRow
from normscope.doctor.session import Session


def describe(model: torch.nn.Module, inputs: Any = None, *, seed: int = 0) -> tuple[SiteRow, ...]:
    """Every normalization of a model; with inputs also those called as functions or written by hand."""
    args, kwargs, _ = on_device(module(model), inputs)
    with Session(model, seed=seed) as session:
        return tuple(row(site) for site in find(session, args, kwargs))
