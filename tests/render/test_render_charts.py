"""Pictures of what real checks measured, the odd ones too: only numbers are drawn, and captions say which."""

from __future__ import annotations

import csv
import io
import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import normscope
from normscope import families
from normscope.doctor.report import Report, SiteRow

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from normscope.render.charts import PALETTE, Figure, network_figures, sensitivity_words, site_figures
from normscope.render.charts.axes import axes_figure
from normscope.render.charts.figure import ticks

BN, LN, GN = nn.BatchNorm1d, nn.LayerNorm, nn.GroupNorm


def figures(report: Report) -> list[Figure]:
    found = list(network_figures(report.sites, report.measurements))
    for row in report.sites:
        found += site_figures(row, report.measurements.get(row.name, {}))
    return found


ODD = {
    "constant": (BN(4), torch.ones(8, 4)),
    "an infinity": (BN(4), torch.tensor([[1.0, 2.0, 3.0, float("inf")]] * 8)),
    "two samples": (BN(4), torch.randn(2, 4, generator=torch.Generator().manual_seed(0))),
    "one sample": (LN(4), torch.tensor([[1.0, 2.0, 4.0, 8.0]])),
    "huge mean": (LN(16), torch.arange(64.0).reshape(4, 16) + 1e6),
    "no eps": (LN(16, eps=0.0), torch.arange(64.0).reshape(4, 16).sin()),
    "tiny": (LN(16), torch.arange(64.0).reshape(4, 16).sin() * 1e-30),
    "half": (GN(2, 4).half(), torch.arange(64.0).reshape(4, 4, 4).sin().half()),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_data_is_drawn_or_left_out(name: str) -> None:
    norm, x = ODD[name]
    report = normscope.check(nn.Sequential(norm), x, select=["NS2", "NS4"])
    for figure in figures(report):
        root = ElementTree.fromstring(figure.svg)
        assert float(root.get("width", "0")) > 100
        assert not re.search("nan|infinity|undefined|null", figure.svg, re.IGNORECASE), figure.key
        assert "nan" not in figure.caption.lower(), figure.caption
        rows = list(csv.DictReader(io.StringIO(figure.csv)))
        assert rows
        assert all(value is not None for row in rows for value in row.values())


def row(spec: normscope.NormSpec, *shape: int) -> SiteRow:
    return SiteRow("norm", "module", "Norm", spec, "", "batch", "running", 1, (shape,), ("float32",))


@pytest.mark.parametrize(
    ("spec", "shape", "together", "said"),
    [
        (
            families.batch_norm(),
            (64, 24, 8, 8),
            20,
            "The statistics run over b (64), axis 2 (8), axis 3 (8): 4096 elements",
        ),
        (families.layer_norm(), (2, 3, 5), 4, "The statistics run over d (5): 5 elements a set"),
        (families.group_norm(2), (4, 6, 9), 3 * 2, "one for each place on b (4), g (2) (8 in all)"),
        (families.instance_norm(), (4, 6, 9), 4, "one for each place on b (4), c (6) (24 in all)"),
    ],
)
def test_the_dark_cells_are_one_set(
    spec: normscope.NormSpec, shape: tuple[int, ...], together: int, said: str
) -> None:
    figure = axes_figure(row(spec, *shape))
    assert figure is not None
    dark = PALETTE["blue"][0]
    assert figure.svg.count(f'fill="{dark}"') == together
    assert said in figure.caption


def test_a_network_that_was_exact_to_the_last_bit_could_not_be_drawn() -> None:
    sites = [SiteRow(name, "module", "Norm", None, "", "batch", "running", 1, (), ()) for name in "ab"]
    exact = {"conditioning": {"error": 0.0, "allowed": 1e-7}}
    assert network_figures(sites, dict.fromkeys("ab", exact)) == []


def test_every_colour_of_a_picture_has_one_for_dark() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), GN(2, 4))
    model(torch.randn(8, 3, 6, 6))
    known = {light for light, _ in PALETTE.values()} | {"none"}
    for figure in figures(normscope.check(model, torch.randn(8, 3, 6, 6))):
        used = set(re.findall(r'(?:fill|stroke)="([^"]+)"', figure.svg))
        assert used <= known, figure.key
        assert "id=" not in figure.svg  # two pictures on a page would share it


def test_what_has_no_picture_is_said() -> None:
    uncoupled = {"samples": [], "coupled": False, "mode": "input", "reason": ""}
    assert sensitivity_words(uncoupled) == (
        "No sample moves another's output here, also in training: every statistic set lies within one sample."
    )
    assert sensitivity_words({**uncoupled, "mode": "frozen"}).endswith(
        "in training: stored statistics normalize."
    )
    assert sensitivity_words({**uncoupled, "coupled": True, "reason": "no channel varies"}) == (
        "In training, samples move each other here; by how much was not computed: no channel varies."
    )


@pytest.mark.parametrize("span", [(-300.0, 300.0), (-3.2, 1.4), (-0.1, 1.1), (0.0, 0.2), (0.301, 0.302)])
def test_axes_have_a_few_ticks_inside(span: tuple[float, float]) -> None:
    found = ticks(*span)
    assert 1 <= len(found) <= 7
    assert found == sorted(set(found))
    # three digits may round a lone tick in a narrow span out of it
    assert all(10.0 ** span[0] * 0.99 <= value <= 10.0 ** span[1] * 1.01 for value in found)
