"""``normscope identify``: which normalization a layer or a function really is."""

from __future__ import annotations

import json
from typing import Any

import typer

from normscope.cli import streams
from normscope.cli.frame import FINDINGS
from normscope.errors import BadInput

MODES = {"train": True, "eval": False}
TARGET = (
    "package.module:attribute with a layer or a function of one array, or a layer made here, "
    "'torch.nn:LayerNorm(768)'."
)


def command(
    target: str = typer.Argument(..., metavar="TARGET", help=TARGET),
    input_: str | None = typer.Option(
        None,
        "--input",
        metavar="SHAPE",
        help="Shape of an input, 8x16x32; needed where it cannot be read off.",
    ),
    layout: str | None = typer.Option(
        None, "--layout", metavar="NAMES", help="Names of the input's axes: 'b c h w'."
    ),
    mode: str | None = typer.Option(None, "--mode", help="train or eval; as it is if not given."),
    format_: str = typer.Option("text", "--format", metavar="FORMAT", help="text or json."),
    evidence: bool = typer.Option(False, "--evidence", help="Also which probe gave which conclusion."),
    traceback: bool = typer.Option(False, "--traceback", help="Show where an error came from."),
) -> int:
    """Say from its behaviour alone which normalization TARGET is, with the evidence; verified on fresh inputs.

    Exit codes: 0 it is one of the family (or a fixed map, as one in evaluation is), 1 it is none, 2 the target or the
    command is wrong.
    """
    known_format(format_)
    if mode is not None and mode not in MODES:
        raise BadInput(f"--mode is train or eval; got {mode!r}")
    out = streams.claim()
    from normscope.identify import identify
    from normscope.targets import callables

    fn, example = callables.load(target)
    example = given(fn, example, input_)
    if example is None:
        raise BadInput(f"{target} is identified by probing it: pass the shape of an input, --input 8x16x32")
    found = identify(fn, example, layout=layout, training=None if mode is None else MODES[mode])
    if format_ == "json":
        print(json.dumps({"schema": 1, "target": target, **found.to_json()}, indent=2), file=out)
    else:
        print(found.text(evidence=evidence), file=out)
    out.flush()
    return 0 if found.spec is not None or found.fixed is not None else FINDINGS


def known_format(format_: str) -> None:
    if format_ not in ("text", "json"):
        raise BadInput(f"--format is text or json; got {format_!r}")


def given(fn: Any, example: Any, input_: str | None) -> Any:
    """The example of the command line, else the target's own, else one that fits a layer that can be read; or None."""
    import torch

    from normscope.targets import batches

    if input_ is not None:
        example = batches.random(input_)
        return example if isinstance(fn, torch.nn.Module) else tuple(example.shape)
    if example is None and isinstance(fn, torch.nn.Module):
        from normscope.identify.compare_shapes import shapes
        from normscope.reading import UnknownNormalization, read

        try:
            reading = read(fn)
        except UnknownNormalization:
            return None
        held = {name: tuple(tensor.shape) for name, tensor in reading.tensors.items()}
        shape = next(shapes((reading.spec, held, fn)), None)
        return None if shape is None else torch.zeros(shape)
    return example
