"""``normscope bench``: the speed of the normalizations on this machine."""

from __future__ import annotations

from pathlib import Path

import typer

from normscope.cli import streams
from normscope.cli.frame import console, progress, written
from normscope.errors import BadInput


def command(
    op: list[str] | None = typer.Option(
        None, "--op", metavar="NAME", help="Such as rms_norm; may be repeated."
    ),
    dtype: list[str] | None = typer.Option(
        None, "--dtype", metavar="NAME", help="float32 and bfloat16 if not given; also float16, float64."
    ),
    size: list[str] | None = typer.Option(
        None,
        "--size",
        metavar="SIZE",
        help="small, middle, large (beyond the last-level cache), or as 64x768.",
    ),
    quick: bool = typer.Option(
        False, "--quick", help="Small inputs, short measurements, nothing compiled: some seconds."
    ),
    json: str | None = typer.Option(
        None,
        "--json",
        metavar="FILE",
        help="All numbers, written as they come; - writes them instead of the table.",
    ),
    compiled: bool | None = typer.Option(
        None, "--compiled/--no-compiled", help="Measure torch.compile too; seconds more for every input."
    ),
    models: bool = typer.Option(False, "--models", help="Whole models before and after accelerate, too."),
    threads: int | None = typer.Option(None, "--threads", metavar="N", help="Of PyTorch and of ours."),
    seconds: float | None = typer.Option(
        None, "--seconds", metavar="S", help="For one measurement: 1, or 0.1 with --quick."
    ),
    allocator: bool = typer.Option(
        True,
        "--tune-allocator/--no-tune-allocator",
        help="Let the allocator keep large blocks, for all that is measured; else page faults are measured.",
    ),
    traceback: bool = typer.Option(False, "--traceback", help="Show where an error came from."),
) -> int:
    """Measure each normalization against PyTorch eager, torch.compile, and a copy of the same bytes.

    All run in one process, in rotating order; times are medians over the rounds in which the copy was not slowed
    down by something else on the machine. The whole table takes half an hour to an hour.
    """
    if threads is not None and threads < 1:
        raise BadInput(f"--threads must be 1 or more, got {threads}")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise BadInput(f"--seconds must be more than 0, got {seconds:g}")
    import torch
    from rich.console import Console

    from normscope import bench
    from normscope.bench.table import WIDTH, print_report

    cases = bench.cases(
        op or bench.OPS, dtype or bench.DTYPES[:2], size or (["small"] if quick else bench.SIZES)
    )
    whole = bench.models(quick=quick) if models else []
    if json is not None and not (parent := Path(json).parent).is_dir():
        raise BadInput(f"--json {json}: there is no directory {parent}")
    out = streams.claim()  # compilers print what they like
    file = None if json in (None, "-") else Path(json)

    def keep(report: bench.Report) -> None:
        if file is not None:
            file.write_text(report.to_json() + "\n", encoding="utf-8")

    if threads is not None:
        torch.set_num_threads(threads)
    with progress(len(cases) + len(whole)) as step:
        report = bench.run(
            cases,
            whole,
            seconds=seconds or (0.1 if quick else 1.0),
            compiled=not quick if compiled is None else compiled,
            allocator=_tuned() if allocator else "as it is",
            progress=step,
            keep=keep,
        )
    if json == "-":
        print(report.to_json(), file=out, flush=True)
        return 0
    print_report(report, Console(file=out, width=max(WIDTH, console(out).width), highlight=False))
    if file is not None:
        written(json, out)
    out.flush()
    return 0


def _tuned() -> str:
    import normscope

    return str(normscope.tune_allocator())
