"""Around one forward: all that `Unseen` is told of, by modes, by hooks, in new threads and through DLPack."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.doctor.folding.unseen import Unseen

_CAPSULES = ((torch._C, "_to_dlpack"), (torch.utils.dlpack, "to_dlpack"), (torch, "to_dlpack"))
"""the same, and no function mode sees them: DLPack as it was before ``Tensor.__dlpack__``"""


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes a second

    def __init__(self, unseen: Unseen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unseen = unseen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._unseen.ran(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, unseen: Unseen) -> None:
        super().__init__()
        self._unseen = unseen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._unseen.called(func, args, kwargs or {})


@contextmanager
def watching(unseen: Unseen) -> Iterator[None]:
    """Around one forward of the model."""
    with ExitStack() as around:
        for handle in (
            register_module_forward_pre_hook(unseen.enters),
            register_module_forward_hook(unseen.returns, with_kwargs=True),
        ):
            around.callback(handle.remove)
        around.enter_context(_in_threads(unseen))
        around.enter_context(_capsules(unseen))
        around.enter_context(_Operators(unseen))
        around.enter_context(_Functions(unseen))
        yield
    unseen.finish()


@contextmanager
def _in_threads(unseen: Unseen) -> Iterator[None]:
    """Modes are of one thread: those that the forward starts enter them first."""
    before = threading.getprofile()

    def began(*_: Any) -> None:
        sys.setprofile(before)
        for mode in (_Operators(unseen), _Functions(unseen)):
            mode.__enter__()  # type: ignore[no-untyped-call]

    threading.setprofile(began)
    try:
        yield
    finally:
        threading.setprofile(before)


@contextmanager
def _capsules(unseen: Unseen) -> Iterator[None]:
    made = {id(home): getattr(home, name) for home, name in _CAPSULES}

    def watched(tensor: Tensor) -> Any:
        unseen.leaves(tensor, "to_dlpack")
        return made[id(torch._C)](tensor)

    for home, name in _CAPSULES:
        setattr(home, name, watched)
    try:
        yield
    finally:
        for home, name in _CAPSULES:
            setattr(home, name, made[id(home)])
