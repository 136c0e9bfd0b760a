"""Gains of the other convention, and checkpoints that lack what a norm needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import normscope
from normscope.doctor.report import Finding
from normscope.errors import BadInput

torch.set_num_threads(1)


def found(model: nn.Module, code: str, inputs: object = None, **options: object) -> tuple[Finding, ...]:
    report = normscope.check(model, inputs, select=[code], **options)  # type: ignore[arg-type]
    assert not report.not_run, report.not_run
    return report.findings


def rms_stack(fill: Callable[[torch.Tensor], object], count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64)) for _ in range(count)))
    with torch.no_grad():
        for block in model:
            fill(block[1].weight)
    return model


def gemma(fill: Callable[[torch.Tensor], object], count: int = 4) -> nn.Sequential:
    norms = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    torch.manual_seed(0)
    model = nn.Sequential(*(norms.GemmaRMSNorm(64) for _ in range(count)))
    with torch.no_grad():
        for norm in model:
            fill(norm.weight)
    return model


class TestGainConvention:
    @pytest.mark.parametrize("center", [0.0, -0.5], ids=["around 1", "around one half"])
    def test_offset_missing(self, center: float) -> None:
        model = rms_stack(lambda w: w.normal_(center, 0.2))
        (finding,) = found(model, "NS107")
        assert (finding.site, finding.severity) == ("0.1", "error")
        assert finding.evidence["offset"] == 0
        assert finding.evidence["sites"] == 4
        assert finding.evidence["median_weight"] == pytest.approx(center, abs=0.05)
        # what the fix says
        with torch.no_grad():
            for block in model:
                block[1].weight += 1
        assert not found(model, "NS107")

    def test_offset_doubled(self) -> None:
        model = gemma(lambda w: w.normal_(1.0, 0.1))
        (finding,) = found(model, "NS107")
        assert (finding.severity, finding.evidence["offset"], finding.evidence["sites"]) == ("warning", 1, 4)
        with torch.no_grad():
            for norm in model:
                norm.weight -= 1
        assert not found(model, "NS107")

    @pytest.mark.parametrize(
        "fill",
        [
            lambda w: w.fill_(1),
            lambda w: w.normal_(0.3, 0.08),
            lambda w: w.uniform_(0.02, 0.1),
            lambda w: w.normal_(1, 0.4),
            lambda w: w.copy_(torch.cat([torch.full((60,), -1e-3), torch.full((4,), 2.0)])),
        ],
        ids=["fresh", "trained", "trained small", "wide", "faded by weight decay"],
    )
    def test_ordinary_gains(self, fill: Callable[[torch.Tensor], object]) -> None:
        assert not found(rms_stack(fill), "NS107")

    @pytest.mark.parametrize(
        "fill", [lambda w: w.zero_(), lambda w: w.normal_(0.1, 0.3)], ids=["fresh", "trained"]
    )
    def test_ordinary_gains_with_an_offset(self, fill: Callable[[torch.Tensor], object]) -> None:
        assert not found(gemma(fill), "NS107")

    def test_batch_norms_have_one_convention(self) -> None:
        model = nn.Sequential(*(nn.BatchNorm1d(32) for _ in range(4)))
        for norm in model:
            nn.init.normal_(norm.weight)
        assert not found(model, "NS107")

    def test_one_site_decides_nothing(self) -> None:
        assert not found(rms_stack(lambda w: w.normal_(0, 0.2), count=1), "NS107")

    def test_zero_initialized_residual_branches(self) -> None:
        """Some gains are 0 and the rest ordinary; then all are, and end residual branches."""

        class Branch(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
                nn.init.zeros_(self.norm.weight)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.norm(self.body(x))

        x = torch.randn(8, 64)
        branches = nn.Sequential(Branch(), Branch(), Branch())
        assert not found(nn.Sequential(branches, nn.LayerNorm(64)), "NS107")
        assert not found(branches, "NS107", x)
        report = normscope.check(branches, select=["NS107"])
        assert not report.findings
        assert [n.reason for n in report.not_run] == [
            "every gain is 0: whether these norms end residual branches needs data"
        ]

    def test_fresh_weights_of_the_other_convention(self) -> None:
        (finding,) = found(rms_stack(lambda w: w.zero_()), "NS107", torch.randn(8, 64))
        assert "their weights are all 0" in finding.message
        assert finding.severity == "error"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
    )  # fmt: skip


def trained() -> nn.Sequential:
    model = net().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return model.eval()


def without(state: Mapping[str, torch.Tensor], *parts: str) -> dict[str, torch.Tensor]:
    return {name: t for name, t in state.items() if not any(part in name for part in parts)}


class TestBuffersMissing:
    def test_a_whole_checkpoint(self) -> None:
        model = trained()
        assert not found(model, "NS313", state=model.state_dict())

    def test_nothing_to_compare_with(self) -> None:
        (entry,) = normscope.check(net(), select=["NS313"]).not_run
        assert entry.reason == "needs the checkpoint: pass state= (on the command line --weights FILE)"

    def test_parameters_without_statistics(self) -> None:
        state, model = without(trained().state_dict(), "running"), net()
        model.load_state_dict(state, strict=False)
        (finding,) = found(model, "NS313", state=state)
        assert (finding.site, finding.severity, [f.site for f in finding.also]) == ("1", "error", ["4"])
        assert finding.evidence["missing"] == ["running_mean", "running_var"]
        assert finding.evidence["initial"] is True

    def test_statistics_that_came_from_elsewhere_are_info(self) -> None:
        model = trained()
        (finding,) = found(model, "NS313", state=dict(model.named_parameters()))
        assert (finding.severity, finding.evidence["initial"]) == ("info", False)

    def test_names_that_do_not_match(self) -> None:
        renamed = {name.replace("1.weight", "1.gamma"): t for name, t in trained().state_dict().items()}
        model = net()
        model.load_state_dict(renamed, strict=False)
        findings = {f.site: f for f in found(model, "NS313", state=renamed)}
        assert {site: f.severity for site, f in findings.items()} == {"1": "warning", "": "warning"}
        assert findings["1"].evidence["missing"] == ["weight"]
        assert findings[""].evidence["names"] == ["1.gamma"]

    def test_the_same_values_under_another_name(self) -> None:
        model = trained()
        state = {name.replace("1.weight", "1.gamma"): t for name, t in model.state_dict().items()}
        assert not found(model, "NS313", state=state)

    def test_a_shared_norm_saved_under_one_name(self) -> None:
        norm = nn.BatchNorm2d(8)
        model = nn.ModuleDict({"a": norm, "b": norm})
        assert not found(model, "NS313", state=without(model.state_dict(), "b."))

    def test_a_new_part_is_info(self) -> None:
        model = nn.Sequential(*trained(), nn.BatchNorm2d(8))
        (finding,) = found(model, "NS313", state=trained().state_dict())
        assert (finding.site, finding.severity) == ("6", "info")

    def test_statistics_without_a_place(self) -> None:
        bare = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False))
        state = without(trained().state_dict(), "3.", "4.", "5.")
        (finding,) = found(bare, "NS313", state=state)
        assert (finding.site, finding.severity) == ("", "warning")
        assert finding.evidence["names"] == ["1.running_mean", "1.running_var"]

    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
    def test_a_prefix(self, prefix: str) -> None:
        good = trained()
        state = {prefix + name: t for name, t in good.state_dict().items()}
        model = net()
        for place in (0, 3):
            model[place].reset_parameters()
        model.load_state_dict(state, strict=False)
        (finding,) = found(model, "NS313", state=state)
        assert (finding.severity, finding.evidence["prefix"]) == ("error", prefix)
        assert not found(good, "NS313", state=state), "somebody took the prefix off"

    def test_counters_are_not_missed(self) -> None:
        model = trained()
        assert not found(model, "NS313", state=without(model.state_dict(), "num_batches"))

    def test_neither_model_nor_checkpoint_is_changed(self) -> None:
        state, model = without(trained().state_dict(), "running"), net()
        before = [t.clone() for t in (*model.state_dict().values(), *state.values())]
        found(model, "NS313", state=state)
        after = [*model.state_dict().values(), *state.values()]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            (
                [1],
                "state must be a mapping name -> tensor, such as torch.load(file, weights_only=True) gives; got list",
            ),
            ({"epoch": 3}, "state holds no tensor by name, only 'epoch'; pass the state dict itself"),
        ],
    )
    def test_what_is_no_state(self, state: object, message: str) -> None:
        with pytest.raises(BadInput) as caught:
            normscope.check(net(), state=state)  # type: ignore[arg-type]
        assert str(caught.value) == message


class TestWeightsOption:
    def test_norms_alone_may_differ(self, tmp_path: Path) -> None:
        from normscope.errors import BadTarget
        from normscope.targets import checkpoints

        path, model = tmp_path / "w.pt", net()
        torch.save(without(trained().state_dict(), "running"), path)
        state, _, notes = checkpoints.load_into(model, path)
        assert notes == [f"{path}: 4 names of norms did not match and stayed as they were (see NS313)"]
        assert torch.equal(model[1].weight, state["1.weight"])
        assert {f.severity for f in found(model, "NS313", state=state)} == {"error"}
        for bad in (without(trained().state_dict(), "3."), {"running_mean": torch.ones(3)}):
            torch.save(bad, path)
            with pytest.raises(BadTarget, match=r"does not fit the model:\n\d+ names? "):
                checkpoints.load_into(net(), path)
        torch.save({**trained().state_dict(), "1.running_mean": torch.ones(9)}, path)
        with pytest.raises(BadTarget, match=r"another shape: 1\.running_mean is \(9,\), in the model \("):
            checkpoints.load_into(net(), path)

    def test_the_command_line_hands_the_checkpoint_on(self, tmp_path: Path) -> None:
        from normscope import demo, targets

        state = without(demo.load("healthy")[0].state_dict(), "norm1.running")
        torch.save(state, tmp_path / "w.pt")
        loaded = targets.resolve("demo:healthy", weights=tmp_path / "w.pt")
        assert loaded.state is not None
        assert set(loaded.state) == set(state)
        (finding,) = found(loaded.model, "NS313", state=loaded.state)
        assert (finding.site, finding.evidence["missing"]) == ("norm1", ["running_mean", "running_var"])
