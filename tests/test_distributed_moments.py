"""Moments merged by counts: over any cut into batches, and over four gloo processes with ragged shards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normscope.distributed import Moments, Ranks, merged
from normscope.transforms import recalibrate
from normscope.transforms.chosen import chosen
from normscope.transforms.loader import Loader
from normscope.transforms.passes import exact
from rank_of_a_recalibration import SHARDS, masks, net, recalibrated, shard

PROGRAM = Path(__file__).with_name("rank_of_a_recalibration.py")


# -- laws --------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=6),
    st.sampled_from([0.0, 1e3, -1e6]),
    st.integers(0, 2**31),
)
def test_any_cut_gives_the_whole(sizes: list[int], offset: float, seed: int) -> None:
    x = offset + torch.randn(
        sum(sizes), 3, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    found = merged(Moments.of(part, (0, 2)) for part in x.split(sizes))
    assert found.count == 2 * len(x)
    if not len(x):
        return
    whole = x.transpose(0, 1).flatten(1)
    # at most 42 x 2 numbers, each rounded at the size of the offset; deviations of about 1
    unit = 84 * 2.0**-52 * (1 + abs(offset))
    torch.testing.assert_close(found.mean, whole.mean(1), rtol=0, atol=unit)
    torch.testing.assert_close(
        found.m2, whole.var(1, correction=0) * whole.shape[1], rtol=1e-12, atol=84 * unit
    )


def test_nothing_changes_nothing() -> None:
    some = Moments.of(torch.tensor([[1.0, 2.0], [3.0, 5.0]]), (0,))
    none = Moments.none([2])
    assert none.merge(some) is some
    assert some.merge(none) is some
    assert none.merge(Moments.of(torch.empty(0, 2), (0,))).count == 0
    with pytest.raises(ValueError, match="nothing to merge: at least one Moments is needed"):
        merged([])


def test_a_large_mean_costs_no_digits() -> None:
    x = 1e8 + torch.tensor([[0.0], [1.0], [2.0], [3.0]], dtype=torch.float64)
    found = merged(Moments.of(part, (0,)) for part in x.split([1, 2, 1]))
    assert found.m2.item() == 5.0
    assert found.mean.item() == 1e8 + 1.5


def test_one_process_is_one_rank() -> None:
    ranks = Ranks.present()
    assert (ranks.world, ranks.rank, ranks.gathered("x")) == (1, 0, ["x"])
    with pytest.raises(KeyError):
        ranks.agree(KeyError("x"))


# -- four processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), "4", str(folder)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(4)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * 4, "\n".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]


distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"
)


@distributed
@pytest.mark.parametrize("method", ["exact", "layerwise"])
def test_every_rank_has_the_same_bits(ranks: list[dict[str, Any]], method: str) -> None:
    first = ranks[0][method]
    assert first["1.num_batches_tracked"] == 5
    for rank in ranks[1:]:
        assert rank[method].keys() == first.keys()
        for name, value in first.items():
            same = (
                torch.equal(rank[method][name], value)
                if torch.is_tensor(value)
                else rank[method][name] == value
            )
            assert same, name


@distributed
@pytest.mark.parametrize("method", ["exact", "layerwise"])
def test_four_processes_are_one(ranks: list[dict[str, Any]], method: str) -> None:
    torch.set_num_threads(1)
    whole = recalibrated([batch for rank in range(4) for batch in shard(rank)], method)
    assert (ranks[0][method]["samples"], ranks[0][method]["data"]) == (19, whole["data"])
    for name, value in whole.items():
        if torch.is_tensor(value) and value.is_floating_point():
            # the merges come in another order: some ten roundings of float64 of numbers near 100
            torch.testing.assert_close(ranks[0][method][name], value, rtol=1e-12, atol=1e-12)


@distributed
def test_masks_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """Counts by channel on some ranks, one number on another, nothing on a third."""
    batches = [batch for rank in range(4) for batch in shard(rank)]
    valid = [mask[:, 2:] for rank in range(4) for mask in masks(rank)]
    whole = recalibrated(batches, "exact", valid, "1")
    inputs = torch.cat([net()[0](x).transpose(1, 2)[mask] for x, mask in zip(batches, valid, strict=True)])
    for rank in ranks:
        found = rank["masked"]
        assert all(torch.equal(found[k], v) for k, v in ranks[0]["masked"].items() if torch.is_tensor(v))
        for name in ("1.running_mean", "1.running_var"):
            torch.testing.assert_close(found[name], whole[name], rtol=1e-12, atol=1e-12)  # as above
        torch.testing.assert_close(found["1.running_mean"], inputs.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["1.running_var"], inputs.var(0), rtol=1e-11, atol=0)


@distributed
def test_the_order_of_ranks_is_the_order_of_merging(ranks: list[dict[str, Any]]) -> None:
    """One process that goes over the shards in the order of ranks, and merges them in float64: the same bits."""
    torch.set_num_threads(1)
    model = net()
    site = chosen(model, "1")[0]
    parts = []
    for rank in range(4):
        own: list[Moments] = []
        for batch in shard(rank):
            own.append(Moments.of(model[0](batch), (0, 2)))
        parts.append(merged(own) if own else Moments.none([6]))
    found = merged(parts)
    for method in ("exact", "layerwise"):
        assert torch.equal(ranks[3][method]["1.running_mean"], found.mean)
        assert torch.equal(ranks[3][method]["1.running_var"], found.variance(1))
    alone = exact(model, [site], Loader(shard(0) + shard(1) + shard(3), model), Ranks())
    assert torch.allclose(alone.estimates["1"].mean, found.mean, rtol=1e-13)


@distributed
def test_a_rank_that_fails_stops_all(ranks: list[dict[str, Any]]) -> None:
    nan = "inputs holds 54 NaN of 54 values; statistics of NaN say nothing: clean the data"
    for number, rank in enumerate(ranks):
        if number == 1:
            assert rank["poison"] == f"BadInput: {nan}"
        else:
            assert rank["poison"] == f"ModelError: rank 1 failed, so all ranks stop: BadInput: {nan}"
        assert rank["ema"] == (
            "Refused: an exponential average depends on the order of batches, which 4 ranks do not have. Use "
            'method="exact" or "layerwise"; or distributed=False on one rank'
        )
        assert rank["empty"] == "BadInput: data held no batch; statistics of nothing would be NaN"
        assert rank["untouched"]
        assert rank["alone"]


def test_shards_are_ragged() -> None:
    assert sorted(len(shard) for shard in SHARDS) == [0, 1, 2, 2]
    _, report = recalibrate(net(), shard(0))
    assert report.provenance["ranks"] == 1
