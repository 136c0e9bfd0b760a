"""Is a frozen model still? The same bits in evaluation, and no statistic that a training pass moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normscope.doctor.nested import detached
from normscope.doctor.refusals import unwrap
from normscope.doctor.session import Session
from normscope.errors import ModelError, NormscopeError, told
from normscope.transforms.agreement import Deviation
from normscope.transforms.report import Agreement


def still(
    before: nn.Module, after: nn.Module, paths: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Agreement, tuple[str, ...]]:
    """The same bits in eval; and after ``train()`` a forward pass moves no frozen statistic."""
    try:
        with Session(before) as session:
            old = detached(session.forward(args, kwargs, mode="eval"))
    except NormscopeError:
        raise
    except Exception as error:
        raise ModelError(f"the model fails on the sample: {told(error)}") from error
    notes: tuple[str, ...] = ()
    moved = _Moved(unwrap(after), paths)
    with Session(after) as session:
        new = detached(session.forward(args, kwargs, mode="eval"))
        try:
            session.forward(args, kwargs, mode="train", watch=(moved,))
        except Exception as error:  # a sample of one, for norms that are live
            notes = (f"train: the model does not run ({told(error)}), so no training pass was made",)
    if moved.found or not _same_bits(old, new):
        site = moved.found or (paths[0] if paths else "")
        what = "its statistics move in a training pass" if moved.found else "outputs in eval are other bits"
        raise Deviation(
            f"{site or 'the model itself'}: {what} after the freeze, so its eval mode is not what it seems. Nothing "
            "was changed. Leave it out with select, and freeze it by its own means",
            site,
        )
    dtypes = [str(t.dtype).removeprefix("torch.") for t in new]
    return Agreement("eval", dtypes[0] if dtypes else "no tensor", difference=0.0, allowed=0.0), notes


def _same_bits(old: list[torch.Tensor], new: list[torch.Tensor]) -> bool:
    return len(old) == len(new) and all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(old, new, strict=True)
    )


class _Moved:
    """Context manager: the first of some modules whose buffers change inside."""

    def __init__(self, model: nn.Module, paths: list[str]) -> None:
        modules = dict(model.named_modules())
        self._modules = [(path, modules[path]) for path in paths]
        self.found = ""

    def __enter__(self) -> None:
        self._before = [[b.clone() for b in module.buffers()] for _, module in self._modules]

    def __exit__(self, *exc_info: object) -> None:
        for (path, module), before in zip(self._modules, self._before, strict=True):
            if not all(torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True)):
                self.found = self.found or path or "the model itself"
