"""A study from its declaration to its results: resumable, on one process, several, or a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from normscope.errors import BadInput
from normscope.studies.lab.backends import BACKENDS, Backend, each
from normscope.studies.lab.records import Records
from normscope.studies.lab.results import Results, decide, declared, write
from normscope.studies.lab.study import Scale, Study, told_cell

RUN, CELLS = "run.json", "cells.jsonl"


def run(
    study: str | Study,
    *,
    out: str | Path,
    seeds: int | None = None,
    scale: Scale = "full",
    backend: Backend = "loky",
    workers: int | None = None,
    scheduler: str | None = None,
    data: str | Path | None = None,
    draw: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Results:
    """Run a study, or go on with it where it was stopped, and write its results into ``out``.

    Each finished cell is written at once to ``cells.jsonl`` there, so that a run that is killed loses at most the cells
    that were running. The same call goes on; more ``seeds`` add to what is there. ``results.csv``, ``results.json``,
    the figures and ``index.html`` are written when all cells are there. The table does not depend on the backend, the
    number of workers or interruptions.

    Arguments:
        study: a name of `normscope.studies.names`, or a Study of one's own.
        out: a folder, made if needed; nothing outside it is written.
        seeds: how many; as the study declares for the scale, if not given.
        scale: ``"full"``, ``"quick"`` (under 2 minutes on two cores) or ``"smoke"`` (seconds, to see that it runs).
        backend: ``"loky"`` (processes on this machine), ``"sequential"``, ``"dask"`` or ``"ray"`` (a running cluster).
        workers: processes; as many as cores, if not given.
        scheduler: address of the cluster.
        data: folder with data sets; else ``NORMSCOPE_DATA``, then where Debian and pip put them.
        draw: also draw the figures and the page, which needs Altair, vl-convert-python and Jinja2.
        progress: called with a word for each cell that is finished.

    Raises BadInput for unusable arguments and for a folder that holds another run, MissingExtra where a package is not
    installed, ModelError where a cell raises; cells that were finished stay.
    """
    from normscope import studies
    from normscope.studies.lab import data as sets
    from normscope.studies.lab.cell import run_cell

    study = studies.find(study) if isinstance(study, str) else study
    study.require(draw=draw)
    if backend not in BACKENDS:
        raise BadInput(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    count = study.seeds[scale] if seeds is None else seeds
    if count < 1:
        raise BadInput(f"seeds must be 1 or more, got {count}")
    folder = None if data is None else Path(data).absolute()
    grid, out = study.grid(scale), Path(out)
    with sets.folder(folder):
        found = sets.locate(study.data)
    sources = {name: source.identity for name, source in found.items()}
    _begin(study, scale, sources, out)
    records = Records(out / CELLS)
    jobs = [
        (study.name, study.measure, cell, seed, scale, sources, folder)
        for cell, seed in records.missing(grid, range(count))
    ]
    for _ in range(len(grid) * count - len(jobs)):
        progress("found")
    for record in each(run_cell, jobs, backend, workers, scheduler):
        records.add(record)
        progress(f"{told_cell(record['cell'])}, seed {record['seed']}")
    results = decide(
        study,
        records.rows(grid, range(count)),
        scale=scale,
        seeds=count,
        run=json.loads((out / RUN).read_text(encoding="utf-8")),
        data={name: source.told for name, source in found.items()},
        seconds=records.seconds(grid, range(count)),
    )
    write(results, out, draw=draw)
    return results


def cells_of(study: Study, scale: Scale, seeds: int | None) -> int:
    """How many times a run measures."""
    return len(study.grid(scale)) * (study.seeds[scale] if seeds is None else seeds)


def _begin(study: Study, scale: Scale, sources: Mapping[str, str], out: Path) -> None:
    """Write down what runs, or see that what is there is the same."""
    from normscope.studies.lab.fingerprint import code_fingerprint, versions

    here: dict[str, Any] = {
        "study": study.name,
        "scale": scale,
        "code": code_fingerprint(study),
        **versions(),
        **{f"data {name}": identity for name, identity in sources.items()},
    }
    path = out / RUN
    if path.exists():
        there = json.loads(path.read_text(encoding="utf-8"))["fingerprint"]
        if there != here:
            raise BadInput(
                f"{out} holds a run that differs in {'; '.join(_differences(there, here))}. Results of both would not "
                "be one experiment: choose another folder, or remove this one to start afresh"
            )
        return
    if (out / CELLS).exists():
        raise BadInput(f"{out} holds {CELLS} without {RUN}, which says what it is: choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"fingerprint": here, "declared": declared(study)}, indent=1, ensure_ascii=False)
    draft = path.with_suffix(".new")
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(path)  # whole or not at all


def _differences(there: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys([*there, *here]):
        if there.get(name) != here.get(name):
            yield f"{name} ({there.get(name, 'none')} there, {here.get(name, 'none')} now)"
