"""Data-parallel training with gloo: two processes that really train, and their monitors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from normscope import Monitor
from normscope.doctor.judging import judge
from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import all_rules
from normscope.doctor.session import Session
from normscope.doctor.sites import find_sites
from normscope.doctor.subject import Subject
from normscope.doctor.training_record import RankGap, SiteTraining, TrainingRecord
from normscope.monitor.ranks import CHANNELS, Ranks, summary

PROGRAM = Path(__file__).with_name("rank_of_a_training.py")
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"
)


SCENARIOS = (
    *("together", "apart", "few", "accumulation", "reduced"),
    *("synchronized", "renormalized", "virtual", "alone"),
)
"""reduced: accumulation that reduces over the ranks each time; the last has a monitor on rank 0 only"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Scenario -> what the monitor of each rank reported."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), "2", str(folder), *SCENARIOS],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
    found = {
        scenario: [json.loads((folder / f"{scenario}-{rank}.json").read_text()) for rank in range(2)]
        for scenario in SCENARIOS
    }
    assert not [n for ranks in found.values() for one in ranks for n in one["notes"] if "could not" in n]
    return found


def of(code: str, report: dict) -> list[dict]:
    return [finding for finding in report["findings"] if finding["code"] == code]


class TestProcesses:
    def test_broadcast_buffers_agree(self, trained: dict[str, list[dict]]) -> None:
        """Data that differs between ranks, as in `apart`; rank 0's statistics are taken by all before each pass."""
        for report in trained["together"]:
            assert of("NS312", report) == []
            assert "NS312" not in report["not_run"], "they were compared"
            assert of("NS206", report) == [], "16 samples of 16 places"
            assert of("NS310", report) == []

    def test_buffers_of_their_own_drift_apart(self, trained: dict[str, list[dict]]) -> None:
        for rank, report in enumerate(trained["apart"]):
            (finding,) = of("NS312", report)
            assert (finding["site"], finding["severity"]) == ("1", "warning")
            assert (finding["evidence"]["rank"], finding["evidence"]["compared_with"]) == (rank, 1 - rank)
            assert finding["evidence"]["shift_in_standard_deviations"] > 0.25

    def test_few_samples_a_rank(self, trained: dict[str, list[dict]]) -> None:
        for report in trained["few"]:
            (finding,) = of("NS206", report)
            assert finding["message"].startswith(
                "each of 2 ranks normalizes by its own 2 samples though all together hold 4"
            )

    def test_accumulation_without_synchronization_of_gradients(self, trained: dict[str, list[dict]]) -> None:
        for report in trained["accumulation"]:
            (finding,) = of("NS310", report)
            assert finding["evidence"]["diagnosis"] == "accumulation"
            assert finding["evidence"]["forward_passes_per_step"] == 2

    def test_accumulation_where_each_pass_is_reduced_over_the_ranks(
        self, trained: dict[str, list[dict]]
    ) -> None:
        """DistributedDataParallel writes the mean over the ranks into the gradient that the next pass adds to."""
        for report in trained["reduced"]:
            (finding,) = of("NS310", report)
            assert finding["evidence"]["diagnosis"] == "accumulation"
            assert finding["evidence"]["backward_passes_that_add_up"] == 2

    def test_statistics_of_all_ranks_are_not_judged_by_those_of_one(
        self, trained: dict[str, list[dict]]
    ) -> None:
        for report in trained["synchronized"]:
            assert not [f for f in report["findings"] if f["severity"] != "info"]
            assert of("NS206", report) == of("NS405", report) == []
            assert (
                "1: normalized by the samples of all ranks, of which this one sees its own alone, it is not measured"
                in report["notes"]
            )

    @pytest.mark.parametrize("scenario", ["renormalized", "virtual"])
    def test_norms_made_for_small_batches_are_not_called_unsynchronized(
        self, scenario: str, trained: dict[str, list[dict]]
    ) -> None:
        for report in trained[scenario]:
            assert "NS206" not in report["not_run"]
            assert of("NS206", report) == []

    def test_a_rank_without_a_monitor_hangs_nothing(self, trained: dict[str, list[dict]]) -> None:
        first, _ = trained["alone"]
        assert first["not_run"]["NS312"] == (
            "no other rank has told its statistics yet: run a monitor on every rank"
        )


