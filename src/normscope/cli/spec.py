"""``normscope spec``: exactly what each normalization of a model is."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from normscope.cli import stored, streams
from normscope.cli.frame import console
from normscope.errors import BadInput


def command(
    target: str = typer.Argument(
        ...,
        metavar="TARGET",
        help="package.module:attribute, a .onnx or .pt2 file or one of weights, or demo, demo:healthy.",
    ),
    data: Path | None = typer.Option(
        None,
        "--data",
        metavar="FILE",
        help="A batch; with one, functional and hand-written calls are found too.",
    ),
    input_: str | None = typer.Option(
        None, "--input", metavar="SHAPE", help="Random input where there is no data: 8x3x224x224."
    ),
    trust: bool = typer.Option(
        False, "--trust", help="Of a .pt2 program: load it, which can run code of whoever wrote it."
    ),
    format_: str = typer.Option("text", "--format", metavar="FORMAT", help="text or json."),
    traceback: bool = typer.Option(False, "--traceback", help="Show where an error came from."),
) -> int:
    """Print every site: axes, variance, denominator, dtype, state, and mode in train and in eval.

    Wide terminals get a table, a line a site; narrow ones a block a specification, with the sites that have it.
    """
    if format_ not in ("text", "json"):
        raise BadInput(f"--format is text or json; got {format_!r}")
    out = streams.claim()
    from normscope import targets
    from normscope.doctor.check_state import describe_state
    from normscope.doctor.describe import describe
    from normscope.render.sites import print_sites
    from normscope.targets import state_files

    if state_files.names_state(target):
        stored.refuse(target, {"--data": data, "--input": input_})
        rows, ran = describe_state(Path(target)), False
    else:
        loaded = targets.resolve(target, data=data, input_spec=input_, trust=trust)
        rows, ran = describe(loaded.model, loaded.inputs), loaded.inputs is not None
    if format_ == "json":
        document = {"schema": 1, "target": target, "sites": [row.to_dict() for row in rows]}
        print(json.dumps(document, indent=2), file=out)
    elif rows:
        print_sites(rows, console(out), ran=ran)
    else:
        out.write("no normalization found\n")
        if not ran and not state_files.names_state(target):
            out.write(
                "norms written as functions or by hand show only in a run: pass --data FILE or --input SHAPE\n"
            )
    out.flush()
    return 0
