"""Batch whitening over three gloo processes that hold 3, 5 and 0 samples: as one process on all eight."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_of_whitened import LAYERS, SIZES, step, whole

PROGRAM = Path(__file__).with_name("rank_of_whitened.py")
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(len(SIZES))
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(SIZES), "\n".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(len(SIZES))]


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("name", LAYERS)
def test_ranks_are_one_process_on_the_whole_batch(ranks, name, masked):
    """Float64: sums in another order, times conditions of W of about 10."""
    x, grad, mask = whole()
    wanted = step(LAYERS[name]().double(), x, grad, mask if masked else None)
    found = [rank[f"{name} {'masked' if masked else 'whole'}"] for rank in ranks]
    for key, value in wanted.items():
        if key in ("y", "dx"):
            got = torch.cat([one[key] for one in found])
        elif key.startswith("d"):
            got = sum(one[key] for one in found)
        else:
            got = found[0][key]
            assert all(torch.equal(one[key], got) for one in found)
        torch.testing.assert_close(got, value, rtol=1e-11, atol=1e-11)


def test_too_little_on_all_ranks_is_said_on_all(ranks):
    assert {rank["error"] for rank in ranks} == {
        "whitening over ranks takes more values a channel than one; all ranks together have 1. Use larger batches, "
        "smaller groups or an eps, or eval()."
    }
