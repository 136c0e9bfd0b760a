"""The state of PyTorch that evidence is taken under, whatever the caller's is; the caller's comes back after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from normscope.errors import BadInput


@contextmanager
def plain_torch() -> Iterator[None]:
    """Gradients are recorded, nothing is cast, and new tensors are on the CPU.

    Raises BadInput under ``torch.device("meta")``, where tensors hold no numbers.
    """
    if torch.empty(0).is_meta:
        raise BadInput(
            "verify computes with numbers, and the default device is meta, whose tensors hold none. Call it outside "
            'torch.device("meta"), or after torch.set_default_device("cpu")'
        )
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        yield
