"""A study as one page in one file, and its figures as files."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from normscope.errors import MissingExtra
from normscope.studies.lab.results import Results


def write_page(results: Results, out: Path) -> None:
    """``index.html``, and each figure as SVG, PNG and CSV in ``figures``.

    Raises MissingExtra where a package that draws is not installed.
    """
    try:
        import altair  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert
    except ImportError as error:
        package = error.name or "altair"
        raise MissingExtra(package, "studies", "drawing the figures of a study") from None
    from normscope.studies.lab.telling import sections

    told = sections(results)
    folder = out / "figures"
    folder.mkdir(exist_ok=True)
    for drawn in told["figures"]:
        name = drawn.figure.key
        (folder / f"{name}.svg").write_text(drawn.figure.svg, encoding="utf-8")
        (folder / f"{name}.png").write_bytes(vl_convert.svg_to_png(drawn.figure.svg, scale=2))
        (folder / f"{name}.csv").write_text(drawn.figure.csv, encoding="utf-8")
    (out / "index.html").write_text(html(told), encoding="utf-8")


def html(told: dict[str, Any]) -> str:
    """The page of these sections: self-contained, and it reads without a script."""
    from markupsafe import Markup

    from normscope.render import page
    from normscope.studies.lab.figures import SERIES

    dark = "".join(
        f'  svg [{paint}="{light}"] {{ {paint}: {dark}; }}\n'
        for light, dark in SERIES
        for paint in ("fill", "stroke")
    )
    text = (files("normscope.studies.lab") / "templates" / "study.html").read_text(encoding="utf-8")
    return (
        page._environment()
        .from_string(text)
        .render(
            **told,
            style=Markup(f"{page._style()}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"),
            script=Markup(page._text("page.js")),
            policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {page._allowed()}",
        )
    )
