"""A study as a page of the book: Markdown, and beside it its figures, table and results."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from normscope.studies.lab.results import Results, to_json
from normscope.studies.lab.telling import sections

COUNTED = {"holds": "held", "does not hold": "did not", "undecided": "undecided"}
GALLERY = """# Studies

Each study declares its question, the single property that it varies and the rules that decide before it runs. Its page
holds the figures with their numbers, what did not hold, and how to run it again with one command.
"""


def write_docs(results: Results, folder: Path) -> Path:
    """Write ``NAME.md`` into ``folder``, and beside it ``NAME/`` with the table, ``results.json`` and the figures."""
    name = results.study.name
    told = sections(results)
    beside = folder / name
    beside.mkdir(parents=True, exist_ok=True)
    (beside / "results.csv").write_text(results.table.csv(), encoding="utf-8")
    (beside / "results.json").write_text(to_json(results), encoding="utf-8")
    for drawn in told["figures"]:
        (beside / f"{drawn.figure.key}.svg").write_text(drawn.figure.svg, encoding="utf-8")
        (beside / f"{drawn.figure.key}.csv").write_text(drawn.figure.csv, encoding="utf-8")
    page = folder / f"{name}.md"
    page.write_text(markdown(told), encoding="utf-8")
    return page


def markdown(told: dict[str, Any]) -> str:
    import jinja2

    text = (files("normscope.studies.lab") / "templates" / "study.md").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    return environment.from_string(text).render(**told).rstrip() + "\n"


def write_gallery(folder: Path) -> Path:
    """Write ``index.md``: a line for each study that has its results in ``folder``, with what was decided."""
    rows = []
    for file in sorted(folder.glob("*/results.json")):
        told = json.loads(file.read_text(encoding="utf-8"))
        words = [decision["verdict"] for decision in told["decisions"]]
        counts = ", ".join(f"{words.count(word)} {told}" for word, told in COUNTED.items() if word in words)
        study = told["study"]
        rows.append(f"| [{study['title']}]({study['name']}.md) | {study['question']} | {counts} |")
    table = "\n".join(["| study | question | declared statements |", "|---|---|---|", *rows])
    page = folder / "index.md"
    page.write_text(f"{GALLERY}\n{table}\n", encoding="utf-8")
    return page
