"""The pictures of a report, one kind a file: what was measured, drawn by Altair and vl-convert as SVG, offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from normscope.render.charts.axes import axes_figure
from normscope.render.charts.channels import channel_figures
from normscope.render.charts.conditioning import conditioning_figure
from normscope.render.charts.denominators import denominator_figure
from normscope.render.charts.effective_samples import effective_samples_figure
from normscope.render.charts.figure import PALETTE, Figure
from normscope.render.charts.network import network_figures
from normscope.render.charts.sensitivity import sensitivity_figure, sensitivity_words
from normscope.render.charts.spectrum import spectrum_figure

if TYPE_CHECKING:
    from normscope.doctor.report import SiteRow

__all__ = ["PALETTE", "Figure", "network_figures", "sensitivity_words", "site_figures"]


def site_figures(row: SiteRow, measured: Mapping[str, Any]) -> list[Figure]:
    """Every picture that the measurements of a site allow.

    Args:
        row: the site.
        measured: its entry in ``report.measurements``.
    """
    found: list[Figure | None] = [axes_figure(row)]
    if "denominators" in measured:
        found.append(denominator_figure(measured["denominators"]))
    if "channels" in measured:
        found += channel_figures(measured["channels"])
    if "conditioning" in measured:
        found.append(conditioning_figure(measured["conditioning"]))
    if "sensitivity" in measured:
        found.append(sensitivity_figure(measured["sensitivity"]))
    if "spectrum" in measured:
        found.append(spectrum_figure(measured["spectrum"], center=row.spec is None or row.spec.center))
    if "effective_samples" in measured:
        found.append(effective_samples_figure(measured["effective_samples"]))
    return [picture for picture in found if picture is not None]
