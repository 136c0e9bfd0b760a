"""One rank of data-parallel trainings: RANK WORLD FOLDER SCENARIO ... Writes what its monitors found."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import normscope
from normscope import Monitor

NORMS = {
    "synchronized": normscope.nn.SyncBatchNorm,
    "renormalized": normscope.nn.BatchRenorm2d,
    "virtual": lambda channels: normscope.nn.GhostBatchNorm2d(channels, size=2),
}
FEW = ("few", "synchronized", "renormalized", "virtual")


def main(rank: int, world: int, folder: Path, scenarios: list[str]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    for scenario in scenarios:
        train(rank, scenario, folder)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's own clean-up may wait for ever for a rank that has gone


def train(rank: int, scenario: str, folder: Path) -> None:
    torch.manual_seed(0)
    norm = NORMS.get(scenario, nn.BatchNorm2d)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), norm(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 2))
    ddp = DistributedDataParallel(model, broadcast_buffers=scenario != "apart")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    samples, shift = (2, 0.0) if scenario in FEW else (16, 2.0 * rank)
    alone = scenario == "alone" and rank > 0
    monitor = None if alone else Monitor(ddp, optimizer, every=4).start()
    for _ in range(12):
        optimizer.zero_grad()
        for part in range(2 if scenario in ("accumulation", "reduced") else 1):
            x = torch.randn(samples, 2, 6, 6) + shift
            if scenario == "accumulation" and part == 0:
                with ddp.no_sync():
                    ddp(x).square().mean().backward()
            else:
                ddp(x).square().mean().backward()
        optimizer.step()
    torch.distributed.barrier()
    found = {"findings": [], "not_run": {}, "notes": []}
    if monitor is not None:
        monitor.stop()
        report = monitor.report()
        found["findings"] = [f.to_dict() for f in report.findings]
        found["not_run"] = {entry.code: entry.reason for entry in report.not_run}
        found["notes"] = list(report.notes)
    (folder / f"{scenario}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
