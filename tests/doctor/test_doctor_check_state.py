"""``check_state``: a checkpoint without its code. What shows is found, what does not is said, nothing is assumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import normscope
from normscope import check_state
from normscope.doctor.check_state import describe_state
from normscope.doctor.report import Finding, Report
from normscope.doctor.stored_norms import find_norms, says, without_statistics
from normscope.doctor.stored_state import in_memory
from normscope.errors import BadInput, BadTarget

State = dict[str, Any]


def trained(channels: int = 16, seed: int = 0) -> nn.Sequential:
    """Two blocks with batch norm, statistics and parameters as training leaves them, and a layer norm."""
    torch.manual_seed(seed)
    blocks = [
        nn.Sequential(nn.Conv2d(channels, channels, 3), nn.BatchNorm2d(channels), nn.ReLU()) for _ in range(2)
    ]
    model = nn.Sequential(*blocks, nn.Flatten(2), nn.LayerNorm(channels))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.num_batches_tracked.fill_(1000)
            if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_()
    return model


def found(report: Report, code: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.code == code]


def reasons(report: Report) -> dict[str, str]:
    return {entry.code: entry.reason for entry in report.not_run}


class TestWhichTensorsAreNorms:
    def test_every_norm_of_torch_and_nothing_else(self) -> None:
        model = nn.ModuleDict(
            {
                "conv": nn.Conv2d(8, 8, 1),
                "square": nn.Linear(8, 8),
                "prelu": nn.PReLU(8),
                "embedding": nn.Embedding(8, 8),
                "lstm": nn.LSTM(8, 8),
                "attention": nn.MultiheadAttention(8, 2),
                "bilinear": nn.Bilinear(8, 8, 8),
                "bn": nn.BatchNorm1d(8),
                "plain_bn": nn.BatchNorm1d(8, affine=False),
                "ln": nn.LayerNorm(8),
                "image_norm": nn.LayerNorm((2, 3, 4)),
                "gn": nn.GroupNorm(2, 8),
                "instance_norm": nn.InstanceNorm2d(8, affine=True),
                "tracked": nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
                "rms_norm": nn.RMSNorm(8),
                "final_norm": nn.LayerNorm(8, bias=False),
                "3": nn.LayerNorm(8),
            }
        )
        search = find_norms(in_memory(model.state_dict()).tensors)
        assert {norm.path: norm.kind for norm in search.norms} == {
            "bn": "batch",
            "plain_bn": "batch",
            "ln": "layer",
            "image_norm": "layer",
            "gn": "group",
            "instance_norm": "instance",
            "tracked": "batch",
            "rms_norm": "rms",
            "final_norm": "rms",
            "3": "",
        }
        assert search.vectors == ("prelu",)

    def test_names_of_old_and_other_checkpoints(self) -> None:
        state = in_memory(
            {
                "bert.LayerNorm.gamma": torch.ones(4),
                "bert.LayerNorm.beta": torch.ones(4),
                "block.gamma": torch.ones(4),  # the scale of a branch
                "conv_bn.moving_mean": torch.ones(4),
                "conv_bn.moving_variance": torch.ones(4),
            }
        )
        search = find_norms(state.tensors)
        assert [(norm.path, norm.kind) for norm in search.norms] == [
            ("bert.LayerNorm", "layer"),
            ("conv_bn", "batch"),
        ]
        assert search.vectors == ("block",)

    def test_gains_of_norms_written_by_hand(self) -> None:
        state = {
            "rms.g": torch.ones(4),
            "layers.0.norm.alpha": torch.ones(4),
            "own.g": torch.ones(4),
            "own.b": torch.ones(4),
            "snake.alpha": torch.ones(4),  # the slope of an activation
            "branch.g": torch.ones(4),
            "rotary.inv_freq": torch.ones(4),
            "fc.w": torch.ones(4, 4),
            "fc.b": torch.ones(4),
            "tanh.alpha": torch.ones(1),
        }
        search = find_norms(in_memory(state).tensors)
        assert {norm.path: norm.kind for norm in search.norms} == {
            "rms": "rms",
            "layers.0.norm": "rms",
            "own": "",
        }
        assert search.vectors == ("branch", "snake")
        assert [norm.path for norm in search.alone] == ["snake", "branch", "rotary"]
        # what multiplies by 1 + g starts at 0: no dead channels, no convention that could be told from a file
        state = {"rms.g": torch.zeros(64), "ln.weight": torch.ones(64), "ln.bias": torch.zeros(64)}
        assert normscope.check_state(state).findings == ()

    @pytest.mark.parametrize(
        ("state", "why"),
        [
            ({"norm.weight": torch.ones(4), "norm.bias": torch.ones(5)}, "two sizes"),
            ({"fc.weight": torch.ones(4, 4), "fc.bias": torch.ones(4)}, "a matrix"),
            ({"norm.bias": torch.ones(4)}, "a bias alone"),
            ({"norm.weight": torch.ones(4, dtype=torch.int8)}, "integers"),
            ({"norm.weight": torch.tensor(1.0)}, "a single number"),
            ({"bn.running_mean": torch.zeros(4), "bn.running_var": torch.ones(5)}, "two sizes"),
            ({"normal.weight": torch.ones(4)}, "another word"),
            ({"conv.weight": torch.ones(4, 1, 3, 3), "conv.bias": torch.ones(4)}, "a depthwise kernel"),
        ],
    )
    def test_what_is_none(self, state: State, why: str) -> None:
        assert find_norms(in_memory(state).tensors).norms == (), why

    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("layer1.0.bn2", "batch"),
            ("_blocks.3._bn0", "batch"),
            ("conv1_BN", "batch"),
            ("net.BatchNorm2d_1", "batch"),
            ("block.norm1", ""),
            ("input_layernorm", "layer"),
            ("transformer.ln_f", "layer"),
            ("attn.q_norm", ""),
            ("down.0.gn1", "group"),
            ("features.3", None),
            ("abnormal", None),
            ("classifier", None),
        ],
    )
    def test_what_names_say(self, path: str, kind: str | None) -> None:
        assert says(path) == kind


class TestWhatIsFound:
    def test_a_sound_checkpoint_is_silent(self) -> None:
        report = check_state(trained().state_dict(), eps=1e-5, momentum=0.1)
        assert report.findings == ()
        assert {"NS301", "NS302", "NS303", "NS309", "NS311", "NS313", "NS314", "NS401"} <= set(report.passed)

    def test_it_finds_what_the_model_would_show(self) -> None:
        """On a faulty model, ``check_state`` with its eps and momentum says what ``check`` says of the state."""
        model = trained()
        one, two = model[0][1], model[1][1]
        with torch.no_grad():
            one.running_var[3] = float("nan")
            one.running_var[4] = 0
            two.running_mean.zero_()
            two.running_var.fill_(1)
        codes = ["NS301", "NS302", "NS303", "NS309", "NS311", "NS314", "NS401"]
        whole = normscope.check(model, select=codes)
        alone = check_state(model.state_dict(), select=codes, eps=1e-5, momentum=0.1)
        assert [(f.code, f.site, f.severity, f.message) for f in alone.findings] == [
            (f.code, f.site, f.severity, f.message) for f in whole.findings
        ]
        assert [f.code for f in alone.findings] == ["NS301", "NS302", "NS314"]

    def test_gains_that_are_not_finite(self) -> None:
        state = trained().state_dict()
        state["3.weight"][2] = float("inf")
        (finding,) = check_state(state).findings
        assert (finding.code, finding.severity, finding.site) == ("NS406", "error", "3")
        assert finding.message == "the parameter 3.weight holds infinity in 1 of 16 numbers."

    def test_half_precision_statistics(self) -> None:
        state = {n: t.half() if t.is_floating_point() else t for n, t in trained().state_dict().items()}
        (finding,) = found(check_state(state), "NS309")
        assert finding.severity == "info"
        assert "with momentum 0.1, which is not in the file, a variance moves only" in finding.message
        assert finding.evidence["momentum"] is None

    def test_weights_of_one_plus_w(self) -> None:
        """Right in Gemma's own class, so no more than a word."""
        torch.manual_seed(0)
        state = {f"layers.{i}.norm.weight": 0.2 * torch.randn(64) for i in range(4)}
        (finding,) = check_state(state).findings
        assert (finding.code, finding.severity) == ("NS107", "info")
        assert finding.message.endswith(
            "of them are negative: they look like weights of a norm that multiplies by 1 + w."
        )
        assert finding.fix == "load them only into norms that multiply by 1 + w"

    def test_zero_variance_needs_eps_to_be_weighed(self) -> None:
        state = trained().state_dict()
        state["0.1.running_var"][:2] = 0
        (unknown,) = check_state(state).findings
        assert unknown.severity == "info"
        assert unknown.message.startswith(
            "2 of 16 channels (0, 1) had no variance in training and keep a gain of"
        )
        assert "gain / sqrt(eps). State eps to compare that" in unknown.message
        (stated,) = check_state(state, eps=1e-5).findings
        assert (stated.code, stated.severity) == ("NS314", "warning")
        assert stated.evidence["amplification"] > 100


