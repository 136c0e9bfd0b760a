"""A real trained network through the protocol: every norm is read, and every check passes."""

from __future__ import annotations

import pytest
import real_models

from normscope import verify

pytestmark = pytest.mark.real


def test_every_norm_of_efficientnet_is_verified() -> None:
    report = verify.run_layer(real_models.efficientnet(), name="EfficientNet-Lite0")
    assert report.passed, "\n".join(str(item) for item in report.failed)
    assert len(report.topics) == 49
    assert report.not_verified == ()
    assert str(report).splitlines()[-1] == f"all {len(report.evidence)} checks of 49 norms passed"
