"""``normscope verify``: evidence on this machine and build, for PyTorch's layers or for one's own."""

from __future__ import annotations

from pathlib import Path

import typer

from normscope.errors import BadInput


def command(
    target: str | None = typer.Argument(
        None,
        metavar="[TARGET]",
        help="package.module:attribute with a layer or a model; without it, torch.nn.",
    ),
    json: Path | None = typer.Option(
        None,
        "--json",
        metavar="FILE",
        help="Write inputs, conventions, eps, tolerances, results and versions.",
    ),
    figures: Path | None = typer.Option(
        None, "--figures", metavar="DIR", help="Write two curves there, as SVG and CSV."
    ),
    traceback: bool = typer.Option(False, "--traceback", help="Show where an error came from."),
) -> None:
    """Check normalization layers against the formulas, with input, convention, eps, tolerance and result."""
    if target is not None and figures is not None:
        raise BadInput("--figures draws torch.nn's own layers: leave out TARGET")
    from normscope import verify

    if target is None:
        report = verify.run()
    else:
        from normscope import targets

        report = verify.run_layer(targets.resolve(target).model, name=target)
    print(report)
    if json is not None:
        json.write_text(report.to_json() + "\n")
        print(f"written: {json}")
    if figures is not None:
        from normscope.verify.figures import write

        for path in write(figures):
            print(f"written: {path}")
    if not report.passed:
        raise typer.Exit(1)
