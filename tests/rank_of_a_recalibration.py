"""One rank of a recalibration: RANK WORLD FOLDER. Each scenario's statistics are written as bits."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normscope.transforms import recalibrate

SHARDS = ((5, 3), (4,), (), (6, 1))
"""batch sizes of each rank: ragged, and one rank without data"""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5),
        nn.Conv1d(6, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True), nn.BatchNorm1d(4),
    ).double()  # fmt: skip


def shard(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        100 + rank + torch.randn((size, 3, 9), generator=generator, dtype=torch.float64)
        for size in SHARDS[rank]
    ]


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())


def masks(rank: int) -> list[Tensor]:
    """Everything on rank 0, whose counts are alike; ragged ones on the others."""
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.arange(9) < (torch.randint(3, 9, (size, 1), generator=generator) if rank else 9)).expand(
            size, 9
        )
        for size in SHARDS[rank]
    ]


def recalibrated(data: Any, method: str, mask: Any = None, select: Any = None) -> dict[str, Any]:
    model, report = recalibrate(net(), data, method=method, mask=mask, select=select)
    return {**buffers(model), "samples": report.provenance["samples"], "data": report.provenance["data"]}


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    found: dict[str, Any] = {method: recalibrated(shard(rank), method) for method in ("exact", "layerwise")}
    # of the first norm, whose input is two shorter than the data
    found["masked"] = recalibrated(shard(rank), "exact", [mask[:, 2:] for mask in masks(rank)], "1")
    model = net()
    poison = [torch.full((2, 3, 9), float("nan"), dtype=torch.float64)] if rank == 1 else shard(rank)
    for name, data, method in (
        ("poison", poison, "exact"),
        ("ema", shard(rank), "ema"),
        ("empty", [], "exact"),
    ):
        try:
            recalibrate(model, data, method=method, inplace=True)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["untouched"] = all(torch.equal(a, b) for a, b in zip(model.buffers(), net().buffers(), strict=True))
    found["alone"] = rank != 0 or bool(recalibrate(model, shard(0), distributed=False)[1].done)
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's own clean-up may wait for ever for a rank that has gone


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
