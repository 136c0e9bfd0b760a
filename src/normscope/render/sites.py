"""The table of sites of ``normscope spec``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from normscope.errors import printable
from normscope.render.grouping import label
from normscope.render.randomness import kept_random_state

with kept_random_state():
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

if TYPE_CHECKING:
    from normscope.doctor.report import SiteRow
    from normscope.spec import NormSpec

WIDE = 140
"""columns from which the table fits"""
INDENT = 16
WHAT = ("axes", "divides by", "affine", "arithmetic", "state")
WHERE = ("train", "eval", "calls")
DENOMINATORS = {
    "variance": "sqrt({v} + {e})",
    "std": "sqrt({v}) + {e}",
    "max": "max(sqrt({v}), {e})",
    "max_variance": "sqrt(max({v}, {e}))",
    "trace": "sqrt({v} + {e} tr/c)",
}


@kept_random_state()
def print_sites(rows: Sequence[SiteRow], console: Console, *, ran: bool = True) -> None:
    """A table, a line a site, where the terminal is wide enough; else a block a specification, with its sites.

    ``ran``: the model was run on inputs, so that calls were counted.
    """
    if console.width < WIDE:
        _print_blocks(rows, console, ran)
        return
    table = Table("site", "type", *WHAT, *WHERE, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        cells = (_name(row), _type(row), *_what(row), row.mode_train, row.mode_eval, _calls(row, ran))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)


def _print_blocks(rows: Sequence[SiteRow], console: Console, ran: bool) -> None:
    blocks: dict[tuple[str, ...], list[SiteRow]] = {}
    for row in rows:
        blocks.setdefault((_type(row), *_what(row)), []).append(row)
    for (type_name, *what), members in blocks.items():
        alone = len(members) == 1
        head = _name(members[0]) if alone else f"{len(members)} sites"
        console.print(Text(printable(f"{head}  {type_name}"), style="bold"))
        where = {row.name: _where(row, ran) for row in members}
        shared = {
            key: value
            for key, value in where[members[0].name].items()
            if all(w[key] == value for w in where.values())
        }
        _print_lines((*zip(WHAT, what, strict=True), *shared.items()), console)
        if alone:
            continue
        places: dict[str, list[str]] = {}
        for row in members:
            own = ", ".join(f"{k} {v}" for k, v in where[row.name].items() if k not in shared and v)
            places.setdefault(own, []).append(_name(row))
        _print_lines(
            (
                ("sites" if i == 0 else "", ", ".join(names) + (f": {own}" if own else ""))
                for i, (own, names) in enumerate(places.items())
            ),
            console,
        )


def _print_lines(lines: Iterable[tuple[str, str]], console: Console) -> None:
    """Words with what they say beside them, hanging."""
    for word, text in lines:
        if text:
            body = wrap(printable(text), max(console.width - INDENT, 20), break_on_hyphens=False)
            first = f"    {word}".ljust(INDENT)
            for line in (first + body[0], *(" " * INDENT + more for more in body[1:])):
                console.print(Text(printable(line)), soft_wrap=True)


def described(row: SiteRow) -> dict[str, str]:
    """What a site computes, by the words of WHAT; for one that was not identified, the reason alone."""
    return {word: text for word, text in zip(WHAT, _what(row), strict=True) if text}


def _name(row: SiteRow) -> str:
    return " = ".join(label(name) for name in (row.name, *row.aliases))


def _type(row: SiteRow) -> str:
    return row.type_name + (", fused in deployment" if row.fused else "")


def _what(row: SiteRow) -> tuple[str, ...]:
    """The columns WHAT; for a site that was not identified, the reason."""
    spec = row.spec
    if spec is None:
        return (row.reason, "", "", "", "")
    sizes = f"  {dict(spec.sizes)}" if spec.sizes else ""
    unknown = frozenset(row.unknown)
    return (
        spec.stats + sizes,
        denominator(spec, unknown),
        _affine(spec, unknown),
        _arithmetic(spec, row.dtypes),
        _state(spec, unknown),
    )


def _where(row: SiteRow, ran: bool) -> dict[str, str]:
    """The columns WHERE, and the shapes that came."""
    shapes = " ".join("x".join(map(str, shape)) for shape in row.shapes)
    return {"train": row.mode_train, "eval": row.mode_eval, "calls": _calls(row, ran), "shape": shapes}


def _calls(row: SiteRow, ran: bool) -> str:
    return str(row.calls) if ran else "not run"


def denominator(spec: NormSpec, unknown: frozenset[str] = frozenset()) -> str:
    """Centering, which variance, and where eps stands; "eps" where its value is not known."""
    variance = {"std": "var", "rms": "mean(x²)", "l2": "sum(x²)"}.get(spec.scale, f"cov, {spec.scale}")
    if spec.scale == "std" and spec.correction:
        variance = f"var(n-{spec.correction:g})"
    eps = "eps" if "eps" in unknown else "machine eps" if spec.eps is None else f"{spec.eps:g}"
    formula = DENOMINATORS[spec.eps_at].format(v=variance, e=eps)
    return formula if spec.center else f"{formula}, not centered"


def _affine(spec: NormSpec, unknown: frozenset[str]) -> str:
    weight = {None: "", "": "scalar weight"}.get(spec.weight, f"weight({spec.weight})")
    if weight and "weight_offset" in unknown:
        weight += " or 1 + it"
    elif weight and spec.weight_offset:
        weight = f"{spec.weight_offset:g} + {weight}"
    bias = {None: "", "": "scalar bias"}.get(spec.bias, f"bias({spec.bias})")
    gain = f"gain {spec.gain:g}" if spec.gain != 1 else ""
    return ", ".join(part for part in (gain, weight, bias) if part) or "none"


def _arithmetic(spec: NormSpec, dtypes: tuple[str, ...]) -> str:
    compute = spec.cast.compute if spec.cast is not None else None
    dtype = "/".join(dtypes)
    if compute is None and dtype:
        compute = "/".join("float32" if d in ("float16", "bfloat16") else d for d in dtypes)
    text = f"{dtype} in {compute}" if dtype and compute != dtype else (compute or "the input's dtype")
    if spec.cast is not None and spec.cast.weight == "after":
        text += ", weight after the cast"
    return text


def _state(spec: NormSpec, unknown: frozenset[str]) -> str:
    running = spec.running
    if running is None:
        return "none"
    if "momentum" in unknown:
        return "running mean and variance"
    rate = "cumulative" if running.average == "cumulative" else f"momentum {running.momentum:g}"
    return f"{rate}, {'unbiased' if running.correction else 'biased'} variance"
