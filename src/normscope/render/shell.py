"""What pages share: templates and their filters, style and script, and what a browser may do with them.

What a browser gets is plain HTML that reads without script. The script only filters, sorts and saves pictures; it is
let in by its hash, and nothing else may run or load (a content security policy).
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from normscope.doctor.wording import encodable
from normscope.errors import visible
from normscope.render.charts import Figure

HERE = "normscope.render"


def head(colours: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Style, script and content security policy of a page.

    ``colours`` are those of its pictures: each as it is in light, and what it is turned into for dark.
    """
    turned = "\n".join(
        f'  svg [{paint}="{light}"] {{ {paint}: {dark}; }}'
        for light, dark in colours
        for paint in ("fill", "stroke")
    )
    return {
        "style": Markup(f"{_text('page.css')}@media (prefers-color-scheme: dark) {{\n{turned}\n}}\n"),
        "script": Markup(_text("page.js")),
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {_allowed()}",
    }


def _visible(value: Any) -> Any:
    """Text with escapes for what is seen of no letter. Markup is made of such text, and of lines of the page's own."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return visible(value)


@cache
def environment(package: str = HERE) -> jinja2.Environment:
    """The templates of a package beside those of this one, everything that they show escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(partial(_text, package=package)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    environment.filters |= {
        "breakable": _breakable,
        "picture": _picture,
        "csv_link": _csv_link,
        "file_name": _file_name,
        "marked": _marked,
    }
    return environment


@cache
def _text(name: str, package: str = HERE) -> str:
    own, shared = (files(each) / "templates" / name for each in (package, HERE))
    return (own if own.is_file() else shared).read_text(encoding="utf-8")


def _allowed() -> str:
    """The page's own script, and no other."""
    return f"'sha256-{b64encode(sha256(_text('page.js').encode()).digest()).decode()}'"


# Filters of the templates -------------------------------------------------------------------------------


def _picture(figure: Figure) -> Markup:
    """The drawing, made by this package from numbers and from words of its own."""
    return Markup(figure.svg)


def _breakable(name: str) -> Markup:
    """A dotted name that may wrap behind its dots."""
    return Markup(".<wbr>").join(visible(name).split("."))


def _csv_link(figure: Figure) -> str:
    return f"data:text/csv;charset=utf-8,{quote(encodable(figure.csv), safe=',./:;()|*')}"


def _file_name(text: str) -> str:
    """Letters, digits and dots that every file system takes.

    >>> _file_name("layer1.0/bn <x>")
    'layer1.0-bn-x'
    """
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:80] or "model"


def _marked(text: str) -> Markup:
    """Words of a rule's page: paragraphs, and what stands between backticks as code."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        parts = re.split(r"`+([^`]+)`+", visible(" ".join(paragraph.split())))
        pieces = [
            Markup("<code>{}</code>").format(part) if i % 2 else Markup.escape(part)
            for i, part in enumerate(parts)
        ]
        paragraphs.append(Markup("<p>{}</p>").format(Markup("").join(pieces)))
    return Markup("").join(paragraphs)
