"""What a user can point at: an import string or a demo, with data, random input and weights beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.errors import BadTarget

if TYPE_CHECKING:
    import torch

FILES = (".safetensors", ".pt", ".pth", ".ckpt", ".onnx", ".pt2")


@dataclass
class Loaded:
    """A model with what came along with it; a target may return a dict of these names."""

    model: torch.nn.Module
    inputs: Any = None
    targets: Any = None
    mask: Any = None
    loss_fn: Callable[..., torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    dataset_size: int | None = None
    synthetic: bool = False
    state: Mapping[str, torch.Tensor] | None = None
    """what the model's checkpoint holds, by name"""
    config: Mapping[str, Any] | None = field(default=None, init=False)
    """what the config.json beside its weights says"""
    notes: list[str] = field(default_factory=list, init=False)
    """what was done while loading that the user should know"""
    declared: Callable[[], tuple[Any, str]] | None = field(default=None, init=False)
    """random inputs of the sizes that the target itself declares, or None, and a note; for want of others"""

    def fill_in(self) -> None:
        """Random inputs, where none came and the target says what it takes."""
        if self.inputs is None and self.declared is not None:
            self.inputs, said = self.declared()
            self.synthetic = self.inputs is not None
            self.notes.append(said)


def resolve(
    target: str,
    *,
    data: Path | None = None,
    input_spec: str | None = None,
    weights: Path | None = None,
    trust: bool = False,
) -> Loaded:
    """Load what ``target`` names; ``data`` or ``input_spec`` replace the inputs it brings.

    ``trust``: a ``.pt2`` program may run code.

    Raises:
        BadTarget: it cannot be loaded.
        BadInput: the data file or the shape cannot be used.
    """
    from normscope.targets import batches, callables, checkpoints, demos, exported, imported, onnx_model

    if target == "demo" or target.startswith("demo:"):
        loaded = demos.load(target)
    elif target.lower().endswith(".onnx"):
        loaded = onnx_model.load(target, weights)
    elif target.lower().endswith(".pt2"):
        loaded = exported.load(Path(target), trust)
    elif target.lower().endswith(FILES):
        raise BadTarget(
            f"{target} is a file of weights, and this needs the model's code: name the model as "
            f"package.module:attribute and pass the file with --weights {target}"
        )
    elif callables.is_call(target):
        loaded = imported.loaded(target, callables.made(target))
    else:
        loaded = imported.load(target)
    if weights is not None:
        loaded.state, loaded.config, notes = checkpoints.load_into(loaded.model, weights)
        loaded.notes += notes
    if data is not None and input_spec is not None:
        raise BadTarget("--data and --input exclude each other: real samples, or random numbers")
    if data is not None:
        batch = batches.read(data)
        loaded.inputs, loaded.synthetic = batch.inputs, False
        loaded.targets = batch.targets if batch.targets is not None else loaded.targets
        loaded.mask = batch.mask if batch.mask is not None else loaded.mask
    elif input_spec is not None:
        loaded.inputs, loaded.targets, loaded.mask, loaded.synthetic = (
            batches.random(input_spec),
            None,
            None,
            True,
        )
    return loaded
