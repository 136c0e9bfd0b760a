"""What a forward keeps for its backward, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(forward: Callable[[], object], alive: Iterable[Tensor] = ()) -> int:
    """Bytes of all tensors that autograd saves in ``forward``, each storage once and whole.

    What is in ``alive`` (parameters, running statistics) is there with or without a backward and is not counted.

    >>> x, w = torch.ones(100, requires_grad=True), torch.ones(100, requires_grad=True)
    >>> saved_bytes(lambda: (x * w).exp(), alive=[w])  # x for the product, and the result of exp
    800
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in alive}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output kept as it is would hold the graph that holds it

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        graph = forward()  # while it lives, so does every saved storage: no address occurs twice
    del graph
    return sum(found.values())
