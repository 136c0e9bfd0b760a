"""What moves running statistics, and what a monitor says of it: one fault each, and the innocent cases beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

import normscope
from normscope import Monitor, check
from normscope.doctor.report import Finding
from normscope.reading import Reading
from normscope.spec import families

torch.set_num_threads(1)
UPDATES = ["NS310", "NS315"]


class Net(nn.Module):
    def __init__(
        self, *, reentrant: bool | None = None, norm: type[nn.Module] = nn.BatchNorm2d, **options
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.block = nn.Sequential(nn.Conv2d(6, 6, 3), norm(6, **options), nn.ReLU())
        self.tail = nn.Sequential(nn.Conv2d(6, 6, 3), norm(6, **options))
        self.head = nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.reentrant is None or not torch.is_grad_enabled():
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(self.tail(x).mean((2, 3)))


def images(count: int = 8, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(count, 3, 9, 9) + shift


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, batches: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(batches):
            model(images()).square().mean().backward()
        optimizer.step()


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.05)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    return


def told(monitor: Monitor) -> list[tuple[str, str, str, str]]:
    """Code, site, severity and diagnosis of every finding, folded ones apart; what broke inside is an error."""
    report = monitor.report()
    broken = [entry for entry in report.not_run if "internal error" in entry.reason]
    assert not broken, broken
    assert not [note for note in report.notes if "could not" in note]
    found: list[Finding] = [g for f in report.findings if f.code in UPDATES for g in (f, *f.also)]
    return sorted((f.code, f.site, f.severity, f.evidence["diagnosis"]) for f in found)


class TestHealthy:
    @pytest.mark.parametrize("every", [1, 2, 100])
    def test_a_plain_training_is_silent(self, every: int) -> None:
        model = Net()
        optimizer = sgd(model)
        with Monitor(model, optimizer, every) as monitor:
            train(model, optimizer)
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(images())
        assert told(monitor) == []
        assert monitor.findings == ()
        assert monitor.steps == 4

    def test_accumulation_where_nothing_is_coupled_is_silent(self) -> None:
        for norm in (nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6)), Net(norm=nn.InstanceNorm2d)):
            optimizer = sgd(norm)
            with Monitor(norm, optimizer, 1) as monitor:
                train(norm, optimizer, batches=4)
            assert told(monitor) == []

    def test_one_norm_called_twice_in_a_forward_is_silent(self) -> None:
        class Siamese(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x[:4]) - super().forward(x[4:])

        model = Siamese()
        optimizer = sgd(model)
        with Monitor(model, optimizer, 1) as monitor:
            train(model, optimizer)
        assert told(monitor) == []

    def test_a_check_during_training_is_none_of_it(self) -> None:
        model = Net()
        optimizer = sgd(model)
        with Monitor(model, optimizer, 1) as monitor:
            for _ in range(3):
                train(model, optimizer, steps=1)
                normscope.check(model, images(), select=["NS304", "NS503"])
        assert told(monitor) == []

    @pytest.mark.parametrize("passes", [1, 5])
    def test_a_dry_run_is_silent(self, passes: int) -> None:
        model = Net()
        optimizer = sgd(model)
        with Monitor(model, optimizer) as monitor:
            with torch.no_grad():
                for _ in range(passes):
                    model(images())
            train(model, optimizer)
        assert told(monitor) == []


class TestRecomputation:
    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("every", [1, 100])
    def test_checkpointing_is_told_from_accumulation(self, reentrant: bool, every: int) -> None:
        model = Net(reentrant=reentrant)
        optimizer = sgd(model)
        with Monitor(model, optimizer, every) as monitor:
            train(model, optimizer)
        assert told(monitor) == [("NS310", "block.1", "warning", "recomputed")]
        (finding,) = [f for f in monitor.findings if f.code == "NS310"]
        assert finding.evidence["updates_per_step"] == 2
        assert finding.evidence["effective_momentum"] == pytest.approx(1 - 0.9**2)
        assert int(model.block[1].num_batches_tracked) == 8, "the counter says the same"
        assert int(model.tail[1].num_batches_tracked) == 4

    def test_equal_batch_statistics_are_seen(self) -> None:
        model = Net(reentrant=False)
        optimizer = sgd(model)
        with Monitor(model, optimizer, 1) as monitor:
            train(model, optimizer)
        look = monitor.looks["block.1"]
        assert (look.calls, look.recomputed, look.repeated) == (1, 1, 1)
        assert (monitor.looks["tail.1"].calls, monitor.looks["tail.1"].repeated) == (1, 0)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_both_together(self, reentrant: bool) -> None:
        model = Net(reentrant=reentrant)
        optimizer = sgd(model)
        with Monitor(model, optimizer, 1) as monitor:
            train(model, optimizer, batches=2)
        assert told(monitor) == [
            ("NS310", "block.1", "warning", "recomputed"),
            ("NS310", "tail.1", "info", "accumulation"),
        ]
        block = next(f for f in monitor.report().findings if f.site == "block.1")
        assert (block.evidence["updates_per_step"], block.evidence["forward_passes_per_step"]) == (4, 2)

    def test_a_cumulative_average_counts_twice_and_stays_right(self) -> None:
        model = Net(reentrant=False, momentum=None)
        optimizer = sgd(model)
        with Monitor(model, optimizer) as monitor:
            train(model, optimizer)
        assert told(monitor) == [("NS310", "block.1", "info", "recomputed")]

    def test_the_fix_holds(self) -> None:
        """The momentum that the finding names, used twice, is the momentum that was meant."""
        model = Net(reentrant=False)
        optimizer = sgd(model)
        with Monitor(model, optimizer) as monitor:
            train(model, optimizer)
        fix = next(f.fix for f in monitor.findings if f.code == "NS310")
        assert fix == (
            "normscope.nn.accumulating(model) leaves recomputations out; or keep the norm out of what is checkpointed, "
            "or set momentum to 0.0513"
        )
        assert pytest.approx(0.9, abs=1e-4) == (1 - 0.0513) ** 2

    def test_without_the_optimizer_it_cannot_be_decided(self) -> None:
        model = Net(reentrant=False)
        optimizer = sgd(model)
        with Monitor(model) as monitor:
            train(model, optimizer)
        assert told(monitor) == []
        reasons = {entry.code: entry.reason for entry in monitor.report().not_run}
        assert reasons["NS310"] == (
            "needs the optimizer's steps: pass optimizer to the monitor, or call its step()"
        )
        with Monitor(model) as monitor:
            for _ in range(3):
                train(model, optimizer, steps=1)
                monitor.step()
        assert told(monitor) == [("NS310", "block.1", "warning", "recomputed")]

    def test_the_first_call_of_step_ends_the_guessing(self) -> None:
        """Until then each forward pass was taken for a step."""
        model = Net()
        optimizer = sgd(model)
        with Monitor(model) as monitor:
            for _ in range(3):
                train(model, optimizer, steps=1, batches=4)
                monitor.step()
        assert told(monitor) == [("NS310", site, "info", "accumulation") for site in ("block.1", "tail.1")]
        finding = next(f for f in monitor.report().findings if f.code == "NS310")
        assert (finding.evidence["updates_per_step"], finding.evidence["steps"]) == (4, 2)
        assert monitor.steps == 3


class TestAccumulation:
    def test_it_is_info_and_names_the_batch(self) -> None:
        model = Net()
        optimizer = sgd(model)
        with Monitor(model, optimizer) as monitor:
            train(model, optimizer, batches=4)
        assert told(monitor) == [("NS310", site, "info", "accumulation") for site in ("block.1", "tail.1")]
        (finding,) = [f for f in monitor.findings if f.code == "NS310"]
        assert finding.message == (
            "the running statistics move 4 times per optimizer step: 4 forward passes come before each step, and each "
            "is normalized by its own 8 samples: accumulating gradients does not enlarge the batch of this norm. The "
            "same at 1 other site."
        )

    @pytest.mark.parametrize("to_none", [True, False])
    @pytest.mark.parametrize("training", ["closure", "attack", "second network", "thrown away", "two views"])
    def test_other_passes_were_blamed_on_accumulation(self, training: str, to_none: bool) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        parameters = list(model.parameters())
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.01)
        if training == "closure":
            optimizer = torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

        def loss(x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        def step(x: torch.Tensor) -> None:
            if training == "attack":  # its gradients reach the weights too, and are thrown away
                for _ in range(3):
                    x = x.detach().requires_grad_()
                    loss(x).backward()
                    assert x.grad is not None
                    x = x + 0.1 * x.grad.sign()
                total = loss(x.detach())
                optimizer.zero_grad(to_none)
                total.backward()
            elif training == "second network":  # real, generated, and the turn of the generator
                optimizer.zero_grad(to_none)
                loss(x).backward()
                loss(x + 0.1 * torch.randn_like(x)).backward()
            elif training == "thrown away":
                for _ in range(3):
                    optimizer.zero_grad(to_none)
                    loss(torch.randn_like(x)).backward()
            else:
                optimizer.zero_grad(to_none)
                (loss(x) - loss(x + 0.1 * torch.randn_like(x))).backward()
            optimizer.step()
            if training == "second network":
                loss(x + 0.1 * torch.randn_like(x)).backward()

        def closure() -> torch.Tensor:
            optimizer.zero_grad(to_none)
            total = loss(torch.randn(16, 8))
            total.backward()
            return total

        with Monitor(model, optimizer, 2, select=UPDATES) as monitor:
            for _ in range(6):
                if training == "closure":
                    optimizer.step(closure)  # type: ignore[arg-type]
                else:
                    step(torch.randn(16, 8))
        diagnosis = "closure" if training == "closure" else "several"
        assert told(monitor) == [("NS310", "1", "info", diagnosis)]
        assert [len(p._post_accumulate_grad_hooks or ()) for p in parameters] == [0] * len(parameters)  # type: ignore[attr-defined]

    def test_gradients_of_different_distributions_are_told_by_ns205_alone(self) -> None:
        """Real and generated samples, each with a backward pass of its own."""
        model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = sgd(model)
        with Monitor(model, optimizer, 1, select=("NS205", "NS310")) as monitor:
            for _ in range(20):
                optimizer.zero_grad()
                for shift in (0.0, 3.0):
                    model(torch.randn(32, 8) + shift).square().mean().backward()
                optimizer.step()
        assert {f.code for f in monitor.report().findings} == {"NS205"}

    @pytest.mark.parametrize("monitor_first", [True, False])
    @pytest.mark.parametrize(("micro_batches", "said"), [(2, []), (1, ["accumulating"])])
    def test_accumulating_is_counted_by_what_it_moves(
        self, monitor_first: bool, micro_batches: int, said: list[str]
    ) -> None:
        model = Net()
        optimizer = sgd(model)
        managers: list[Callable[[], AbstractContextManager[object]]] = [
            lambda: normscope.nn.accumulating(model, micro_batches),
            lambda: Monitor(model, optimizer, every=1),
        ]
        with ExitStack() as stack:
            entered = [stack.enter_context(make()) for make in managers[:: -1 if monitor_first else 1]]
            train(model, optimizer, steps=4, batches=2)
            (monitor,) = (one for one in entered if isinstance(one, Monitor))
        assert int(model.tail[1].num_batches_tracked) == 8 // micro_batches
        assert [diagnosis for _, _, _, diagnosis in told(monitor)] == said * 2

    def test_frozen_norms_under_accumulation_are_silent(self) -> None:
        model = Net()
        optimizer = sgd(model)
        model.block[1].eval()
        model.tail[1].eval()
        with Monitor(model, optimizer, select=UPDATES) as monitor:
            train(model, optimizer, batches=4)
        assert told(monitor) == []

    def test_amp_with_a_skipped_step_is_silent(self) -> None:
        """A gradient scaler that skips one step leaves two batches before the next: the median does not care."""
        model = Net()
        optimizer = sgd(model)
        with Monitor(model, optimizer) as monitor:
            for step in range(6):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(images()).square().mean()
                loss.backward()
                if step != 2:
                    optimizer.step()
        assert told(monitor) == []
        assert monitor.looks["block.1"].dtype == "bfloat16"

    def test_one_batch_passed_twice(self) -> None:
        model = Net()
        optimizer = sgd(model)
        with Monitor(model, optimizer, 1) as monitor:
            for _ in range(3):
                optimizer.zero_grad()
                x = images()
                (model(x) + model(x)).square().mean().backward()
                optimizer.step()
        assert told(monitor) == [("NS310", site, "info", "repeated") for site in ("block.1", "tail.1")]

    def test_one_batch_passed_twice_in_a_forward_is_silent(self) -> None:
        class Twice(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) + super().forward(x)

        model = Twice()
        optimizer = sgd(model)
        with Monitor(model, optimizer, 1) as monitor:
            train(model, optimizer)
        assert told(monitor) == []
        assert monitor.looks["tail.1"].repeated == 1


class TestTeacher:
    def distil(self, prepare: Callable[[nn.Module], object], **options) -> Monitor:
        student, teacher = Net(), Net(**options)
        train(teacher, sgd(teacher), steps=5)
        for parameter in teacher.parameters():
            parameter.requires_grad_(False)
        prepare(teacher)
        optimizer = sgd(student)
        with Monitor({"student": student, "teacher": teacher}, optimizer, select=UPDATES) as monitor:
            for _ in range(4):
                x = images()
                with torch.no_grad():
                    wanted = teacher(x)
                optimizer.zero_grad()
                (student(x) - wanted).square().mean().backward()
                optimizer.step()
        return monitor

    def test_left_in_train_mode(self) -> None:
        monitor = self.distil(nn.Module.train)
        assert told(monitor) == [
            ("NS315", site, "warning", "teacher") for site in ("teacher.block.1", "teacher.tail.1")
        ]
        seen = monitor.findings[0].evidence["updates_without_grad"]
        assert seen == 3, "four passes; the one before the student's first could be a dry run"

    def test_in_eval_it_is_silent(self) -> None:
        assert told(self.distil(nn.Module.eval)) == []

    def test_without_gain_and_bias(self) -> None:
        assert len(told(self.distil(nn.Module.train, affine=False))) == 2

    def test_statistics_that_cannot_move_are_silent(self) -> None:
        """By value, not by flag: momentum 0 moves nothing."""

        def still(teacher: nn.Module) -> None:
            for module in teacher.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.momentum = 0.0

        assert told(self.distil(still)) == []

    def test_a_momentum_encoder_in_train_mode_is_silent(self) -> None:
        student = Net()
        teacher = copy.deepcopy(student)
        optimizer = sgd(student)
        with Monitor({"student": student, "teacher": teacher}, optimizer, select=UPDATES) as monitor:
            for _ in range(4):
                x = images()
                with torch.no_grad():
                    wanted = teacher(x)
                optimizer.zero_grad()
                (student(x) - wanted - 1).square().mean().backward()
                optimizer.step()
                with torch.no_grad():
                    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                        slow.lerp_(fast, 0.1)
        assert told(monitor) == []

    @pytest.mark.parametrize("every", [1, 2])
    def test_a_slow_momentum_encoder_with_two_views_is_silent(self, every: int) -> None:
        """At the first look it has not moved yet; at a gain of 1 a slow average is lost in rounding for long."""
        student = Net()
        teacher = copy.deepcopy(student)
        optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)
        models = {"student": student, "teacher": teacher}
        with Monitor(models, optimizer, every, select=UPDATES) as monitor:
            for _ in range(4):
                x = images()
                with torch.no_grad():
                    wanted = teacher(x) + teacher(x.flip(-1))
                optimizer.zero_grad()
                (student(x) - wanted - 1).square().mean().backward()
                optimizer.step()
                with torch.no_grad():
                    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                        slow.lerp_(fast, 1e-4)
        assert torch.equal(teacher.tail[1].weight, torch.ones(6)), "the gain alone would not show it"
        assert monitor.findings == ()
        assert told(monitor) == []

    def test_an_averaged_copy_is_silent(self) -> None:
        model = Net()
        optimizer = sgd(model)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        with Monitor({"model": model, "averaged": averaged}, optimizer) as monitor:
            for _ in range(3):
                train(model, optimizer, steps=1)
                averaged.update_parameters(model)
            averaged.eval()
            with torch.no_grad():
                averaged(images())
        assert told(monitor) == []


class TestValidation:
    @pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
    def test_in_train_mode(self, guard: Callable[[], object]) -> None:
        model = Net()
        optimizer = sgd(model)
        seen: list[Finding] = []
        with Monitor(model, optimizer, on_finding=seen.append, select=UPDATES) as monitor:
            train(model, optimizer)
            with guard():  # type: ignore[attr-defined]
                for _ in range(5):
                    model(images(shift=20))
        assert told(monitor) == [
            ("NS315", site, "warning", "between steps") for site in ("block.1", "tail.1")
        ]
        assert [f.code for f in seen] == ["NS315"]
        (finding,) = monitor.findings
        assert finding.evidence["updates_without_grad"] == 5
        assert (finding.evidence["updates_with_grad"], finding.evidence["stretches"]) == (4, 1)
        assert finding.evidence["shift_in_standard_deviations"] > 0.5

    def test_it_appears_at_the_next_look(self) -> None:
        model = Net()
        optimizer = sgd(model)
        with Monitor(model, optimizer, every=2) as monitor:
            train(model, optimizer, steps=2)
            with torch.no_grad():
                for _ in range(3):
                    model(images())
            assert monitor.findings == ()
            train(model, optimizer, steps=1)
            assert [f.code for f in monitor.findings if f.code == "NS315"] == ["NS315"]

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_beside_checkpointing(self, reentrant: bool) -> None:
        model = Net(reentrant=reentrant)
        optimizer = sgd(model)
        with Monitor(model, optimizer, 2) as monitor:
            train(model, optimizer)
            with torch.no_grad():
                for _ in range(3):
                    model(images())
            train(model, optimizer)
        assert [(code, diagnosis) for code, _, _, diagnosis in told(monitor)] == [
            ("NS310", "recomputed"), ("NS315", "between steps"), ("NS315", "between steps")
        ]  # fmt: skip
        seen = next(f for f in monitor.report().findings if f.code == "NS315")
        assert seen.evidence["updates_without_grad"] == 3, "those of checkpointing are not among them"

    def test_statistics_that_move_in_eval(self) -> None:
        class Leaky(nn.BatchNorm1d):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.running_mean.lerp_(x.detach().mean(0), 0.1)
                return x - self.running_mean

        model = nn.Sequential(nn.Linear(3, 3), Leaky(3))
        optimizer = sgd(model)
        with Monitor(model, optimizer) as monitor:
            for _ in range(3):
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(torch.randn(4, 3))
        assert told(monitor) == [("NS315", "1", "warning", "eval")]


class OwnNorm(nn.Module):
    """A hand-written norm that keeps its statistics still in eval."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.running_mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.running_mean


