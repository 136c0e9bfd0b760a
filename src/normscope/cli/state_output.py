"""A state dict written to a file that the user named: whole, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import normscope
from normscope.errors import BadInput

if TYPE_CHECKING:
    from torch import nn

    from normscope.transforms.report import TransformReport


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


def write(model: nn.Module, file: Path, report: TransformReport | None = None) -> None:
    """The model's state dict, first beside the file, so that a failure leaves what was there.

    What was done goes into the file's metadata, as JSON under ``normscope``: command, version, and where the statistics
    come from, or each normalization and what became of it.
    """
    from safetensors.torch import save_file

    from normscope.targets.state_files.provenance import KEY

    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    # contiguous copies: the format holds no shared memory
    state = {name: t.detach().clone().contiguous() for name, t in model.state_dict().items()}
    metadata = {"format": "pt"}
    if report is not None:
        metadata[KEY] = json.dumps(_record(report))
    part.touch()
    mode = (
        part.stat().st_mode
    )  # as the umask says; safetensors puts a file of its own there, for the user alone
    try:
        save_file(state, part, metadata)
        part.chmod(mode)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _record(report: TransformReport) -> dict[str, Any]:
    record = {"command": report.transform, "version": normscope.__version__}
    provenance = getattr(report, "provenance", None)
    if provenance is not None:  # the statistics before stand in the report, and would fill the header
        return record | {key: value for key, value in provenance.items() if key != "previous"}
    sites = [{"name": s.name, "before": s.before, "after": s.after, "reason": s.reason} for s in report.sites]
    return record | {"sites": sites}
