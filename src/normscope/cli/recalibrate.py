"""``normscope recalibrate``: a model with running statistics taken from data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from normscope.cli import options, state_output, streams
from normscope.cli.frame import FINDINGS, note, written
from normscope.errors import BadInput

if TYPE_CHECKING:
    from torch import nn

    from normscope.targets.batches import Batch


def command(
    target: options.Target,
    data: Path = typer.Option(
        ..., "--data", metavar="FILE", help="Inputs to take statistics of: .npz, .npy, .pt or .safetensors."
    ),
    source: str = typer.Option(..., "--source", metavar="TEXT", help="Where the data come from."),
    selection: str = typer.Option(
        ..., "--selection", metavar="TEXT", help="By which rule these samples were chosen."
    ),
    output: options.Output = None,
    method: str = typer.Option("exact", "--method", metavar="NAME", help="exact, ema or layerwise."),
    batch_size: int = typer.Option(64, "--batch-size", min=1, metavar="N", help="Samples in a forward pass."),
    select: options.Select = None,
    held_out: Path | None = typer.Option(
        None,
        "--held-out",
        metavar="FILE",
        help="Other inputs, on which outputs before and after are compared; with class labels as targets, accuracy.",
    ),
    weights: options.Weights = None,
    dry_run: bool = typer.Option(False, "--dry-run", help="Report what would come of it; write nothing."),
    json: Path | None = typer.Option(
        None, "--json", metavar="FILE", help="Write the report, with provenance and the statistics before."
    ),
    traceback: options.Traceback = False,
) -> int:
    """Take the running statistics of a model's norms from data: no labels, and no weight moves.

    Where the data hold a mask (True where valid, samples on axis 0), only valid elements count. The file written says
    where its statistics come from, which ``normscope check FILE`` shows.

    Where held-out targets show that accuracy fell, the report says so, and the file is written all the same.

    Exit codes: 0 recalibrated, 1 accuracy on held-out samples fell, 2 the command or target is wrong.
    """
    if (output is None) != dry_run:
        raise BadInput("name a file to write with -o FILE.safetensors, or rehearse with --dry-run")
    for option, text in (("--source", source), ("--selection", selection)):
        if not text.strip():
            raise BadInput(f"{option} is empty: say it in a few words, it is kept with the result")
    if output is not None:
        state_output.named("-o", output)
    out = streams.claim()
    from normscope import targets
    from normscope.targets import batches
    from normscope.transforms import recalibrate

    loaded = targets.resolve(target, weights=weights)
    for said in loaded.notes:
        note(said)
    other = None if held_out is None else batches.read(held_out)
    batch = batches.read(data)
    model, report = recalibrate(
        loaded.model,
        _cut(batch.inputs, batch_size),
        mask=None if batch.mask is None else list(batch.mask.split(batch_size)),
        method=method,
        source=source,
        selection=selection,
        select=select or None,
        held_out=None if other is None else _cut(other.inputs, batch_size),
        metric=None if other is None else _accuracy(other, batch_size),
        inplace=not dry_run,
        dry_run=dry_run,
    )
    print(report, file=out)
    if output is not None:
        state_output.write(model, output, report)
        written(output, out)
    if json is not None:
        json.write_text(report.to_json() + "\n", encoding="utf-8")
    out.flush()
    return FINDINGS if report.worse else 0


def _cut(inputs: Any, size: int) -> list[Any]:
    """Batches of some samples each, in the order of the file."""
    from normscope.doctor.nested import mapped, tensors

    rows = next((len(t) for _, t in tensors(inputs) if t.ndim), 0)
    return [
        mapped(inputs, lambda t, at=at: t[at : at + size] if t.ndim and len(t) == rows else t)  # type: ignore[misc]
        for at in range(0, rows, size)
    ]


def _accuracy(batch: Batch, size: int) -> Callable[[nn.Module], float] | None:
    """Share of samples whose largest output is the target; None where targets are no classes."""
    from normscope.doctor.arguments import as_call

    labels = batch.targets
    if labels is None or labels.is_floating_point() or labels.ndim != 1:
        return None

    def accuracy(model: nn.Module) -> float:
        right = 0
        for part, wanted in zip(_cut(batch.inputs, size), labels.split(size), strict=True):
            args, kwargs = as_call(part)
            right += int((model(*args, **kwargs).argmax(1) == wanted).sum())
        return right / len(labels)

    return accuracy