def test_hand_written_statistics_that_others_set_are_silent() -> None:
    """An averaged copy in eval: its buffers change between its passes, not in them."""
    model = nn.Sequential(nn.Linear(3, 3), OwnNorm(3))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True).eval()
    optimizer = sgd(model)
    with Monitor({"model": model, "averaged": averaged}, optimizer, 1) as monitor:
        for _ in range(5):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            averaged.update_parameters(model)
            with torch.no_grad():
                averaged(torch.randn(4, 3))
    assert told(monitor) == []


class TestRecalibration:
    def test_update_bn_is_silent(self) -> None:
        model = Net()
        optimizer = sgd(model)
        with Monitor(model, optimizer) as monitor:
            train(model, optimizer)
            update_bn([images() for _ in range(4)], model)
            train(model, optimizer)
            update_bn([images() for _ in range(4)], model)
        assert told(monitor) == []

    def test_reset_and_recompute_is_silent(self) -> None:
        model = Net()
        optimizer = sgd(model)
        with Monitor(model, optimizer) as monitor:
            train(model, optimizer)
            for norm in (model.block[1], model.tail[1]):
                norm.reset_running_stats()
            with torch.no_grad():
                for _ in range(5):
                    model(images())
        assert told(monitor) == []

    def test_a_cumulative_model_is_not_excused_for_ever(self) -> None:
        model = Net(momentum=None)
        optimizer = sgd(model)
        with Monitor(model, optimizer) as monitor:
            train(model, optimizer)
            with torch.no_grad():
                for _ in range(3):
                    model(images())
        assert {diagnosis for *_, diagnosis in told(monitor)} == {"between steps"}


