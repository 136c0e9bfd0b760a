"""``normscope compare``: are two normalizations the same function; do two files hold the same normalizations."""

from __future__ import annotations

import json
from typing import Any

import typer

from normscope.cli import streams
from normscope.cli.frame import FINDINGS, WRONG, progress
from normscope.cli.identify import TARGET, known_format
from normscope.errors import BadInput

FILES = "Or a file or folder of weights, a .onnx or .pt2 file; then the other may also be a whole model."


def command(
    a: str = typer.Argument(..., metavar="A", help=f"{TARGET} {FILES}"),
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
    trust: bool = typer.Option(
        False, "--trust", help="Of a .pt2 program: load it, which can run code of whoever wrote it."
    ),
    format_: str = typer.Option("text", "--format", metavar="FORMAT", help="text or json."),
    traceback: bool = typer.Option(False, "--traceback", help="Show where an error came from."),
) -> int:
    """Tell every difference of two normalizations by name and size, with a small input on which they differ.

    Compared are the output in training and in evaluation, the update of stored statistics, and the arithmetic in
    bfloat16 and float16; with the values that both hold, and as functions of their parameters.

    Of files, and of a file and a model, the normalizations are paired up by name: which stand in one alone, and in
    what those of both differ: eps and the like where both tell them, parameters, statistics. Read norm by norm.

    Exit codes: 0 the same, 1 not the same, 2 undecided, or the command or a target is wrong.
    """
    known_format(format_)
    out = streams.claim()
    from normscope.targets.norms.lists import is_file

    if is_file(a) or is_file(b):
        _refuse({"--layout": layout}, "what files hold is compared, and nothing is run")
        found: Any = _norms(a, b, input_, trust)
    else:
        _refuse({"--trust": trust}, "neither target is a .pt2 program")
        found = _functions(a, b, input_, layout)
    if format_ == "json":
        print(json.dumps({"targets": [a, b], **found.to_json()}, indent=2), file=out)
    else:
        print(found, file=out)
    out.flush()
    return {True: 0, False: FINDINGS, None: WRONG}[found.same]


def _functions(a: str, b: str, input_: str | None, layout: str | None) -> Any:
    """Of two layers, functions or specifications."""
    from normscope.identify.compare import compare
    from normscope.targets import batches, callables

    (one, example), (two, other) = callables.load(a), callables.load(b)
    if input_ is not None:
        example = tuple(batches.random(input_).shape)
    elif example is None:
        example = other
    try:
        return compare(one, two, example, layout=layout)
    except BadInput as error:
        if example is not None or "Pass an example" not in str(error):
            raise
        why = str(error).partition(" (")[0].partition(". Pass")[0]
        raise BadInput(f"{why}: pass the shape of an input of both, --input 8x16x32") from None


def _norms(a: str, b: str, input_: str | None, trust: bool) -> Any:
    """Of two targets with many normalizations, one a file at least."""
    from normscope.targets.norms import lists
    from normscope.targets.norms.comparison import compare_norms

    one, two = (lists.of_target(target, input_spec=input_, trust=trust) for target in (a, b))
    with progress(len(one.norms) + 1) as step:
        return compare_norms(one, two, progress=step)


def _refuse(options: dict[str, Any], why: str) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise BadInput(f"{' and '.join(given)} says nothing here: {why}")
