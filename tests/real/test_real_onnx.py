"""Graphs that were trained and shipped: RivaGAN's, whose batch norms stand between a tanh and a padded convolution."""

from __future__ import annotations

import pytest
import torch
from real_models import folder

import normscope

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.real


def video(frames: int = 2) -> torch.Tensor:
    """(N, 3, 1, 64, 64) in [-1, 1], as the decoder takes it."""
    return torch.rand(frames, 3, 1, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_rivagan_is_read(part: str) -> None:
    model = normscope.OnnxModel(folder("imwatermark") / f"rivagan_{part}.onnx")
    norms = list(model.children())
    assert len(norms) == 3
    assert {(norm.spec.eps, norm.spec.running.momentum, norm.mode) for norm in norms} == {
        (1e-5, 0.1, "frozen")
    }
    assert all(norm.fed_by[0].through == ("tanh",) for norm in norms)


def test_rivagan_s_norms_cannot_be_folded() -> None:
    model = normscope.OnnxModel(folder("imwatermark") / "rivagan_decoder.onnx")
    report = normscope.check(model, video(), synthetic=True)
    found = {finding.code: finding for finding in report.findings}
    assert "NS804" not in found
    assert found["NS801"].evidence["sites"] == 2  # the third feeds a softmax
    assert found["NS801"].evidence["where"] == "after"
    assert "fills in zeros" in found["NS801"].message
    assert not [entry for entry in report.not_run if "internal error" in entry.reason]
