"""Batch norm over four gloo processes that hold 3, 5, 0 and 1 samples: as one process on all nine.

One launch runs every case (rank_of_synchronized.py); taking gloo down inside the test process can wait for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_of_synchronized import (
    CHANNELS,
    SECONDS,
    SHAPES,
    SIZES,
    SPIKING,
    WORLD,
    batches,
    layer,
    net,
    spiking,
    step,
    train,
    whole,
)
from torch import Tensor, nn

import normscope as ns
from normscope import reference
from normscope.distributed import of_all
from normscope.errors import BadInput
from normscope.spec import RunningState

PROGRAM = Path(__file__).with_name("rank_of_synchronized.py")
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"
)
CASES = [
    (f"{name} {dtype}{' masked' * masked}", name, dtype, masked)
    for dtype in (torch.float64, torch.float32)
    for name in SHAPES
    for masked in (False, True)
    if not (masked and name == "vectors")
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}")
    run = subprocess.run(
        [*torchrun, str(PROGRAM), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return [
        torch.load(folder / f"{rank}.pt", weights_only=True)
        | torch.load(folder / f"late{rank}.pt", weights_only=True)
        for rank in range(WORLD)
    ]


def expected(x: Tensor, grad: Tensor, mask: Tensor | None, norm: nn.Module) -> dict[str, np.ndarray]:
    """By the formulas in float64 NumPy, of one process."""
    held = {name: t.detach().double().numpy() for name, t in norm.state_dict().items()}
    running = RunningState(held["running_mean"].copy(), held["running_var"].copy())
    keep = None if mask is None else np.broadcast_to(mask.numpy(), x.shape)
    x, grad = (t.detach().double().numpy() for t in (x, grad))
    spec, weight, bias = norm.spec, held["weight"], held["bias"]
    dx, dweight, dbias = reference.vjp(grad, x, spec, weight, bias, mask=keep)
    moved = reference.update_running(running, x, spec, mask=keep)
    y = reference.forward(x, spec, weight, bias, mask=keep)
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias, "mean": moved.mean, "var": moved.var}


def held_to(found: list[dict[str, Tensor]], right: dict[str, np.ndarray], bound: float) -> None:
    """``bound`` in units of the largest value of each kind."""
    together = {name: torch.cat([rank[name] for rank in found]) for name in ("y", "dx")}
    together |= {name: sum(rank[name].double() for rank in found) for name in ("dweight", "dbias")}
    together |= {"mean": found[0]["running_mean"], "var": found[0]["running_var"]}
    for name, value in together.items():
        wanted = torch.from_numpy(np.asarray(right[name]))
        assert (value.double() - wanted).abs().max() <= bound * wanted.abs().max(), name
    for rank in found[1:]:  # the same bits everywhere
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(rank[name], found[0][name])


@pytest.mark.parametrize(("key", "name", "dtype", "masked"), CASES, ids=[case[0] for case in CASES])
def test_four_ranks_are_one_process(
    ranks: list[dict[str, Any]], key: str, name: str, dtype: torch.dtype, masked: bool
) -> None:
    x, grad, mask = whole(name, dtype)
    right = expected(x, grad, mask if masked else None, layer(dtype))
    # sums of at most 108 terms, in another order
    held_to([rank[key] for rank in ranks], right, 1e-12 if dtype == torch.float64 else 1e-6)
    assert all(rank[key]["num_batches_tracked"] == 1 for rank in ranks)
    if masked:
        gone = ~mask.expand(x.shape)
        for kind in ("y", "dx"):
            assert not torch.cat([rank[key][kind] for rank in ranks])[gone].any()


def test_memory_format_stays(ranks: list[dict[str, Any]]) -> None:
    y = ranks[1][f"image {torch.float32}"]["y"]
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert not y.is_contiguous()


def test_groups_of_two(ranks: list[dict[str, Any]]) -> None:
    x, grad, _ = whole("positions", torch.float64)
    for pair, part in ((ranks[:2], slice(0, 8)), (ranks[2:], slice(8, 9))):
        right = expected(x[part], grad[part], None, layer(torch.float64))
        held_to([rank["pair"] for rank in pair], right, 1e-12)


@pytest.mark.parametrize("kind", SPIKING)
def test_a_specification_that_has_no_layer(ranks: list[dict[str, Any]], kind: str) -> None:
    wanted, close = spiking(kind, None), {"rtol": 1e-12, "atol": 1e-12}  # 63 or 126 terms in another order
    for name in ("y", "dx"):
        torch.testing.assert_close(torch.cat([rank[kind][name] for rank in ranks], 1), wanted[name], **close)
    torch.testing.assert_close(sum(rank[kind]["dw"] for rank in ranks), wanted["dw"], **close)
    for name in ("mean", "var"):
        torch.testing.assert_close(ranks[3][kind][name], wanted[name], **close)


def test_cumulative_average_counts_batches(ranks: list[dict[str, Any]]) -> None:
    x = whole("positions", torch.float64)[0]
    norm = ns.nn.BatchNorm1d(CHANNELS, 1e-3, None, dtype=torch.float64)
    norm.load_state_dict(layer(torch.float64).state_dict())
    norm(x)
    norm(2 * x)
    for rank in ranks:
        torch.testing.assert_close(
            rank["cumulative"]["running_var"], norm.running_var, rtol=1e-12, atol=1e-12
        )
        assert rank["cumulative"]["num_batches_tracked"] == 2


def test_half_types_keep_float32_statistics(ranks: list[dict[str, Any]]) -> None:
    x = whole("positions", torch.float64)[0].bfloat16()
    norm = ns.nn.BatchNorm1d(CHANNELS, 1e-3, 0.3).bfloat16()
    norm.load_state_dict(layer(torch.bfloat16).state_dict())
    y = norm(x)
    found = torch.cat([rank["half"]["y"] for rank in ranks])
    # one rounding to 8 bits of values below 8, of float32 numbers that differ in their last bits
    torch.testing.assert_close(found, y, rtol=2.0**-7, atol=2.0**-7)
    torch.testing.assert_close(ranks[0]["half"]["var"], norm.running_var, rtol=1e-6, atol=0)


def test_a_batch_in_which_nothing_counts_moves_nothing(ranks: list[dict[str, Any]]) -> None:
    fresh = layer(torch.float64)
    for rank in ranks:
        found = rank["nothing"]
        assert torch.equal(found["y"], fresh.bias.detach().view(1, -1, 1).expand(found["y"].shape))
        for name, buffer in fresh.named_buffers():
            assert torch.equal(found[name], buffer)
        assert not found["dx"].any()


def test_a_constant_gives_exactly_the_bias(ranks: list[dict[str, Any]]) -> None:
    bias = layer(torch.float32).bias.detach().view(1, -1, 1)
    assert all(torch.equal(rank["constant"], bias.expand(rank["constant"].shape)) for rank in ranks)


def test_evaluation_is_each_ranks_own(ranks: list[dict[str, Any]]) -> None:
    norm = ns.nn.BatchNorm1d(CHANNELS, 1e-3, 0.3, dtype=torch.float64).eval()
    norm.load_state_dict(layer(torch.float64).state_dict())
    found = torch.cat([rank["evaluation"] for rank in ranks])
    assert torch.equal(found, norm(whole("positions", torch.float64)[0]).detach())


def test_ten_steps_of_distributed_data_parallel(ranks: list[dict[str, Any]]) -> None:
    wanted = train(net(ns.nn.BatchNorm1d(CHANNELS)), batches(), 1 / sum(SIZES))
    for name, value in wanted.items():
        for rank in ranks:
            # ten steps, each of sums of some hundred terms in another order
            torch.testing.assert_close(rank["trained"][name], value, rtol=1e-10, atol=1e-12)
    assert wanted["1.num_batches_tracked"] == 10


def test_accumulation_merges_micro_batches_and_ranks(ranks: list[dict[str, Any]]) -> None:
    norm = ns.nn.BatchNorm1d(CHANNELS, 1e-3, 0.3, dtype=torch.float64)
    norm.load_state_dict(layer(torch.float64).state_dict())
    norm(torch.cat(batches()[:2]).repeat(1, 3, 1))
    for rank in ranks:
        for name, wanted in norm.named_buffers():
            torch.testing.assert_close(rank["accumulated"][name], wanted, rtol=1e-12, atol=1e-12)


def test_one_rank_checks_its_model_without_the_others(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["checked"]


# Errors ---------------------------------------------------------------------------------------------------------------


def test_second_derivatives_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["twice"] == (
            "BadInput: a norm over several ranks has first derivatives only; got a backward pass with "
            "create_graph=True. Normalize without a group there, or by stored statistics (eval())."
        )


def test_one_value_a_channel_on_all_ranks_is_refused_on_all(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert rank["lone"] == (
            f"BadInput: a stored variance divides by M - 1; got 'b c ... -> c' in an input of shape "
            f"({int(number == 1)}, 6) with M = 1 in all ranks together. Take larger batches."
        )


def test_a_group_of_others_is_refused(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks[:2]):
        assert rank["outside"] == (
            "BadInput: a rank takes part in the statistics of its own process group; rank "
            f"{number} is not in the one that it was given. Give each rank the group that it is in."
        )


def test_a_rank_that_does_not_come_or_has_gone_is_an_error(ranks: list[dict[str, Any]]) -> None:
    end = "Look for the first error on another rank; all must run the same norms, forward and backward, as often."
    late = ranks[0]["late"]
    assert late.startswith(
        "ModelError: rank 0 normalizes together with 2 ranks, and one has gone or did not come in time: RuntimeError: "
    )
    assert f"Timed out waiting {SECONDS}000ms" in late
    assert late.endswith(end)
    for number, rank in enumerate(ranks[:3]):
        assert rank["gone"].startswith(
            f"ModelError: rank {number} normalizes together with 4 ranks, and one has gone or did not come in time: "
        )
        assert rank["gone"].endswith(end)


@pytest.mark.parametrize(
    ("spec", "weight"),
    [
        (ns.families.layer_norm(), None),
        (ns.families.ghost_batch_norm(size=2), None),
        (ns.families.batch_renorm(), None),
        (ns.families.batch_norm(eps=1e-5).replace(correction=1), None),
        (ns.families.batch_norm(), torch.ones(3)),
    ],
    ids=["layer", "ghost", "renorm", "unbiased", "weight"],
)
def test_what_has_no_form_over_ranks_says_so(
    spec: ns.NormSpec, weight: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normscope.functional.general.world_of", lambda group: 2)
    with pytest.raises(BadInput) as caught:
        ns.normalize(torch.zeros(4, 6), spec, weight, group=object())
    if weight is None:
        assert str(caught.value) == (
            "normalize(group=) merges means and variances of norms whose sets run over the samples 'b', centered, with "
            "the biased variance and eps under the root, without virtual batches and renormalization; got "
            f"{spec}. Leave group out."
        )
    else:
        assert str(caught.value) == (
            "normalize(group=) takes a weight on 'c', of shape (6,), by its specification; got one of shape (3,). Name "
            "its axes in spec.weight."
        )


# In one process -------------------------------------------------------------------------------------------------------


def test_without_a_process_group_it_is_batch_norm() -> None:
    x, _, mask = whole("positions", torch.float32)
    ours, plain = layer(torch.float32), ns.nn.BatchNorm1d(CHANNELS, 1e-3, 0.3)
    plain.load_state_dict(ours.state_dict())
    for given in ({}, {"mask": mask}, {"lengths": [7, 3, 1, 7, 7, 2, 5, 6, 7]}):
        assert torch.equal(ours(x, **given), plain(x, **given))
    assert torch.equal(ours.running_var, plain.running_var)
    assert torch.equal(ours.eval()(x), plain.eval()(x))
    with pytest.raises(BadInput) as caught:
        ours(torch.zeros(2, 5))
    assert str(caught.value) == (
        "SyncBatchNorm takes an input of 2 axes or more, samples first and 6 channels second; got an input of shape "
        "(2, 5). Move the channels there (x.movedim), or make the layer for their number."
    )


def test_compiled_around_the_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks alike, in one process."""
    for module in ("nn.sync_batch_norm", "functional.general"):
        monkeypatch.setattr(f"normscope.{module}.world_of", lambda group: 2)
    monkeypatch.setattr(
        "normscope.functional.synchronized.pooled", lambda own, group: of_all(torch.stack([own, own]))
    )
    monkeypatch.setattr("normscope.nn.agreement.of_each", lambda own, group: torch.stack([own, own]))
    monkeypatch.setattr("normscope.functional.synchronized.summed", lambda values, group: 2 * values)
    x, grad, _ = whole("positions", torch.float64)
    model, eager = (nn.Sequential(layer(torch.float64, process_group="two"), nn.ReLU()) for _ in range(2))
    torch._dynamo.reset()
    found = step(torch.compile(model, backend="eager"), x.clone(), grad)
    torch._dynamo.reset()  # what was compiled decides which sizes are left open later
    wanted = step(eager, x.clone(), grad)
    for name, value in wanted.items():
        assert torch.equal(found[name.replace("0.", "_orig_mod.0.")], value)


