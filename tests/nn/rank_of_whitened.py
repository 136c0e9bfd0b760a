"""One rank of whitening over ranks: RANK FOLDER, of three. Writes what the rank found."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

import normscope.nn as own

SIZES = (3, 5, 0)
LAYERS = {
    "zca": lambda **k: own.BatchWhitening(6, 3, 1e-3, **k),
    "cholesky": lambda **k: own.BatchWhitening(6, 3, 1e-3, None, method="cholesky", eps_at="trace", **k),
    "iternorm": lambda **k: own.IterNorm(6, 2, **k),
}


def whole() -> tuple[Tensor, Tensor, Tensor]:
    """Input, gradient of the output, and mask of all ranks; channels that go together, of other means."""
    generator = torch.Generator().manual_seed(4)
    x, grad = (torch.randn(sum(SIZES), 6, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(sum(SIZES), 1, 5, generator=generator) < 0.7
    return x.cumsum(1) + 100 * torch.arange(6).view(-1, 1), grad, mask


def step(norm: nn.Module, x: Tensor, grad: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Two batches: of the second what came out and the gradients, and what is stored then."""
    norm(x / 2, mask=mask)
    x = x.clone().requires_grad_()
    y = norm(x, mask=mask)
    y.backward(grad)
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad, **{f"d{n}": p.grad.clone() for n, p in norm.named_parameters()}}
    return found | {name: buffer.clone() for name, buffer in norm.named_buffers()}


def main(rank: int, folder: Path) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=len(SIZES), timeout=timedelta(seconds=60)
    )
    x, grad, mask = (t.split(SIZES)[rank] for t in whole())
    found: dict[str, Any] = {}
    for name, make in LAYERS.items():
        for given in (None, mask):
            norm = make(group=dist.group.WORLD).double()
            found[f"{name} {'whole' if given is None else 'masked'}"] = step(norm, x, grad, given)
    try:
        own.BatchWhitening(6, 3, group=dist.group.WORLD).double()(x[:, :, :1], mask=mask[:, :, :1] & False)
        own.BatchWhitening(6, 3, group=dist.group.WORLD).double()(x[: int(rank == 0), :, :1])
    except ValueError as error:
        found["error"] = str(error)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
