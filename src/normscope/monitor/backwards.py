"""How many backward passes the gradient that an optimizer steps on comes from.

A pass that accumulates leaves a gradient that is more than what it brought. A gradient that was set to zero or to None
in between starts anew. (Versions of the tensor do not tell: data-parallel training writes the mean over ranks into it.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

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
        self._brought: Tensor | None = None
        leaf = next((p for p in parameters if p.is_leaf and p.requires_grad), None)
        self._handles: list[Any] = []
        if leaf is not None:
            self._handles = [
                leaf.register_hook(Hook(self._arrives)),  # type: ignore[no-untyped-call]
                leaf.register_post_accumulate_grad_hook(Hook(self._accumulated)),  # type: ignore[no-untyped-call]
            ]

    def _arrives(self, gradient: Tensor) -> None:
        self._brought = gradient.detach()

    def _accumulated(self, parameter: Tensor) -> None:
        brought, self._brought = self._brought, None
        now = parameter.grad
        if now is None or brought is None:  # an optimizer in the backward pass has used it up
            self.passes = 0
            return
        with torch.no_grad():
            whole = now.detach().to_dense() if now.is_sparse else now.detach()
            brought = brought.to_dense() if brought.is_sparse else brought
            alone = torch.equal(whole, brought.to(whole))
        self.passes = 1 if alone else self.passes + 1

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._brought = None
