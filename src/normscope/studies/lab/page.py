"""A study as one page in one file, and its figures as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normscope.studies.lab.results import Results


def write_page(results: Results, out: Path) -> None:
    """``index.html``, and each figure as SVG, PNG and CSV in ``figures``."""
    import vl_convert

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
    from normscope.render.charts import PALETTE
    from normscope.render.shell import environment, head
    from normscope.studies.lab.figures import SERIES

    colours = {**dict(PALETTE.values()), **dict(SERIES)}
    return (
        environment("normscope.studies.lab")
        .get_template("study.html")
        .render(**told, **head(colours.items()))
    )
