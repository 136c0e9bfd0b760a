"""Files and folders of weights without their code: ``open_state`` reads what they hold, tensor by tensor.

=============================================  ====================================================================
target                                         is read as
=============================================  ====================================================================
``.safetensors``                               a header, and one read a tensor
``.pt`` ``.pth`` ``.ckpt`` ``.bin``            what ``torch.save`` wrote; plain tensors only, never code
``.safetensors.index.json`` ``.bin.index.json``  the shards that it lists, in its own folder
a folder                                       ``config.json`` and the weights beside it, as transformers writes them
=============================================  ====================================================================
"""

from __future__ import annotations

import os
from pathlib import Path

from normscope.doctor.stored_state import Stored, StoredState, chosen_state
from normscope.errors import BadInput, BadTarget
from normscope.targets.state_files.folder import config_of, has_weights, weights_of
from normscope.targets.state_files.provenance import told
from normscope.targets.state_files.safetensors_file import read_header
from normscope.targets.state_files.shards import INDEX, shards
from normscope.targets.state_files.torch_file import read_tree

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")


def names_state(target: str) -> bool:
    """Whether a target is a file of weights, an index of shards, or a folder of weights.

    A folder that only has the name of a package, or of the demo, is none.
    """
    if target.lower().endswith((*SUFFIXES, INDEX)):
        return True
    written_as_path = any(sign in target for sign in {"/", os.sep})
    return target != "demo" and Path(target).is_dir() and (written_as_path or has_weights(Path(target)))


def open_state(path: str | Path) -> StoredState:
    """The tensors that a file or folder holds: names, shapes and dtypes now, values when they are asked for.

    Raises:
        BadTarget: it is missing, broken, asks for code, or holds no named tensors.
    """
    path = Path(path)
    if "\0" in str(path):
        raise BadTarget(f"{str(path)!r} is no file name")
    if path.is_dir():
        state = open_state(weights_of(path))
        state.config, notes = config_of(path)
        state.notes += notes
    elif path.name.lower().endswith(INDEX):
        tensors, notes = shards(path, _tensors)
        state = StoredState(tensors, notes=notes)
    else:
        tensors, notes = _tensors(path)
        state = StoredState(tensors, notes=notes)
    if not state.tensors:
        raise BadTarget(f"{path} holds no tensors")
    state.source = str(path)
    return state


def _tensors(path: Path) -> tuple[dict[str, Stored], list[str]]:
    """Of one file."""
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        tensors, metadata = read_header(path)
        return tensors, told(metadata)
    if suffix not in SUFFIXES:
        raise BadTarget(f"{path} is no file of weights that is known: {', '.join(SUFFIXES)}, or *{INDEX}")
    tree = read_tree(path)
    if not isinstance(tree, dict):
        raise BadTarget(
            f"{path} holds no named tensors; it must hold a state dict, as model.state_dict() gives"
        )
    try:
        return chosen_state(tree, str(path))
    except BadInput as error:
        raise BadTarget(str(error)) from None
