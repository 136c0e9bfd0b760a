"""The command line, one command a file. Nothing heavy is imported until a command runs."""

from __future__ import annotations


def main() -> None:
    """Entry point of the ``normscope`` script."""
    from normscope.cli import streams

    streams.settle()
    from normscope.cli.app import app

    app()
