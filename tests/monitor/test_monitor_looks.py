"""The numbers of a look, against the formula in float64; the files they go to; and the rules that read them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from normscope import Monitor
from normscope import nn as own
from normscope.doctor.rules import all_rules
from normscope.doctor.tracing.calls import MASKED
from normscope.errors import BadInput, MissingExtra
from normscope.monitor.watch import distance

torch.set_num_threads(1)
LENGTHS = torch.tensor([5, 4, 4])


def one_step(model: nn.Module, x: torch.Tensor, **options: object) -> Monitor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, 1, **options) as monitor:  # type: ignore[arg-type]
        model(x).square().mean().backward()
        optimizer.step()
    return monitor


class TestNumbers:
    def test_a_batch_norm(self) -> None:
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(4)
        nn.init.uniform_(norm.weight)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        mean, var = norm.running_mean.double().numpy().copy(), norm.running_var.double().numpy().copy()
        gain = norm.weight.detach().double().numpy().copy()
        x = 3 * torch.randn(8, 4, 5, 5) + 1
        monitor = one_step(norm, x)
        look = monitor.looks[""]
        a = x.double().numpy()
        batch_mean, batch_var = a.mean((0, 2, 3)), a.var((0, 2, 3))
        # float32 sums of 200 elements: 1e-6 relative, far inside 1e-5
        close = {"rel": 1e-5}
        assert look.batch_mean == pytest.approx(math.sqrt((batch_mean**2).mean()), **close)
        assert look.batch_variance == pytest.approx(np.median(batch_var), **close)
        assert look.denominator_min == pytest.approx(math.sqrt(batch_var.min() + 1e-5), **close)
        assert look.denominator_median == pytest.approx(np.median(np.sqrt(batch_var + 1e-5)), **close)
        assert look.running_mean == pytest.approx(math.sqrt((mean**2).mean()), **close)
        assert look.shift == pytest.approx(
            math.sqrt(((batch_mean - mean) ** 2 / (var + 1e-5)).mean()), **close
        )
        # gain and gradient as they are after the step of SGD: w - 0.1 g
        gradient = norm.weight.grad.double().numpy()
        assert look.gain_max == pytest.approx((gain - 0.1 * gradient).max(), **close)
        assert look.gain_gradient == pytest.approx(math.sqrt((gradient**2).mean()), **close)
        assert (look.calls, look.samples, look.elements, look.mode) == (1, 8, 200, "batch")
        assert (look.shape, look.dtype, look.near_eps) == ((8, 4, 5, 5), "float32", 0.0)

    def test_a_layer_norm_near_eps(self) -> None:
        x = torch.randn(6, 5, 16)
        x[:, :2] *= 1e-4  # variances of 1e-8, below eps in two places of five
        look = one_step(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 2)), x).looks["0"]
        assert look.near_eps == pytest.approx(0.4)
        assert look.denominator_min == pytest.approx(math.sqrt(1e-5), rel=1e-2)
        assert (look.mode, look.elements) == ("input", 16)
        assert math.isnan(look.running_mean)

    def test_a_look_comes_at_the_first_step_and_every_so_often(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Monitor(model, optimizer, 3, jsonl=tmp_path / "log.jsonl"):
            for _ in range(8):
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
        lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if line["kind"] == "site"] == [1, 4, 7]

    @pytest.mark.parametrize("how", ["mask", "lengths", "packed"])
    def test_a_call_in_which_not_all_elements_count_is_not_measured(self, how: str) -> None:
        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.last = own.BatchNorm1d(4), nn.LayerNorm(4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if how == "packed":
                    packed = pack_padded_sequence(x.movedim(1, 2), LENGTHS, batch_first=True)
                    return self.last(self.norm(packed).data)
                counts = torch.arange(5) < LENGTHS[:, None]
                given = {"lengths": LENGTHS} if how == "lengths" else {"mask": counts[:, None]}
                return self.last(self.norm(x, **given).movedim(1, 2)[counts])

        x = torch.randn(3, 4, 5)
        x[1:, :, 4] = math.nan  # padding
        model = Masked()
        monitor = one_step(model, x)
        look, report = monitor.looks["norm"], monitor.report()
        assert (look.calls, look.mode, look.samples, look.running_variance) == (1, "batch", 3, 1.0)
        assert math.isnan(look.batch_mean)
        assert monitor.looks["last"].batch_variance > 0
        assert (monitor.findings, f"norm: {MASKED}" in report.notes) == ((), True)
        assert "NS405" in report.passed  # of the layer norm
        model.last = nn.Identity()
        report = one_step(model, x).report()
        assert {"NS405", "NS402"} <= {entry.code for entry in report.not_run if entry.reason == MASKED}

    def test_an_input_given_by_name_is_measured(self) -> None:
        norm, x = nn.LayerNorm(4), torch.randn(8, 4)
        with Monitor(norm) as monitor:
            norm(input=x).sum().backward()
            monitor.step()
        # float32 sums of 4 elements: 1e-6 relative, far inside 1e-5
        median = np.median(x.double().numpy().var(1))
        assert monitor.looks[""].batch_variance == pytest.approx(median, rel=1e-5)

    def test_the_distance_of_statistics(self) -> None:
        rng = np.random.default_rng(0)
        mean, other = rng.normal(size=(2, 5))
        var, varied = rng.uniform(0.1, 3, size=(2, 5))
        var[4] = 0.0  # dead, left out
        found = distance(
            tuple(map(torch.tensor, (mean, var))), tuple(map(torch.tensor, (other, varied))), 1e-3
        )
        shift = np.sqrt(np.mean((mean - other)[:4] ** 2 / (var[:4] + 1e-3)))
        ratio = np.abs(np.log((varied[:4] + 1e-3) / (var[:4] + 1e-3))).max()
        assert found == pytest.approx((shift, ratio), rel=1e-12)
        nothing = torch.full((5,), math.nan)
        assert distance((nothing, nothing), (nothing, nothing), 0.0) == (0.0, 0.0)


class TestRules:
    """Rules that are judged from looks, through the same files as in a check."""

    @staticmethod
    def codes(monitor: Monitor) -> set[str]:
        return {finding.code for finding in monitor.findings}

    def test_eps_dominates(self) -> None:
        quiet = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2))
        assert "NS401" in self.codes(one_step(quiet, 1e-4 * torch.randn(16, 8)))
        assert "NS401" not in self.codes(one_step(quiet, torch.randn(16, 8)))

    def test_invalid_running_variance(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model[1].running_var.fill_(-1.0)
        assert "NS301" in self.codes(one_step(model, torch.randn(16, 8)))

    def test_constant_sets(self) -> None:
        x = torch.randn(16, 8)
        x[:, :6] = 3.0
        assert "NS402" in self.codes(one_step(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2)), x))

    def test_half_frozen(self) -> None:
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 2))
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        assert "NS305" in self.codes(one_step(model, torch.randn(16, 8)))
        assert "NS305" not in self.codes(one_step(model, torch.randn(16, 8), frozen_policy="affine"))

    def test_freeze_that_does_not_stick(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model[1].eval()
        assert "NS306" in self.codes(one_step(model, torch.randn(16, 8)))

    def test_never_updated_after_many_steps(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Monitor(model, optimizer, 50) as monitor:
            for _ in range(101):
                model(torch.randn(8, 8)).square().mean().backward()
                optimizer.step()
        assert "NS302" in self.codes(monitor)

    def test_parameters_that_are_no_numbers(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        with torch.no_grad():
            model[2].weight[0, 0] = math.nan
        assert "NS406" in self.codes(one_step(model, torch.randn(16, 8)))

    def test_all_that_is_asked_can_be_answered(self) -> None:
        """Of a batch norm on a good batch, no rule of the monitor lacks its measurement."""
        monitor = one_step(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(16, 8))
        report = monitor.report()
        elsewhere = "a monitor does not decide it: normscope.check(model, inputs) on a batch does"
        asked = [entry for entry in report.not_run if entry.reason != elsewhere]
        assert {entry.code for entry in asked} == {"NS206", "NS312", "NS406"}
        listed = (
            {f.code for f in report.findings} | {*report.passed} | {entry.code for entry in report.not_run}
        )
        assert listed == set(all_rules())
        assert len(report.passed) >= 15

    def test_a_model_that_is_not_called_says_nothing_of_samples(self) -> None:
        class Parts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

        model = Parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reasons = []
        for tells in (False, True):
            with Monitor(model, optimizer, select=["NS205"]) as monitor:
                x = torch.randn(16, 8)
                if tells:
                    monitor.batch(x)
                model.body(x).square().mean().backward()
                optimizer.step()
            reasons.append([entry.reason for entry in monitor.report().not_run])
        assert reasons == [
            [
                "cannot tell: axis 0 of the inputs counts samples, and no tensor among them says how many (tell a "
                "monitor whose model is not called itself with monitor.batch(inputs) before each pass)"
            ],
            [],
        ]

    def test_what_no_longer_holds_is_a_note(self) -> None:
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Monitor(model, optimizer, 1) as monitor:
            for scale in (1e-4, 1.0):
                model(scale * torch.randn(16, 8)).square().mean().backward()
                optimizer.step()
        assert [f.code for f in monitor.findings] == ["NS401"]
        report = monitor.report()
        assert report.findings == ()
        assert "was found earlier and no longer holds: NS401 at 0" in report.notes

    def test_a_fault_of_the_monitor_does_not_end_the_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> None:
            raise ZeroDivisionError("on purpose")

        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        with monkeypatch.context() as patch:
            patch.setattr("normscope.monitor.look.Look._describe", broken)
            notes = one_step(model, torch.randn(16, 8)).report().notes
        assert "1 could not be looked at: ZeroDivisionError: on purpose" in notes
        with monkeypatch.context() as patch:
            patch.setattr("normscope.monitor.verdict.verdict", broken)
            monitor = one_step(model, torch.randn(16, 8))
        assert "after step 1 it could not be judged: ZeroDivisionError: on purpose" in monitor.report().notes
        with monkeypatch.context() as patch:
            patch.setattr("normscope.monitor.monitor.counters", broken)
            monitor = one_step(model, torch.randn(16, 8))
        assert "after step 0 no look was begun: ZeroDivisionError: on purpose" in monitor.report().notes
        assert monitor.steps == 1


class TestFiles:
    def test_json_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "log.jsonl"
        path.write_text('{"kind": "older"}\n')
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False))
        model[1].running_var.fill_(-1.0)
        one_step(model, torch.randn(16, 8), jsonl=path)
        lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
        assert lines[0] == {"kind": "older"}, "appended"
        site = next(line for line in lines if line["kind"] == "site")
        assert (site["step"], site["site"], site["shape"]) == (1, "1", [16, 8])
        assert site["gain_min"] == "NaN", "it has no gain"
        finding = next(line for line in lines if line["kind"] == "finding")
        assert (finding["code"], finding["step"], finding["severity"]) == ("NS301", 1, "error")

    def test_tensorboard(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard", reason="pip install 'normscope[tensorboard]'")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model[1].running_var.fill_(-1.0)
        monitor = one_step(model, torch.randn(16, 8), tensorboard=tmp_path)
        events = EventAccumulator(str(tmp_path)).Reload()
        (scalar,) = events.Scalars("normscope/1/denominator_min")
        assert scalar.step == 1
        assert scalar.value == pytest.approx(monitor.looks["1"].denominator_min)
        text = events.Tensors("normscope/findings/text_summary")[0].tensor_proto.string_val[0].decode()
        assert text.startswith("error NS301 invalid-running-variance at 1: ")

    def test_without_tensorboard(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(MissingExtra) as error:
            Monitor(nn.BatchNorm1d(3), tensorboard=tmp_path).start()
        assert str(error.value) == (
            "writing for TensorBoard needs tensorboard, which is not installed: pip install 'normscope[tensorboard]'"
        )


def test_models_of_several_names() -> None:
    with pytest.raises(BadInput, match=r"model must be a torch\.nn\.Module, got int"):
        Monitor(3)  # type: ignore[arg-type]
    model = {"a": nn.BatchNorm1d(3), "b": nn.LayerNorm(3)}
    with Monitor(model) as monitor:
        model["b"](model["a"](torch.randn(8, 3))).sum().backward()
    assert [site.name for site in monitor.report().sites] == ["a", "b"]