def test_conversion_keeps_objects_and_leaves_what_computes_otherwise() -> None:
    shared = ns.nn.BatchNorm2d(3, momentum=None, running_correction=0)
    model = nn.Sequential(
        nn.BatchNorm1d(4, bias=False), shared, shared, ns.nn.GhostBatchNorm2d(3, size=2)
    ).eval()
    before = list(model)
    new = ns.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert new is model
    assert [type(child).__name__ for child in new] == ["SyncBatchNorm"] * 3 + ["GhostBatchNorm2d"]
    assert new[1] is new[2]
    assert new[0].weight is before[0].weight
    assert new[0].bias is None
    assert new[0].running_var is before[0].running_var
    assert (new[1].momentum, new[1].running_correction, new[1].training) == (None, 0, False)
    torchs = nn.SyncBatchNorm(5)
    ours = ns.nn.SyncBatchNorm.convert_sync_batchnorm(torchs)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    torchs.load_state_dict(ours.state_dict())


def test_convert_goes_both_ways_and_keeps_the_group() -> None:
    sample = torch.zeros(2, 4, 3, 3)
    ours = nn.Sequential(ns.nn.BatchNorm2d(4))
    synced, _ = ns.transforms.convert(ours, "sync")
    assert type(synced[0]) is ns.nn.SyncBatchNorm
    back, _ = ns.transforms.convert(synced, "batch", sample=sample)
    assert type(back[0]) is ns.nn.BatchNorm2d
    torchs = nn.Sequential(nn.SyncBatchNorm(4, process_group="a group"))
    own, report = ns.transforms.convert(torchs, "ours")
    assert not report.function_changes
    assert (type(own[0]), own[0].process_group) == (ns.nn.SyncBatchNorm, "a group")
    again, _ = ns.transforms.convert(own, "torch")
    assert (type(again[0]), again[0].process_group) == (nn.SyncBatchNorm, "a group")
