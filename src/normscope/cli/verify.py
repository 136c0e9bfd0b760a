"""``normscope verify``: evidence on this machine and build, for PyTorch's layers or for one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from normscope.cli import streams
from normscope.cli.frame import FINDINGS, written
from normscope.errors import BadInput

if TYPE_CHECKING:
    from normscope.verify import VerifyReport


def command(
    target: str | None = typer.Argument(
        None,
        metavar="[TARGET]",
        help="package.module:attribute with a layer, a model, (model, inputs), or (layer, NormSpec); without it, "
        "torch.nn.",
    ),
    long: bool = typer.Option(False, "--long", help="Print every input and result in full."),
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
) -> int:
    """Check normalization layers against the formulas, with input, convention, eps, tolerance and result.

    A layer of torch.nn is checked against what is read off it. A layer written by hand is checked against what you say
    it computes: let TARGET be a pair of the layer and its normscope.NormSpec, or (layer, spec, shape) with the shape of
    an input that it takes. Norms of a model that cannot be read are named with the reason; with (model, inputs) those
    inside a forward are too.

    Exit codes: 0 all checks passed, 1 one failed, 2 the target cannot be verified.
    """
    if target is not None and figures is not None:
        raise BadInput("--figures draws torch.nn's own layers: leave out TARGET")
    from normscope import verify

    out = streams.claim()  # the model's own prints go to standard error
    report = verify.run() if target is None else _of(target)
    print(report.text(long=long), file=out)
    if json is not None:
        json.write_text(report.to_json() + "\n")
        written(json, out)
    if figures is not None:
        from normscope.verify.figures import write

        for path in write(figures):
            written(path, out)
    out.flush()
    return 0 if report.passed else FINDINGS


def _of(target: str) -> VerifyReport:
    """The report of a target, which is ``(layer, spec[, shape])`` where a NormSpec stands in place of inputs."""
    from normscope import targets, verify
    from normscope.spec import NormSpec

    loaded = targets.resolve(target)
    if isinstance(loaded.inputs, NormSpec):
        return verify.run_layer(loaded.model, name=target, spec=loaded.inputs, shape=loaded.targets)
    return verify.run_layer(loaded.model, name=target, inputs=loaded.inputs)