def test_nothing_trained_is_not_judged() -> None:
    model = Net()
    with Monitor(model) as monitor, torch.no_grad():
        for _ in range(5):
            model(images())
    assert told(monitor) == []
    assert ("NS315", "no forward pass with gradients was seen, so nothing is trained yet") in {
        (entry.code, entry.reason) for entry in monitor.report().not_run
    }


def test_a_plain_check_says_what_it_needs() -> None:
    report = normscope.check(Net(), images())
    reasons = {entry.code: entry.reason for entry in report.not_run}
    for code in ("NS206", "NS310", "NS312", "NS315"):
        assert reasons[code] == "needs training: normscope.Monitor"


@pytest.mark.parametrize("guard", [nullcontext, torch.no_grad])
def test_a_forward_that_raises_counts_for_nothing(guard: Callable[[], object]) -> None:
    model = Net()
    optimizer = sgd(model)
    with Monitor(model, optimizer, select=UPDATES) as monitor:
        for _ in range(3):
            with guard(), pytest.raises(RuntimeError):  # type: ignore[attr-defined]
                model(torch.randn(2, 5, 9, 9))
            train(model, optimizer, steps=1)
    assert told(monitor) == []


def test_a_module_that_says_what_it_is_may_name_its_tensors_as_it_likes() -> None:
    class Stated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("spread", torch.ones(4))

        def __normscope__(self, input_ndim: int | None) -> Reading:
            held = {"weight": self.gain, "running_mean": self.mean, "running_var": self.spread}
            now = "batch" if self.training else "running"
            spec = families.batch_norm(bias=False)
            return Reading(spec, "Stated", held, now, "batch", "running", ("train",))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.batch_norm(x, self.mean, self.spread, self.gain, None, self.training)

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Stated()), torch.randn(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, 1) as monitor:
        for _ in range(6):
            model(x).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model(5 * x + 10)  # moves the statistics
    assert monitor.looks["1"].running_variance > 1
    assert "NS315" in {finding.code for finding in monitor.report().findings}
    report = check(model.eval(), x)
    assert [site.spec is not None for site in report.sites] == [True]
    assert "NS405" in report.passed
