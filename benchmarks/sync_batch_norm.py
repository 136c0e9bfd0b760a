"""What synchronization costs: a step of SyncBatchNorm against batch norm of each rank and the collectives alone.

    python benchmarks/sync_batch_norm.py [--seconds 10] [--ranks 2] [--json FILE]

Forward and backward of one norm in every process, on one thread each, over gloo. In turn: `normscope.nn.BatchNorm2d`,
the two collectives of a synchronized norm without the norm, `normscope.nn.SyncBatchNorm`. Times are medians of the
first rank, of the processor: other programs disturb those least, and waiting for a rank is no cost of arithmetic. The
ratio is sync / (plain + collectives); 1.3 is aimed at.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

import normscope as ns
from normscope.bench.timing import rotated
from normscope.distributed import pooled, summed

SHAPES = ((8, 64, 7, 7), (8, 64, 28, 28), (8, 64, 56, 56), (32, 64, 56, 56))
FEWEST = 5
"""rounds at least"""


def measure(shape: tuple[int, ...], seconds: float) -> dict[str, float]:
    torch.manual_seed(dist.get_rank())
    x, grad = torch.randn(shape).requires_grad_(), torch.randn(shape)
    channels, group = shape[1], dist.group.WORLD

    def step(norm: nn.Module) -> Callable[[], object]:
        return lambda: norm(x).backward(grad)

    def collectives() -> None:
        pooled(torch.ones(3, channels, dtype=torch.float64), group)
        summed(torch.ones(2, channels, dtype=torch.float64), group)

    contenders: dict[str, Callable[[], object]] = {
        "plain": step(ns.nn.BatchNorm2d(channels)),
        "collectives": collectives,
        "sync": step(ns.nn.SyncBatchNorm(channels)),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for rounds in range(rounds_within(contenders, seconds)):
        for name in rotated(list(contenders), rounds):
            contenders[name]()  # no contender finds the caches of another
            dist.barrier()
            begin = time.process_time()
            contenders[name]()
            times[name].append(time.process_time() - begin)
    found = {name: statistics.median(values) for name, values in times.items()}
    return found | {"ratio": found["sync"] / (found["plain"] + found["collectives"])}


def rounds_within(contenders: dict[str, Callable[[], object]], seconds: float) -> int:
    """As many on every rank, by the slowest."""
    begin = time.perf_counter()
    for call in contenders.values():
        call()
    spent = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return max(FEWEST, int(seconds / len(SHAPES) / (2 * float(spent))))


def run(rank: int, ranks: int, folder: Path, seconds: float) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = {"x".join(map(str, shape)): measure(shape, seconds) for shape in SHAPES}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # gloo's own clean-up may wait for ever for a rank that has gone


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run(int(options.rank[0]), options.ranks, Path(options.rank[1]), options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--seconds", str(options.seconds), "--ranks", str(options.ranks)]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank), folder], env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            for rank in range(options.ranks)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("a rank failed")
        found = json.loads((Path(folder) / "found.json").read_text())
    print(f"{torch.__version__}, {options.ranks} ranks, float32, forward and backward")
    print(
        f"{'':<16}" + "".join(f"{name:>17}" for name in ("plain, ms", "collectives, ms", "sync, ms", "ratio"))
    )
    for shape, row in found.items():
        ms = "".join(f"{1e3 * row[name]:>17.2f}" for name in ("plain", "collectives", "sync"))
        print(f"{shape:<16}{ms}{row['ratio']:>17.2f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
