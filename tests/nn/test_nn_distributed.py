"""Our layers under DistributedDataParallel on gloo: gradients as in one process on the whole batch.

In processes of their own: taking gloo down inside the test process can wait for ever.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from normscope import nn

RANK = """
import os, sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import normscope as ns

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.manual_seed(0)
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), ns.nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16),
    ns.nn.LayerNorm(16), nn.Linear(16, 16), ns.nn.RMSNorm(16),
)
x, target = torch.randn(8, 3, 8, 8), torch.randn(8, 16)
alone = [p.clone() for p in torch.autograd.grad((model(x) - target).square().mean(), list(model.parameters()))]
spread = DistributedDataParallel(model)
mine = slice(4 * rank, 4 * rank + 4)
(spread(x[mine]) - target[mine]).square().mean().backward()
worst = max(
    float((p.grad - g).abs().max() / g.abs().max()) for p, g in zip(model.parameters(), alone)
)
batch = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), ns.nn.BatchNorm1d(4)))
batch(torch.randn(5, 6)).square().sum().backward()
batch(torch.randn(5, 6)).square().sum().backward()
print(worst, int(batch.module[1].num_batches_tracked), file=open(f"{out}.{rank}", "w"))
torch.distributed.barrier()
os._exit(0)
"""


def test_gradients_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store"), str(tmp_path / "out")]
        )
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    for rank in range(2):
        worst, batches = (tmp_path / f"out.{rank}").read_text().split()
        assert float(worst) < 64 * 2.0**-23  # sums of a few hundred terms, in another order
        assert batches == "2"


UNLIKE = """
import os, sys
import torch
import normscope as ns
from normscope.errors import ModelError

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
whole = torch.distributed.group.WORLD
channels = 4 + 2 * rank
said = []
for norm in (ns.nn.SyncBatchNorm(channels), ns.nn.BatchWhitening(channels, 2, group=whole)):
    try:
        norm(torch.randn(5, channels))
    except ModelError as error:
        said.append(str(error))
alike = ns.nn.SyncBatchNorm(4)
alike(torch.randn(5 + rank, 4)).sum().backward()
print(*said, int(alike.num_batches_tracked), sep="\\n", file=open(f"{out}.{rank}", "w"))
torch.distributed.barrier()
os._exit(0)
"""


def test_ranks_with_other_channels_are_told_on_each(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", UNLIKE, str(rank), str(tmp_path / "store"), str(tmp_path / "out")]
        )
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    for rank, channels in enumerate((4, 6)):
        synchronized, whitened, batches = (tmp_path / f"out.{rank}").read_text().splitlines()
        assert synchronized == (
            "SyncBatchNorm normalizes over ranks that have the same number of channels; got rank 0 4, rank 1 6; here "
            f"it is {nn.SyncBatchNorm(channels)!r}. Build the same model on every rank, and call its norms in the same "
            "order."
        )
        assert whitened.startswith(
            "BatchWhitening normalizes over ranks that have the same number of channels; got"
        )
        assert "rank 0 4 in groups of 2, rank 1 6 in groups of 2" in whitened
        assert batches == "1"
