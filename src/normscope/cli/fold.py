"""``normscope fold``: the weights of a model, or a graph, whose norms went into the layers beside them."""

from __future__ import annotations

from pathlib import Path

import typer

from normscope.cli import options, state_output, streams
from normscope.cli.frame import FINDINGS, note, written
from normscope.errors import BadInput


def command(
    target: str = typer.Argument(
        ..., metavar="TARGET", help="package.module:attribute, a .onnx file, or demo, demo:healthy."
    ),
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        metavar="FILE",
        help="Where the folded state dict goes: .safetensors; of a graph, .onnx.",
    ),
    data: Path | None = typer.Option(
        None, "--data", metavar="FILE", help="A batch to check on: .npz, .npy, .pt or .safetensors."
    ),
    input_: options.Input = None,
    weights: options.Weights = None,
    dry_run: bool = typer.Option(False, "--dry-run", help="Say what would be folded; write nothing."),
    clone_shared: bool = typer.Option(
        False, "--clone-shared", help="Give shared layers and tied weights copies where that lets them fold."
    ),
    gains: bool = typer.Option(
        True, "--gains/--no-gains", help="Also fold gains of norms without stored statistics."
    ),
    center: bool = typer.Option(False, "--center", help="Also fold the centering of layer norms."),
    json: options.Json = None,
    traceback: options.Traceback = False,
) -> int:
    """Fold batch norms, and gains of other norms, into the layers beside them, where the function stays as it is.

    TARGET is a module, or a function returning one, (model, inputs), or a dict with model and inputs. It is folded in
    evaluation mode and checked on the inputs; what would change the function is left, with the reason. The file written
    is loaded into a model folded in the same way: which keys it has does not depend on values. A graph becomes a graph,
    compared in ONNX Runtime on the data, or on random input of the sizes it declares.

    Exit codes: 0 something was folded, 1 nothing could be, 2 the command or target is wrong.
    """
    graph = target.lower().endswith(".onnx")
    suffix = ".onnx" if graph else ".safetensors"
    if (output is None) != dry_run:
        raise BadInput(f"name a file to write with -o FILE{suffix}, or rehearse with --dry-run")
    if output is not None:
        state_output.named("-o", output, suffix)
    out = streams.claim()
    from normscope import targets
    from normscope.targets.onnx_model import OnnxModel
    from normscope.transforms import fold

    loaded = targets.resolve(target, data=data, input_spec=input_, weights=weights)
    for said in loaded.notes:
        note(said)
    if loaded.inputs is None and not graph:
        raise BadInput(
            "fold needs inputs, which show what feeds what: --data FILE, or --input SHAPE for random numbers"
        )
    if loaded.synthetic:
        note("checked on random numbers: give real inputs with --data where you have them")
    folded, report = fold(
        loaded.model.eval(),
        loaded.inputs,
        inplace=not dry_run and not graph,
        dry_run=dry_run,
        clone_shared=clone_shared,
        gains=gains,
        center=center,
    )
    print(report, file=out)
    if output is not None and report.done:
        if isinstance(folded, OnnxModel):
            folded.save(output)
        else:
            state_output.write(folded, output, report)
        written(output, out)
    elif output is not None:
        note(f"{output} was not written: nothing was folded")
    if json is not None:
        json.write_text(report.to_json() + "\n", encoding="utf-8")
    out.flush()
    return 0 if report.done else FINDINGS
