"""``normscope compare``: are two normalizations the same function."""

from __future__ import annotations

import json

import typer

from normscope.cli import streams
from normscope.cli.frame import FINDINGS, WRONG
from normscope.cli.identify import TARGET, known_format
from normscope.errors import BadInput


def command(
    a: str = typer.Argument(..., metavar="A", help=TARGET),
    b: str = typer.Argument(
        ..., metavar="B", help="The same; also a specification, normscope:families.rms_norm(eps=1e-6)."
    ),
    input_: str | None = typer.Option(
        None, "--input", metavar="SHAPE", help="Shape of an input of both, 8x16x32; else one that fits."
    ),
    layout: str | None = typer.Option(
        None,
        "--layout",
        metavar="NAMES",
        help="Names of the input's axes, 'b c h w'; 'b c h w -> b h w c' where B takes another order.",
    ),
    format_: str = typer.Option("text", "--format", metavar="FORMAT", help="text or json."),
    traceback: bool = typer.Option(False, "--traceback", help="Show where an error came from."),
) -> int:
    """Tell every difference of two normalizations by name and size, with a small input on which they differ.

    Compared are the output in training and in evaluation, the update of stored statistics, and the order of casts in
    bfloat16; with the values that both hold, and as functions of their parameters.

    Exit codes: 0 the same function, 1 not the same, 2 undecided, or the command or a target is wrong.
    """
    known_format(format_)
    out = streams.claim()
    from normscope.identify.compare import compare
    from normscope.targets import batches, callables

    (one, example), (two, other) = callables.load(a), callables.load(b)
    if input_ is not None:
        example = tuple(batches.random(input_).shape)
    elif example is None:
        example = other
    try:
        found = compare(one, two, example, layout=layout)
    except BadInput as error:
        if example is not None or "Pass an example" not in str(error):
            raise
        why = str(error).partition(" (")[0].partition(". Pass")[0]
        raise BadInput(f"{why}: pass the shape of an input of both, --input 8x16x32") from None
    if format_ == "json":
        print(json.dumps({"targets": [a, b], **found.to_json()}, indent=2), file=out)
    else:
        print(found, file=out)
    out.flush()
    return {True: 0, False: FINDINGS, None: WRONG}[found.same]
