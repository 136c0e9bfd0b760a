"""``.pt2`` files: programs written by ``torch.export.save``, loaded only where the user says that they are trusted."""

from __future__ import annotations

from pathlib import Path

import torch

from normscope.errors import BadTarget
from normscope.targets import Loaded
from normscope.targets.failures import blamed


def load(path: Path, trust: bool) -> Loaded:
    """The program with the inputs it was exported with, which are taken for random numbers.

    Raises:
        BadTarget: it is not trusted, missing or broken.
    """
    if not path.is_file():
        raise BadTarget(f"there is no file {path}")
    if not trust:
        raise BadTarget(
            f"{path} is a program: what it names is called when it runs, any function that torch can reach, and its "
            "expressions are evaluated when it is loaded. If it comes from you, say so with --trust"
        )
    with blamed(f"loading {path}"):
        program = torch.export.load(path)
        model = program.module()
    loaded = Loaded(model)
    args, kwargs = program.example_inputs or ((), {})
    if args and not kwargs:
        loaded.inputs, loaded.synthetic = tuple(args), True
        loaded.notes.append("the program runs on the inputs it was exported with; pass --data FILE for more")
    return loaded
