"""The table of sites of ``normscope spec``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from normscope.doctor.report import SiteRow
    from normscope.spec import NormSpec

DENOMINATORS = {
    "variance": "sqrt({v} + {e})",
    "std": "sqrt({v}) + {e}",
    "max": "max(sqrt({v}), {e})",
    "max_variance": "sqrt(max({v}, {e}))",
    "trace": "sqrt({v} + {e} tr/c)",
}


def print_sites(rows: Sequence[SiteRow], console: Console) -> None:
    """A table where the terminal is wide enough, a block a site where it is not."""
    if not rows:
        console.print("no normalization found")
        return
    columns = (
        "site",
        "type",
        "axes",
        "divides by",
        "affine",
        "arithmetic",
        "state",
        "train",
        "eval",
        "calls",
    )
    cells = [_cells(row) for row in rows]
    if console.width >= 140:
        table = Table(*columns, box=None, padding=(0, 2, 0, 0))
        for row in cells:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    for row in cells:
        console.print(Text(f"{row[0]}  {row[1]}", style="bold"))
        for name, cell in zip(columns[2:], row[2:], strict=True):
            if cell:
                console.print(Text(f"    {name:<11} {cell}"))


def _cells(row: SiteRow) -> tuple[str, ...]:
    name = row.name or "(the model)"
    if row.aliases:
        name += f" = {', '.join(row.aliases)}"
    if row.spec is None:
        return (
            name,
            row.type_name,
            row.reason,
            "",
            "",
            "",
            "",
            row.mode_train,
            row.mode_eval,
            str(row.calls),
        )
    spec = row.spec
    return (
        name,
        row.type_name + (", fused in deployment" if row.fused else ""),
        spec.stats + (f"  {dict(spec.sizes)}" if spec.sizes else ""),
        denominator(spec),
        _affine(spec),
        _arithmetic(spec, row.dtypes),
        _state(spec),
        row.mode_train,
        row.mode_eval,
        str(row.calls),
    )


def denominator(spec: NormSpec) -> str:
    """Centering, which variance, and where eps stands."""
    variance = {"std": "var", "rms": "mean(x²)", "l2": "sum(x²)"}.get(spec.scale, f"cov, {spec.scale}")
    if spec.scale == "std" and spec.correction:
        variance = f"var(n-{spec.correction:g})"
    eps = "machine eps" if spec.eps is None else f"{spec.eps:g}"
    formula = DENOMINATORS[spec.eps_at].format(v=variance, e=eps)
    return formula if spec.center else f"{formula}, not centered"


def _affine(spec: NormSpec) -> str:
    weight = {None: "", "": "scalar weight"}.get(spec.weight, f"weight({spec.weight})")
    if weight and spec.weight_offset:
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


def _state(spec: NormSpec) -> str:
    running = spec.running
    if running is None:
        return "none"
    rate = "cumulative" if running.average == "cumulative" else f"momentum {running.momentum:g}"
    return f"{rate}, {'unbiased' if running.correction else 'biased'} variance"
