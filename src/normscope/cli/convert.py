"""``normscope convert``: the norms of a model made into another kind."""

from __future__ import annotations

from pathlib import Path

import typer

from normscope.cli import options, state_output, streams
from normscope.cli.frame import FINDINGS, note, written
from normscope.errors import BadInput


def command(
    target: options.Target,
    to: str = typer.Option(
        ...,
        "--to",
        metavar="KIND",
        help="group, layer, instance, batch, sync, frozen, renorm, ghost, ours, torch.",
    ),
    groups: int | None = typer.Option(None, "--groups", metavar="N", help="With --to group: how many."),
    size: int | None = typer.Option(
        None, "--size", metavar="N", help="With --to ghost: samples of a virtual batch."
    ),
    remainder: str = typer.Option(
        "error", "--remainder", metavar="RULE", help="With --to ghost: error, short or balanced."
    ),
    select: options.Select = None,
    output: options.Output = None,
    data: Path | None = typer.Option(
        None, "--data", metavar="FILE", help="A batch that shows shapes: .npz, .npy, .pt or .safetensors."
    ),
    input_: options.Input = None,
    weights: options.Weights = None,
    dry_run: options.DryRun = False,
    json: options.Json = None,
    traceback: options.Traceback = False,
) -> int:
    """Make the norms of a model into another kind. The function changes; the report lists how.

    The file written is loaded into a model whose norms were converted in the same way.

    Exit codes: 0 something was converted, 1 nothing could be, 2 the command or target is wrong.
    """
    if (output is None) != dry_run:
        raise BadInput("name a file to write with -o FILE.safetensors, or rehearse with --dry-run")
    if output is not None:
        state_output.named("-o", output)
    out = streams.claim()
    from normscope import targets
    from normscope.transforms import convert

    loaded = targets.resolve(target, data=data, input_spec=input_, weights=weights)
    for said in loaded.notes:
        note(said)
    model, report = convert(
        loaded.model,
        to,
        groups=groups,
        size=size,
        remainder=remainder,
        select=select or None,
        sample=loaded.inputs,
        dry_run=dry_run,
    )
    print(report, file=out)
    if output is not None and report.done:
        state_output.write(model, output, report)
        written(output, out)
    if json is not None:
        json.write_text(report.to_json() + "\n", encoding="utf-8")
    out.flush()
    return 0 if report.done else FINDINGS
