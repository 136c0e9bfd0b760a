"""``normscope study``: an experiment on what normalization does, repeated here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from normscope.cli import streams
from normscope.cli.frame import INTERRUPTED, progress
from normscope.errors import BadInput, printable

if TYPE_CHECKING:
    from normscope.studies.lab.study import Scale


def command(
    name: str = typer.Argument(metavar="NAME", help="A study, or list, which names them all."),
    seeds: int | None = typer.Option(
        None, "--seeds", metavar="N", help="As many as the study declares, if not given."
    ),
    quick: bool = typer.Option(False, "--quick", help="A smaller form, under 2 minutes on two cores."),
    smoke: bool = typer.Option(
        False, "--smoke", help="The smallest form, some seconds: only to see that it runs."
    ),
    out: Path | None = typer.Option(
        None, "--out", metavar="DIR", help="Where everything is written; ./normscope-study-NAME if not given."
    ),
    workers: int | None = typer.Option(
        None, "--workers", metavar="N", help="Processes; one a core, if not given."
    ),
    backend: str = typer.Option(
        "loky",
        "--backend",
        metavar="NAME",
        help="loky (processes here), sequential, dask or ray (a running cluster).",
    ),
    scheduler: str | None = typer.Option(None, "--scheduler", metavar="ADDRESS", help="Of the cluster."),
    data: Path | None = typer.Option(
        None,
        "--data",
        metavar="DIR",
        help="A folder with data sets; else NORMSCOPE_DATA, then the usual places.",
    ),
    docs: Path | None = typer.Option(
        None,
        "--docs",
        metavar="DIR",
        help="Write the results there as well, as a page of the book: NAME.md and NAME/.",
    ),
    traceback: bool = typer.Option(False, "--traceback", help="Show where an error came from."),
) -> int:
    """Run a study and write its table, decisions, figures and page.

    Finished cells are written as they come. A run that was stopped goes on with the same command, and more --seeds add
    to what is there. Only --out (and --docs) is written to.
    """
    from normscope import studies

    stream = streams.claim()
    if name == "list":
        for each in studies.names():
            print(f"{each:<22}{studies.find(each).question}", file=stream)
        stream.flush()
        return 0
    from normscope.studies.lab.runner import cells_of, run

    if quick and smoke:
        raise BadInput("--quick and --smoke are two scales: give one of them")
    study = studies.find(name)
    scale: Scale = "smoke" if smoke else "quick" if quick else "full"
    out = out or Path(f"normscope-study-{name}")
    try:
        with progress(cells_of(study, scale, seeds)) as step:
            results = run(
                study,
                out=out,
                seeds=seeds,
                scale=scale,
                backend=backend,  # type: ignore[arg-type]
                workers=workers,
                scheduler=scheduler,
                data=data,
                progress=step,
            )
    except KeyboardInterrupt:
        print(
            f"normscope: interrupted; finished cells are in {out}, and the same command goes on",
            file=sys.stderr,
        )
        return INTERRUPTED
    print("\n".join(printable(line) for line in str(results).splitlines()), file=stream)
    print(f"written: {out}/index.html, results.csv, results.json, figures/", file=stream)
    if docs is not None:
        from normscope.studies.lab.book import write_docs

        print(f"written: {write_docs(results, docs)}", file=stream)
    stream.flush()
    return 0