class TestExchange:
    @pytest.mark.parametrize("world", [2, 3])
    def test_rank_0_reads_all_and_they_read_it(self, world: int) -> None:
        store = torch.distributed.HashStore()
        ranks = [Ranks(world, rank, store, 0) for rank in range(world)]
        for step in (1, 2):
            for rank, one in enumerate(ranks):
                one.exchange(step, {"bn": (torch.full((3,), float(rank)), torch.ones(3))}, {"bn": 0.0})
        shifts = [{gap.other: gap.shift for gap in one.found["bn"]} for one in ranks]
        assert shifts[0] == {other: float(other) for other in range(1, world)}
        assert all(shifts[rank] == {0: float(rank)} for rank in range(1, world))

    def test_old_looks_leave_the_store(self) -> None:
        store = torch.distributed.HashStore()
        one = Ranks(2, 0, store, 7)
        for step in range(5):
            one.exchange(step, {"bn": (torch.zeros(2), torch.ones(2))}, {})
        assert [store.check([f"normscope/7/{step}/0"]) for step in range(5)] == [False] * 3 + [True] * 2

    def test_the_summary_is_small(self) -> None:
        mean, var = summary(torch.arange(2048.0), torch.ones(2048))
        assert mean.numel() == var.numel() == CHANNELS
        assert summary(torch.zeros(5), torch.ones(5))[0].numel() == 5


def judged(model: nn.Module, code: str, record: TrainingRecord) -> tuple[list[Finding], list[NotRun]]:
    with Session(model) as session:
        subject = Subject(session.model, session, find_sites(session), measured={"training": record})
        findings, _, not_run = judge([all_rules()[code]], subject, {})
    return findings, not_run


class TestRules:
    def record(self, world: int = 8, **site: object) -> TrainingRecord:
        return TrainingRecord(10, True, True, world, 0, {"": SiteTraining(**site)})  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("site", "fires"),
        [
            ({"samples": 2}, True),
            ({"samples": 3, "effective": 300.0}, True),
            ({"samples": 8, "effective": 12.0}, True),
            ({"samples": 32, "effective": 300.0}, False),
            ({"samples": 32}, False),
            ({"samples": 2, "synchronized": True}, False),
            ({"samples": 0}, False),
        ],
    )
    def test_unsynchronized(self, site: dict[str, object], fires: bool) -> None:
        findings, _ = judged(nn.BatchNorm2d(4), "NS206", self.record(**site))
        assert bool(findings) == fires
        if fires:
            assert findings[0].evidence["samples_per_rank"] == site["samples"]

    def test_layer_norm_and_one_rank_are_silent(self) -> None:
        assert judged(nn.LayerNorm(4), "NS206", self.record(samples=2))[0] == []
        findings, not_run = judged(nn.BatchNorm2d(4), "NS206", self.record(1, samples=2))
        assert (findings, [entry.reason for entry in not_run]) == ([], ["there is one rank only"])

    def test_synchronized_norms_are_read_from_their_class(self) -> None:
        with Monitor(nn.SyncBatchNorm(4), world=2) as monitor:
            pass
        assert "NS206" in monitor.report().passed

    @pytest.mark.parametrize(
        ("shift", "log_var", "severity"),
        [(0.0, 0.0, ""), (1e-4, 5e-4, ""), (0.05, 0.0, "info"), (0.3, 0.0, "warning"), (0.0, 0.5, "warning")],
    )
    def test_diverged(self, shift: float, log_var: float, severity: str) -> None:
        gap = RankGap(0, 3, 40, shift, log_var)
        findings, _ = judged(nn.BatchNorm2d(4), "NS312", self.record(ranks=(gap,)))
        assert [f.severity for f in findings] == ([severity] if severity else [])
