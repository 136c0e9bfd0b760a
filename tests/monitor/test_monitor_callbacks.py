"""The callbacks in real trainers."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from normscope.errors import BadInput, MissingExtra
from normscope.monitor import lightning as for_lightning
from normscope.monitor import transformers as for_transformers

torch.set_num_threads(1)


class Teaching:
    """A student that learns from a teacher."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.student = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.teacher = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        for _ in range(60):
            self.teacher(torch.randn(16, 6))
        for parameter in self.teacher.parameters():
            parameter.requires_grad_(False)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return (self.student(x) - wanted).square().mean()


class TestLightning:
    @pytest.fixture(autouse=True)
    def _lightning(self) -> None:
        pytest.importorskip("lightning", reason="pip install 'normscope[lightning]'")

    def fit(self, folder: Path, *, frozen: bool, accumulate: int = 1, **options: object) -> object:
        from lightning.pytorch import LightningModule, Trainer

        class Distil(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                teaching = Teaching()
                self.student, self.teacher, self.loss = teaching.student, teaching.teacher, teaching.loss
                self.teacher.eval()

            def train(self, mode: bool = True) -> LightningModule:
                super().train(mode)
                if frozen:
                    self.teacher.eval()
                return self

            def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
                # what is in eval when fit begins is in eval in training too; this is the line that goes wrong
                self.teacher.train(not frozen)
                return self.loss(batch[0])

            def validation_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
                return self.loss(batch[0])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.student.parameters(), lr=0.1)

        callback = for_lightning.NormscopeCallback(**options)  # type: ignore[arg-type]
        data = DataLoader(TensorDataset(torch.randn(96, 6)), batch_size=16)
        trainer = Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback], accumulate_grad_batches=accumulate,
            default_root_dir=folder,
        )  # fmt: skip
        module = Distil()
        trainer.fit(module, data, data)
        assert not any(m._forward_pre_hooks for m in module.modules())
        return callback

    def test_a_teacher_in_train_mode_is_found(self, tmp_path: Path) -> None:
        seen: list[object] = []
        with pytest.warns(UserWarning, match=r"NS315 statistics-move-without-grad at teacher\.1: ") as told:
            callback = self.fit(tmp_path, frozen=False, every=4, on_finding=seen.append, select=["NS31"])
        assert len([w for w in told if "NS315" in str(w.message)]) == 1
        (finding,) = callback.report().at_least("warning")  # type: ignore[attr-defined]
        assert (finding.code, finding.site, finding.evidence["diagnosis"]) == (
            "NS315",
            "teacher.1",
            "teacher",
        )
        assert seen == list(callback.monitor.findings)  # type: ignore[attr-defined]
        assert callback.monitor.steps == 12  # type: ignore[attr-defined]
        assert callback.monitor.looks["student.1"].samples == 16  # type: ignore[attr-defined]

    def test_a_sound_training_is_silent(self, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*NS[0-9]{3}.*")
            callback = self.fit(tmp_path, frozen=True, every=4, frozen_policy="both")
        assert callback.report().ok, str(callback.report())  # type: ignore[attr-defined]

    def test_accumulation_is_known(self, tmp_path: Path) -> None:
        callback = self.fit(tmp_path, frozen=True, accumulate=2, select=["NS310"])
        (finding,) = callback.report().findings  # type: ignore[attr-defined]
        assert (finding.site, finding.evidence["diagnosis"]) == ("student.1", "accumulation")
        assert finding.evidence["forward_passes_per_step"] == 2

    def test_hooks_go_when_training_dies(self, tmp_path: Path) -> None:
        def stop(_: object) -> None:
            raise RuntimeError("stopped by the test")

        with pytest.raises(RuntimeError, match="stopped by the test"):
            self.fit(tmp_path, frozen=False, every=4, on_finding=stop, select=["NS315"], warn="")


class TestTransformers:
    @pytest.fixture(autouse=True)
    def _transformers(self) -> None:
        for name in ("transformers", "accelerate"):
            pytest.importorskip(name, reason="pip install 'normscope[transformers]'")

    def train(self, folder: Path, *, frozen: bool, accumulate: int = 1, **options: object) -> object:
        from transformers import Trainer, TrainingArguments

        class Distil(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                teaching = Teaching()
                self.student, self.teacher, self.loss = teaching.student, teaching.teacher, teaching.loss

            def train(self, mode: bool = True) -> nn.Module:
                super().train(mode)
                if frozen:
                    self.teacher.eval()
                return self

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": self.loss(x)}

        callback = for_transformers.NormscopeCallback(**options)  # type: ignore[arg-type]
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=8, per_device_train_batch_size=16, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, gradient_accumulation_steps=accumulate, logging_steps=100,
        )  # fmt: skip
        model = Distil()
        data = [{"x": row} for row in torch.randn(64, 6)]
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()
        assert not any(m._forward_pre_hooks for m in model.modules())
        return callback

    def test_a_teacher_in_train_mode_is_found(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match=r"NS315 statistics-move-without-grad at teacher\.1: "):
            callback = self.train(tmp_path, frozen=False, every=4, select=["NS31"])
        (finding,) = callback.report().at_least("warning")  # type: ignore[attr-defined]
        assert (finding.code, finding.site, finding.evidence["diagnosis"]) == (
            "NS315",
            "teacher.1",
            "teacher",
        )
        assert callback.monitor.steps == 8  # type: ignore[attr-defined]
        look = callback.monitor.looks["student.1"]  # type: ignore[attr-defined]
        assert look.samples == 16
        assert look.gain_gradient > 0, "the step is told before its gradients are gone"

    def test_a_sound_training_is_silent(self, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*NS[0-9]{3}.*")
            callback = self.train(tmp_path, frozen=True, every=4)
        assert callback.report().ok, str(callback.report())  # type: ignore[attr-defined]

    def test_accumulation_is_known(self, tmp_path: Path) -> None:
        callback = self.train(tmp_path, frozen=True, accumulate=2, select=["NS310"])
        (finding,) = callback.report().findings  # type: ignore[attr-defined]
        assert (finding.site, finding.evidence["diagnosis"]) == ("student.1", "accumulation")

    def test_an_older_trainer_that_tells_only_of_steps(self) -> None:
        callback = for_transformers.NormscopeCallback()
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        callback.on_train_begin(None, None, None, model=model)
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
            callback.on_step_end(None, None, None)
        callback.on_train_end(None, None, None)
        assert callback.monitor is not None
        assert callback.monitor.steps == 3


@pytest.mark.parametrize(
    ("module", "name"), [(for_lightning, "lightning"), (for_transformers, "transformers")]
)
def test_without_the_library(module: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MISSING", True)
    with pytest.raises(MissingExtra) as error:
        module.NormscopeCallback()  # type: ignore[attr-defined]
    assert str(error.value) == (
        f"NormscopeCallback needs {name}, which is not installed: pip install 'normscope[{name}]'"
    )


@pytest.mark.parametrize("module", [for_lightning, for_transformers])
def test_a_report_needs_a_training(module: object) -> None:
    if module._MISSING:  # type: ignore[attr-defined]
        pytest.skip("the library is not installed")
    with pytest.raises(BadInput) as error:
        module.NormscopeCallback().report()  # type: ignore[attr-defined]
    assert str(error.value) == "nothing was monitored yet: give this callback to a trainer and train first"
