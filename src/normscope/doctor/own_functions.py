"""The user's own ``torch.autograd.Function`` classes in a graph: their backward is written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def own_functions(outputs: Iterable[Tensor], before: Tensor | None = None) -> list[str]:
    """Names of the classes that made the outputs, back to what made ``before``.

    >>> import torch
    >>> own_functions([torch.ones(2, requires_grad=True).exp()])
    []
    """
    names: dict[str, None] = {}
    nodes: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    known = {*nodes, None if before is None else before.grad_fn}
    while nodes:
        node = nodes.pop()
        forward = getattr(type(node), "_forward_cls", None)
        if forward is not None and not forward.__module__.startswith(("torch.", "normscope.")):
            names[f"{forward.__module__}.{forward.__qualname__}"] = None
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                nodes.append(following)
    return list(names)
