"""The report as one self-contained page, with pictures where the extra ``report`` is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normscope.render import plain
from normscope.render.plain import fragment
from normscope.render.randomness import kept_random_state

if TYPE_CHECKING:
    from normscope.doctor.report import Report

__all__ = ["fragment", "to_html"]

WITHOUT = (
    "This is the plain page. Pictures, filters and downloads need {package}, which is not installed: "
    "pip install 'normscope[report]'"
)


@kept_random_state()
def to_html(report: Report) -> str:
    """A whole document that needs neither network nor server, of less than 2 MB.

    With Altair, vl-convert-python and Jinja2 (``pip install 'normscope[report]'``) it holds the pictures of
    :mod:`normscope.render.charts`; without one of them it is the plain page, which says so in its first line.
    """
    try:
        import altair  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        return plain.document(report, WITHOUT.format(package=error.name or "a package"))
    from normscope.render.page import document

    return document(report)
