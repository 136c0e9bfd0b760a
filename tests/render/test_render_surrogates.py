"""A module's name may hold half a surrogate pair, which UTF-8 has not: the page is written with an escape for it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import normscope


def test_half_a_surrogate_in_a_name_raised_in_the_page(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("half\udc80", nn.BatchNorm2d(3))
    report = normscope.check(model, torch.randn(8, 3, 4, 4))
    report.to_html(tmp_path / "page.html")
    assert "half\\udc80" in (tmp_path / "page.html").read_text(encoding="utf-8")
