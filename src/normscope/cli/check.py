"""``normscope check``: the findings of a model on the user's data."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from normscope.cli.frame import FINDINGS, console, progress
from normscope.errors import BadInput

FORMATS = ("text", "json", "sarif", "github")


def command(
    target: str = typer.Argument(
        ..., metavar="TARGET", help="package.module:attribute, or demo, demo:healthy."
    ),
    data: Path | None = typer.Option(
        None, "--data", metavar="FILE", help="A batch: .npz, .npy, .pt (tensors only) or .safetensors."
    ),
    input_: str | None = typer.Option(
        None,
        "--input",
        metavar="SHAPE",
        help="Random input where there is no data: 8x3x224x224, or 2x16:int64:30522 for token ids.",
    ),
    weights: Path | None = typer.Option(
        None, "--weights", metavar="FILE", help="A state dict to load into the model: .safetensors or .pt."
    ),
    select: list[str] = typer.Option([], "--select", metavar="CODES", help="Only these rules: NS3,NS101."),
    ignore: list[str] = typer.Option([], "--ignore", metavar="CODES", help="Not these rules."),
    fail_on: str | None = typer.Option(
        None,
        "--fail-on",
        metavar="SEVERITY",
        help="Exit 1 from this severity: info, warning (default), error.",
    ),
    format_: str = typer.Option("text", "--format", metavar="FORMAT", help=f"One of {', '.join(FORMATS)}."),
    html: Path | None = typer.Option(None, "--html", metavar="FILE", help="Also write a page."),
    seed: int | None = typer.Option(None, "--seed", help="Seed of everything random."),
    dataset_size: int | None = typer.Option(None, "--dataset-size", help="Number of training samples."),
    frozen_policy: str | None = typer.Option(
        None, "--frozen-policy", help="What you meant to freeze: statistics, affine or both."
    ),
    traceback: bool = typer.Option(False, "--traceback", help="Show where an error came from."),
) -> None:
    """Check every normalization of a model on your data; nothing in the model is changed.

    Exit codes: 0 nothing at or above --fail-on, 1 findings, 2 the command or target is wrong.
    """
    from normscope.cli import settings
    from normscope.doctor.report import severity_rank

    defaults = settings.load()
    fail_on = fail_on or defaults.fail_on
    severity_rank(fail_on)
    if format_ not in FORMATS:
        raise BadInput(f"--format is one of {', '.join(FORMATS)}; got {format_!r}")
    if html is not None and not html.resolve().parent.is_dir():
        raise BadInput(f"--html {html}: the folder {html.resolve().parent} does not exist; make it first")
    with progress() as step:
        from normscope import targets
        from normscope.doctor.check import check

        loaded = targets.resolve(target, data=data, input_spec=input_, weights=weights)
        report = check(
            loaded.model,
            loaded.inputs,
            loaded.targets,
            loss_fn=loaded.loss_fn,
            optimizer=loaded.optimizer,
            mask=loaded.mask,
            select=_codes(select) or defaults.select,
            ignore=_codes(ignore) or defaults.ignore,
            seed=defaults.seed if seed is None else seed,
            dataset_size=dataset_size or loaded.dataset_size or defaults.dataset_size,
            frozen_policy=frozen_policy or defaults.frozen_policy,
            synthetic=loaded.synthetic,
            target=target,
            progress=step,
        )
    if format_ == "text":
        from normscope.render.text import print_report, to_text

        if sys.stdout.isatty():
            print_report(report, console())
        else:
            sys.stdout.write(to_text(report))
    elif format_ == "github":
        from normscope.render.github import to_github

        sys.stdout.write(to_github(report))
    else:
        print(report.to_json() if format_ == "json" else report.to_sarif())
    if html is not None:
        report.to_html(html)
    if report.at_least(fail_on):
        sys.exit(FINDINGS)


def _codes(words: list[str]) -> tuple[str, ...]:
    return tuple(code.strip().upper() for word in words for code in word.split(",") if code.strip())
