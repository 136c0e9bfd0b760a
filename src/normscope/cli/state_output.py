"""A state dict written to a file that the user named: whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from normscope.errors import BadInput

if TYPE_CHECKING:
    from torch import nn


def named(option: str, file: Path, suffix: str = ".safetensors") -> Path:
    """The file, where one can be written; nothing is left there.

    Raises:
        BadInput: it is no file of that suffix, its folder does not exist, or it cannot be written.
    """
    if file.suffix != suffix:
        raise BadInput(f"{option} {file}: name a {suffix} file, which is what is written")
    folder = file.resolve().parent
    if file.is_dir() or not folder.is_dir():
        what = "it is a folder" if file.is_dir() else f"the folder {folder} does not exist"
        raise BadInput(f"{option} {file}: {what}; name a file to write in a folder that exists")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise BadInput(f"{option} {file} cannot be written: permission denied")
    return file


def write(model: nn.Module, file: Path) -> None:
    """The model's state dict, first beside the file, so that a failure leaves what was there."""
    from safetensors.torch import save_file

    part = file.with_name(f"{file.name}.part")
    # contiguous copies: the format holds no shared memory
    state = {name: t.detach().clone().contiguous() for name, t in model.state_dict().items()}
    part.touch()
    mode = (
        part.stat().st_mode
    )  # as the umask says; safetensors puts a file of its own there, for the user alone
    try:
        save_file(state, part)
        part.chmod(mode)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
