"""How many backward passes the gradient that an optimizer steps on comes from.

A pass that accumulates adds in place to the gradient that is there: the same tensor, one version on. A gradient that
was set to zero or to None in between starts anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from normscope.monitor.watch import Hook

if TYPE_CHECKING:
    from torch import Tensor


class Backwards:
    """A hook on one parameter, for the length of a look.

    >>> import torch
    >>> weight = torch.ones(2, requires_grad=True)
    >>> counted = Backwards([weight])
    >>> weight.sum().backward(), weight.sum().backward()
    (None, None)
    >>> counted.passes
    2
    >>> _ = weight.grad.zero_()
    >>> weight.sum().backward()
    >>> counted.passes
    1
    >>> counted.close()
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.passes = 0
        """that the present gradient is the sum of; 0 where it is not known"""
        self._last: tuple[Tensor, int] | None = None
        leaf = next((p for p in parameters if p.is_leaf and p.requires_grad), None)
        self._handle: Any = None
        if leaf is not None:
            self._handle = leaf.register_post_accumulate_grad_hook(Hook(self._accumulated))  # type: ignore[no-untyped-call]

    def _accumulated(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None:  # an optimizer in the backward pass has used it up
            self.passes, self._last = 0, None
            return
        added = self._last is not None and self._last[0] is grad and self._last[1] + 1 == grad._version
        self.passes = self.passes + 1 if added else 1
        self._last = grad, grad._version

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._last = None
