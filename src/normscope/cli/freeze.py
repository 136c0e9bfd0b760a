"""``normscope freeze``: what a freeze of a model's norms would hold still, and what it would leave."""

from __future__ import annotations

from pathlib import Path

import typer

from normscope.cli import options, state_output, streams
from normscope.cli.frame import FINDINGS, note, written


def command(
    target: options.Target,
    policy: str = typer.Option(
        "statistics", "--policy", metavar="POLICY", help="statistics, affine (gain and bias), or both."
    ),
    select: options.Select = None,
    output: options.Output = None,
    data: Path | None = typer.Option(
        None, "--data", metavar="FILE", help="A batch to verify on: .npz, .npy, .pt or .safetensors."
    ),
    input_: options.Input = None,
    weights: options.Weights = None,
    json: options.Json = None,
    traceback: options.Traceback = False,
) -> int:
    """Freeze a model's norms, verify it on inputs where there are any, and say which were frozen and why others not.

    A freeze is a property of the modules, and a state dict holds tensors only: the file written has the values of the
    model as it was, and the freeze is made again by the line of code that is printed.

    Exit codes: 0 something was frozen, 1 nothing could be, 2 the command or target is wrong.
    """
    if output is not None:
        state_output.named("-o", output)
    out = streams.claim()
    from normscope import targets
    from normscope.transforms import freeze

    loaded = targets.resolve(target, data=data, input_spec=input_, weights=weights)
    for said in loaded.notes:
        note(said)
    model, report = freeze(loaded.model, policy, select=select or None, sample=loaded.inputs, inplace=True)
    print(report, file=out)
    if output is not None and report.done:
        state_output.write(model, output, report)
        written(output, out)
    if json is not None:
        json.write_text(report.to_json() + "\n", encoding="utf-8")
    if report.done:
        chosen = f", select={select!r}" if select else ""
        call = f"normscope.transforms.freeze(model, {policy!r}{chosen}, inplace=True)"
        print(f"in your code, after the weights are loaded: {call}", file=out)
    out.flush()
    return 0 if report.done else FINDINGS
