"""The application: the commands put together."""

from __future__ import annotations

import typer

import normscope
from normscope.cli import (
    bench,
    check,
    compare,
    convert,
    fold,
    freeze,
    identify,
    recalibrate,
    rule,
    spec,
    study,
    verify,
)
from normscope.cli.frame import guarded

app = typer.Typer(
    name="normscope",
    help="Says exactly what each normalization in a network is, and checks it on your own model and data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich costs a third of the start-up time of --help
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"normscope {normscope.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    pass


for module in (
    check,
    spec,
    identify,
    compare,
    rule,
    verify,
    bench,
    fold,
    freeze,
    recalibrate,
    convert,
    study,
):
    app.command(name=module.__name__.rpartition(".")[2])(guarded(module.command))
