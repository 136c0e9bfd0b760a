"""From cases to a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from normscope.bench import machine
from normscope.bench.contenders import Compiler, runs
from normscope.bench.networks import Model, compare
from normscope.bench.operations import Case
from normscope.bench.report import ModelRow, Report, Row
from normscope.bench.timing import alternate


def run(
    cases: Iterable[Case],
    models: Iterable[Model] = (),
    *,
    seconds: float = 1.0,
    compiled: bool = True,
    allocator: str = "as the system sets it",
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Measure each case forward and with backward for about ``seconds``, then each model.

    ``allocator`` is written into the report; ``progress`` is called with what comes next, ``keep`` with the report so
    far after each measurement: the whole takes long, and a run that is stopped should not be lost.
    """
    compiler = Compiler(compiled)
    here = machine.describe(allocator)
    rows: list[Row] = []
    whole: list[ModelRow] = []

    def so_far() -> Report:
        return Report(here, tuple(rows), tuple(whole), tuple(_notes(rows, compiler)))

    for case in cases:
        progress(str(case))
        rows.append(measure(case, compiler, seconds=seconds))
        keep(so_far())
    for model in models:
        progress(model.name)
        whole.append(compare(model, seconds=seconds))
        keep(so_far())
    return so_far()


def measure(case: Case, compiler: Compiler, *, seconds: float) -> Row:
    found = runs(case, compiler)
    with torch.no_grad():
        forward = alternate(found.forward, seconds=seconds)
    return Row(
        op=case.op.name,
        shape=case.shape,
        group=case.group,
        layout=case.layout,
        dtype=case.dtype,
        sets=case.op.sets(case.shape),
        input_bytes=case.bytes,
        passes=case.op.passes,
        forward=forward,
        with_backward=alternate(found.with_backward, seconds=seconds),
        saved=found.saved,
        difference=found.difference,
        failures=found.failures,
    )


def _notes(rows: Iterable[Row], compiler: Compiler) -> Iterable[str]:
    """What is missing, once for all cases it is missing in."""
    if not compiler.wanted:
        yield "torch.compile was left out"
    elif not compiler.usable:
        yield f"torch.compile was tried once and failed: {compiler.failure}"
    where: dict[str, list[str]] = {}
    for row in rows:
        for who, why in row.failures.items():
            where.setdefault(f"{who}: {why}", []).append(str(row))
    for what, places in where.items():
        others = f" and {len(places) - 1} more" if len(places) > 1 else ""
        yield f"not measured on {places[0]}{others}: {what}"