class TestStatisticsThatAreMissing:
    def test_parameters_alone(self) -> None:
        """What ``torch.save(dict(model.named_parameters()))`` keeps; only the name tells."""
        state = {"bn1.weight": torch.rand(4), "bn1.bias": torch.rand(4), "fc.bias": torch.rand(4)}
        (finding,) = found(check_state(state), "NS313")
        assert (finding.severity, finding.site) == ("warning", "bn1")
        assert finding.message == (
            "the checkpoint holds this norm without running_mean, running_var, and its name is a batch norm's. A group "
            "or layer norm under such a name has none."
        )

    def test_one_block_of_a_stack(self) -> None:
        state = trained().state_dict()
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            del state[f"1.1.{name}"]
        (finding,) = found(check_state(state), "NS313")
        assert (finding.severity, finding.site) == ("error", "1.1")
        assert finding.message == (
            "the checkpoint holds this norm without running_mean, running_var, and 0.1, of the same stack, has them."
        )

    @pytest.mark.parametrize(
        ("gone", "text"),
        [
            (("running_var",), "without running_var, and it holds the other statistic."),
            (
                ("running_mean", "running_var"),
                "without running_mean, running_var, and it holds their counter.",
            ),
        ],
    )
    def test_a_part_of_them(self, gone: tuple[str, ...], text: str) -> None:
        state = {f"features.4.{name}": tensor for name, tensor in nn.BatchNorm1d(4).state_dict().items()}
        for name in gone:
            del state[f"features.4.{name}"]
        (finding,) = found(check_state(state), "NS313")
        assert finding.severity == "error"
        assert finding.message.endswith(text)

    def test_layers_of_one_flat_sequence(self) -> None:
        """A layer norm after batch norms is no batch norm that lost its statistics."""
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
        assert found(check_state(model.state_dict()), "NS313") == []

    def test_norms_that_never_had_any_are_left_in_peace(self) -> None:
        model = nn.Sequential(
            nn.GroupNorm(2, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.BatchNorm1d(8, affine=False)
        )
        norms = find_norms(in_memory(model.state_dict()).tensors).norms
        assert without_statistics(norms) == {}


class TestWhatIsNotKnownIsSaid:
    def test_eps_and_momentum(self) -> None:
        report = check_state(trained().state_dict())
        why = reasons(report)
        assert why["NS401"] == why["NS105"] == "eps is not in the file: state it, eps=1e-5"
        assert why["NS311"] == "momentum is not in the file: state it, momentum=0.1"
        assert why["NS304"] == "needs the model's code: check the model itself"
        said = "not in the file: eps (of 2 norms), momentum (of 2 norms); nothing was assumed in their place"
        assert said in report.notes
        rows = {row.name: row for row in report.sites}
        assert rows["0.1"].unknown == ("eps", "momentum")
        assert rows["3"].spec is None
        assert rows["3"].reason == "a norm by its tensors; neither its name nor its shapes tell which"

    def test_no_number_that_nobody_stated_gets_out(self) -> None:
        """Neither 1e-5 nor 0.1 stands in a message or in evidence of statistics that are reset or zero."""
        state = trained().state_dict()
        state["0.1.running_mean"].zero_()
        state["0.1.running_var"].fill_(1)
        state["1.1.running_var"][0] = -1e-7
        report = check_state(state)
        assert {f.code for f in report.findings} == {"NS301", "NS302"}
        for finding in report.findings:
            assert finding.evidence.get("momentum") is None
            assert "1e-05" not in finding.message
        assert "or momentum is 0" in found(report, "NS302")[0].message
        assert (
            "where eps, which is not known here, does not make up for it" in found(report, "NS301")[0].message
        )

    def test_vectors_and_integers_that_were_left_out(self) -> None:
        report = check_state(
            {
                "act.weight": torch.ones(4),
                "norm.weight": torch.ones(4),
                "final_norm.weight.qweight": torch.ones(4, dtype=torch.int8),
            }
        )
        assert [row.name for row in report.sites] == ["norm"]
        assert report.notes == (
            "not in the file: center (of 1 norm), eps (of 1 norm), weight_offset (of 1 norm); nothing was assumed in "
            "their place",
            "1 weight without a bias (norm) taken for RMS norms by name; layer norms without a bias look alike",
            "1 vector without a bias under no norm's name were left out: act",
            "left out, since their parameters are stored as integers: final_norm",
        )

    def test_no_norm_at_all(self) -> None:
        report = check_state({"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)})
        assert report.passed == ()
        assert "nothing could be checked" in str(report)

    def test_more_numbers_than_a_model_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("normscope.doctor.stored_sites.MOST_VALUES", 100)
        report = check_state(trained().state_dict())
        assert ["not read" in row.reason for row in report.sites] == [False, True, False]
        assert "1 norms were not read: together they hold more than 100 numbers" in report.notes


class TestConfiguration:
    @staticmethod
    def folder(path: Path, config: dict[str, Any]) -> Path:
        state = {f"layers.{i}.input_layernorm.weight": torch.rand(8) + 0.5 for i in range(3)}
        save_file(state, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config))
        return path

    def test_its_eps_is_taken_and_compared(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, {"rms_norm_eps": 1e-6})
        silent = check_state(folder)
        assert silent.findings == ()
        assert reasons(silent)["NS105"].startswith("eps is that of config.json")
        assert silent.sites[0].spec is not None
        assert silent.sites[0].spec.eps == 1e-6
        assert silent.sites[0].unknown == ("weight_offset",)
        (finding,) = check_state(folder, eps=1e-5).findings
        assert (finding.code, finding.severity) == ("NS105", "warning")
        assert finding.message == ("eps is 1e-05, the model's config says 1e-06. The same at 2 other sites.")
        agreeing = check_state(folder, eps=1e-6)
        assert agreeing.findings == ()
        assert "NS105" in agreeing.passed

    def test_parts_with_their_own(self, tmp_path: Path) -> None:
        norms = [f"{part}.layers.0.layernorm" for part in ("vision", "text")]
        state = {f"{norm}.{name}": torch.rand(4) for norm in norms for name in ("weight", "bias")}
        save_file(state, tmp_path / "model.safetensors")
        config = {"vision_config": {"layer_norm_eps": 1e-6}, "text_config": {"layer_norm_eps": 1e-12}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        rows = {row.name.split(".")[0]: row for row in check_state(tmp_path).sites}
        assert rows["vision"].spec is not None
        assert rows["text"].spec is not None
        assert (rows["vision"].spec.eps, rows["text"].spec.eps) == (1e-6, 1e-12)

    @pytest.mark.parametrize("eps", [None, True, "1e-6", -1, 5, {"a": 1}])
    def test_an_eps_that_is_none_is_not_taken(self, eps: Any, tmp_path: Path) -> None:
        report = check_state(self.folder(tmp_path, {"rms_norm_eps": eps}))
        assert "eps" in report.sites[0].unknown


class TestHow:
    def test_files_and_dictionaries_say_the_same(self, tmp_path: Path) -> None:
        state = trained().state_dict()
        state["0.1.running_var"][0] = -1
        save_file(state, tmp_path / "a.safetensors")
        torch.save({"state_dict": state}, tmp_path / "a.ckpt")
        arrays = {name: tensor.numpy() for name, tensor in state.items()}
        messages = [
            [(f.code, f.site, f.message) for f in check_state(given).findings]
            for given in (state, arrays, tmp_path / "a.safetensors", str(tmp_path / "a.ckpt"))
        ]
        assert all(said == messages[0] for said in messages)
        assert messages[0][0][:2] == ("NS301", "0.1")

    def test_wrappers_come_off_the_names(self) -> None:
        plain = nn.BatchNorm1d(4).state_dict()
        for prefix in ("module.net.", "_orig_mod.net.", "module._orig_mod.net.", "net._orig_mod."):
            (row,) = check_state({prefix + name: tensor for name, tensor in plain.items()}).sites
            assert row.name == "net", prefix

    def test_nothing_is_written(self) -> None:
        state = trained().state_dict()
        before = {name: tensor.clone() for name, tensor in state.items()}
        random = torch.get_rng_state()
        check_state(state, eps=1e-5, momentum=0.1)
        assert torch.equal(torch.get_rng_state(), random)
        assert all(torch.equal(state[name], before[name]) for name in before)

    def test_select_and_ignore(self) -> None:
        state = trained().state_dict()
        only = check_state(state, select=["NS301"])
        assert only.passed == ("NS301",)
        assert only.not_run == ()
        assert "NS301" not in check_state(state, ignore=["NS3"]).passed

    def test_reports_in_every_format(self) -> None:
        jsonschema = pytest.importorskip("jsonschema")
        state = trained().state_dict()
        state["0.1.running_var"][0] = -1
        report = check_state(state, target="weights")
        schema = json.loads((Path(normscope.__file__).parent / "render" / "report-schema.json").read_text())
        document = json.loads(report.to_json())
        jsonschema.validate(document, schema)
        assert document["sites"][0]["kind"] == "stored"
        assert document["sites"][0]["unknown"] == ["eps", "momentum"]
        assert "NS301" in report.to_sarif()
        assert str(report).startswith("weights: 3 normalizations (1 not identified)")

    @pytest.mark.parametrize(
        ("given", "error", "text"),
        [
            (3, BadInput, "state must be a state dict or the path of a file, got int; of a model, pass "
             "model.state_dict(), or use normscope.check(model)"),
            ({}, BadInput, "the state dict holds no named tensors (only nothing); it must hold a state dict, as "
             "model.state_dict() gives"),
            ({"a": 3}, BadInput, "the state dict holds no named tensors (only int); it must hold a state dict, as "
             "model.state_dict() gives"),
            ({"a": np.array(["x"])}, BadInput, "the state dict holds no tensors; pass what model.state_dict() gives"),
            ("none.pt", BadTarget, "there is no file none.pt"),
            ("a.txt", BadTarget, "a.txt is no file of weights that is known: .safetensors, .pt, .pth, .ckpt, .bin, or "
             "*.index.json"),
        ],
    )  # fmt: skip
    def test_what_is_no_state(self, given: Any, error: type[Exception], text: str) -> None:
        with pytest.raises(error) as caught:
            check_state(given)
        assert str(caught.value) == text

    @pytest.mark.parametrize("value", [True, "1e-5", -1e-5, float("nan"), float("inf")])
    def test_numbers_that_are_none(self, value: Any) -> None:
        with pytest.raises(BadInput) as caught:
            check_state({"bn.weight": torch.ones(2)}, eps=value)
        assert str(caught.value) == (
            f"eps must be a finite number from 0 on, got {value!r}; leave it out if you do not know it"
        )

    def test_describe(self) -> None:
        rows = describe_state(trained().state_dict())
        assert [(row.name, row.type_name, row.mode_train, row.mode_eval) for row in rows] == [
            ("0.1", "batch norm", "batch", "running"),
            ("1.1", "batch norm", "batch", "running"),
            ("3", "layer, group or instance norm", "input", "input"),
        ]


class TestCommandLine:
    @staticmethod
    def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "normscope", *words], cwd=cwd, capture_output=True, text=True
        )

    def test_check(self, tmp_path: Path) -> None:
        state = trained().state_dict()
        state["0.1.running_var"][0] = -1
        torch.save(state, tmp_path / "a.pth")
        done = self.run("check", "a.pth", "--eps", "1e-5", "--format", "json", cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        report = json.loads(done.stdout)
        assert [finding["code"] for finding in report["findings"]] == ["NS301"]
        assert "stay at or below 0 with eps 1e-05" in report["findings"][0]["message"]

    def test_options_that_need_code_and_files_that_are_broken(self, tmp_path: Path) -> None:
        save_file({"norm.weight": torch.ones(4)}, tmp_path / "a.safetensors")
        done = self.run("check", "a.safetensors", "--input", "1x4", cwd=tmp_path)
        assert (done.returncode, done.stderr.strip()) == (
            2,
            "normscope: a.safetensors holds weights and no code, so --input cannot be used; name the model as "
            "package.module:attribute, with --weights a.safetensors",
        )
        done = self.run("check", "demo", "--eps", "1e-5", cwd=tmp_path)
        assert (done.returncode, done.stderr.strip()) == (
            2,
            "normscope: --eps: only of a file of weights; here the model's own code tells it",
        )
        (tmp_path / "b.safetensors").write_bytes(b"\xff" * 40)
        done = self.run("check", "b.safetensors", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("normscope: b.safetensors is no safetensors file, or broken: ")

    def test_spec(self, tmp_path: Path) -> None:
        torch.save(trained().state_dict(), tmp_path / "a.pth")
        done = self.run("spec", "a.pth", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "divides by  sqrt(var + eps)" in done.stdout
        assert "state       running mean and variance" in done.stdout
