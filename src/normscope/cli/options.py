"""Options that the commands which change a model have alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="package.module:attribute, or demo, demo:healthy.")
]
Select = Annotated[
    list[str] | None,
    typer.Option(
        "--select", metavar="PATH", help="A module path, or a pattern such as 'backbone.*.bn?'; repeatable."
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Where the state dict goes: .safetensors."),
]
Input = Annotated[
    str | None,
    typer.Option("--input", metavar="SHAPE", help="Random input instead: 8x3x224x224, or 2x16:int64:30522."),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="FILE",
        help="A state dict to load into the model: .safetensors, .pt or a transformers folder.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would change; write nothing.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the report as JSON.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")]
