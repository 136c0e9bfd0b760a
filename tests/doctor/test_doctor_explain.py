"""``explain`` names the step where a broken model first breaks, and says nothing against a sound one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normscope
from normscope import demo
from normscope.doctor.diagnosis.gradients import _model
from normscope.doctor.diagnosis.step import Case
from normscope.doctor.session import Session
from normscope.doctor.subject import Subject
from normscope.errors import BadInput

torch.set_num_threads(1)


def x(samples: int = 32, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))


def net(norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 4))


class EpsOutside(nn.Module):
    """The textbook layer norm: unbiased deviation, eps beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return self.weight * centered / (x.std(-1, keepdim=True) + self.eps) + self.bias


class NoEps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


class Forgetful(torch.autograd.Function):
    """Layer norm whose backward leaves out the projection on the output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        scale = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        ctx.save_for_backward(scale)
        return (x - x.mean(-1, keepdim=True)) * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (scale,) = ctx.saved_tensors
        return gradient * scale - (gradient * scale).mean(-1, keepdim=True)


class WrongBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Forgetful.apply(x)
        return out


class Inlined(nn.Module):
    """The same, called in a larger forward, where no module stands for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(Forgetful.apply(self.first(self.norm(x))).tanh())
        return out


class WrongAxis(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(4, 6, 1), nn.LayerNorm(10), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).tanh().mean(2))


def stale() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    for _ in range(80):
        model(torch.randn(64, 8))
    return model.eval(), 5 + 3 * x(64)


def near_zero() -> tuple[nn.Module, torch.Tensor]:
    model, inputs = net(nn.LayerNorm(16, eps=1e-12)), x(64)
    with torch.no_grad():
        model[0].bias.zero_()
    inputs[5] *= 1e-5
    return model, inputs


BROKEN: dict[str, tuple[Any, int, str]] = {
    "wrong axis": (lambda: (WrongAxis(), torch.randn(16, 4, 10)), 1, "norm"),
    "stale statistics": (stale, 2, "1"),
    "near-zero denominators": (near_zero, 3, "1"),
    "wrong gradient": (lambda: (net(WrongBackward()), x()), 4, "1"),
    "wrong gradient, no module": (lambda: (Inlined(), x()), 4, ""),
    "eps outside": (lambda: (net(EpsOutside()), x()), 5, "1"),
    "no eps": (lambda: (net(NoEps()), x()), 5, "1"),
    "eps 0": (lambda: (net(nn.LayerNorm(16, eps=0.0)), x()), 5, "1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_first_step_that_fails(name: str) -> None:
    make, number, site = BROKEN[name]
    model, inputs = make()
    explanation = normscope.explain(model, inputs)
    first = explanation.first
    assert first is not None, str(explanation)
    assert (first.number, first.site) == (number, site), str(explanation)
    assert first.todo
    last = str(explanation).replace("\n", " ").rpartition("Begin with ")[2]
    assert last.startswith(f"step {number}, {first.title}{f' at {site}' if site else ''}: ")
    assert explanation.steps[5].follows == f"not looked at: step {number} comes first."


class Mixed(nn.Module):
    """Batch, group and instance norm behind ReLUs with zero biases, a functional norm, and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3)
        self.batch, self.group = nn.BatchNorm2d(8), nn.GroupNorm(4, 16)
        self.instance, self.head = nn.InstanceNorm2d(16, affine=True), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.batch(self.a(x)).relu(), 2)
        x = self.instance(self.group(self.b(x)).relu()).relu().mean((2, 3))
        return self.head(F.layer_norm(x, (16,)))


def sound() -> dict[str, tuple[nn.Module, Any]]:
    torch.manual_seed(0)
    mixed = Mixed()
    for _ in range(60):
        mixed(torch.randn(32, 3, 12, 12))
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    return {
        "layer norm": (net(nn.LayerNorm(16)), x()),
        "rms norm": (net(nn.RMSNorm(16)), x()),
        "bert's eps": (net(nn.LayerNorm(16, eps=1e-12)), x()),
        "keras's eps": (net(nn.LayerNorm(16, eps=1e-3)), x()),
        "mixed": (mixed, torch.randn(16, 3, 12, 12)),
        "encoder": (encoder.eval(), torch.randn(8, 5, 16)),
        "bfloat16": (net(nn.LayerNorm(16)).bfloat16(), x().bfloat16()),
        "no norm": (nn.Linear(8, 2), x()),
    }


SOUND = ("layer norm", "rms norm", "bert's eps", "keras's eps", "mixed", "encoder", "bfloat16", "no norm")


@pytest.mark.parametrize("name", SOUND)
def test_nothing_against_a_sound_model(name: str) -> None:
    model, inputs = sound()[name]
    explanation = normscope.explain(model, inputs)
    assert explanation.ok, str(explanation)
    assert str(explanation).rstrip().rpartition("\n")[2].startswith("No step failed")


MAPS = (
    lambda: nn.BatchNorm2d(4, momentum=None),
    lambda: nn.BatchNorm2d(4, affine=False),
    lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    lambda: nn.InstanceNorm2d(4),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.LayerNorm([4, 5, 5]),
    lambda: normscope.nn.BatchNorm2d(4),
    lambda: normscope.nn.ChannelsFirstLayerNorm(4),
    lambda: normscope.nn.PixelNorm(),
    lambda: normscope.nn.FrozenBatchNorm(4),
)
ROWS = (
    lambda: nn.BatchNorm1d(6),
    lambda: nn.LayerNorm(6, elementwise_affine=False),
    lambda: nn.RMSNorm(6),
    lambda: normscope.nn.LayerNorm(6),
    lambda: normscope.nn.RMSNorm(6, convention="gemma"),
    lambda: normscope.nn.ScaleNorm(6),
    lambda: normscope.nn.L2Norm(),
)


@pytest.mark.parametrize(("norms", "shape"), [(MAPS, (4, 5, 5)), (ROWS, (6,))])
def test_every_norm_is_sound_alone(norms: Any, shape: tuple[int, ...]) -> None:
    """Whatever its axes, parameters and the size of its small input."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for make in norms for part in (make(), nn.Tanh())))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    for _ in range(50):
        model(torch.randn(16, *shape))
    explanation = normscope.explain(model, torch.randn(16, *shape))
    assert [explanation.steps[i].ok for i in (0, 3, 4)] == [True] * 3, str(explanation)
    assert any(f"{len(norms)} sites of {len(norms)} ran alone" in line for line in explanation.steps[0].seen)


def test_the_tiny_tensor_can_be_computed_by_hand() -> None:
    """One 1 among n zeros: mean 1/n, variance (n - 1) / n^2."""
    explanation = normscope.explain(net(nn.LayerNorm(16)), x())
    value = (1 - 1 / 16) / (15 / 256 + 1e-5) ** 0.5
    (line, spread, *_) = explanation.steps[0].seen
    assert f"(1 - 0.0625) / 0.242 = {value:.3g}" in line
    assert line.endswith(f"the module gives {value:.3g}.")
    assert spread == "one changed element moves outputs of 1 along axis 1."
    batch = normscope.explain(nn.BatchNorm1d(8), x()).steps[0].seen[1]
    assert batch.endswith("along axis 0; axis 0 holds the samples, so they are mixed.")


def test_where_eps_stands_is_told_by_size() -> None:
    seen = normscope.explain(net(EpsOutside()), x()).steps[4].seen[0]
    assert "by its eps 1e-06 it should be 0.001; that is eps beside the root" in seen


class OtherEps(nn.Module):
    """A batch norm by hand whose fault is in evaluation alone."""

    def __init__(self, evaluation: Any) -> None:
        super().__init__()
        self.eps, self.evaluation = 1e-5, evaluation
        self.register_buffer("running_mean", torch.zeros(16))
        self.register_buffer("running_var", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return (x - self.running_mean) / self.evaluation(self.running_var)
        mean, var = x.mean(0), x.var(0, unbiased=False)
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(var * len(x) / (len(x) - 1), 0.1)
        return (x - mean) / (var + self.eps).sqrt()


AS_TRAINING = "by its eps 1e-05 it should be 0.00316."
IN_EVALUATION = {
    "as in training": (lambda var: (var + 1e-5).sqrt(), None),
    "another eps": (lambda var: var.sqrt() + 0.1, "nearly constant input is divided by 0.1, " + AS_TRAINING),
    "none": (lambda var: var.sqrt(), "input 0 everywhere gives an output that is NaN."),
}


@pytest.mark.parametrize("name", IN_EVALUATION)
def test_a_fault_in_evaluation_alone_is_seen(name: str) -> None:
    evaluation, told = IN_EVALUATION[name]
    model = net(OtherEps(evaluation))
    step = normscope.explain(model, x()).steps[4]
    assert (step.ok, step.site) == ((True, "") if told is None else (False, "1")), step
    if told is not None:
        finite = "" if name == "none" else "finite on constant input; "
        assert f"1 in evaluation: {finite}{told}" in step.seen


def test_the_culprit_of_a_wrong_gradient_is_named() -> None:
    step = normscope.explain(Inlined(), x()).steps[3]
    assert any("written by hand" in line and "Forgetful" in line for line in step.seen)
    assert "Forgetful" in step.todo


def test_a_check_names_the_norms_whose_backward_is_written_by_hand() -> None:
    told = [note for note in normscope.check(net(WrongBackward()), x()).notes if "gradients" in note]
    assert told == [
        f"gradients of 1 ({__name__}.Forgetful) were not checked: --explain (or normscope.explain) compares a backward "
        "written by hand with differences"
    ]
    both = nn.Sequential(WrongBackward(), net(EpsOutside()))
    (note,) = (note for note in normscope.check(both, x()).notes if "gradients" in note)
    assert note.startswith("gradients of 0 (")
    assert "1.1" not in note


def test_kinks_are_no_wrong_gradients() -> None:
    """ReLUs, pooling and dead units, on seeds that were not looked at before."""
    for seed in range(1000, 1012):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.InstanceNorm2d(16, affine=bool(seed % 2)), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8), nn.ReLU6(), nn.Flatten(), nn.Linear(8 * 9, 3),
        )  # fmt: skip
        inputs = torch.randn(8, 3, 12, 12)
        with Session(model) as session:
            subject = Subject(model=model, session=session, sites=[], args=(inputs,), batch_size=8)
            slope = _model(Case(subject, normscope.Report((), (), (), ())))
        assert slope is not None
        assert not slope.wrong, slope


class SwitchesInline(nn.Module):
    """A batch norm, or a division by a stored maximum, inlined in the forward; nothing about it is a module."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.first, self.last, self.batch_norm = nn.Linear(8, 16), nn.Linear(16, 4), batch_norm
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("spread", torch.full((16,), 0.05))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not self.batch_norm:
            x = x / (x.abs().amax(0) if self.training else self.spread)
        elif self.training:
            x = (x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + 1e-5)
        else:
            x = (x - self.mean) / torch.sqrt(self.spread + 1e-5)
        return self.last(x.tanh())


class StoredMaximum(nn.Module):
    """A module whose buffer is named like a statistic, and which is no norm that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_var", torch.full((16,), 0.05))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.abs().amax(0) if self.training else self.running_var)


UNEXPLAINED = (
    "not decided: no site found explains the difference; a norm inlined in a forward (under `if self.training`), or a "
    "branch of training alone, would. Make the norm a module of its own, so that it is found."
)


@pytest.mark.parametrize(
    ("make", "follows"),
    [
        (lambda: SwitchesInline(False), UNEXPLAINED),
        (lambda: net(StoredMaximum()), UNEXPLAINED),
    ],
)
def test_a_gap_of_train_to_eval_that_no_site_explains_is_not_in_order(make: Any, follows: str) -> None:
    torch.manual_seed(0)
    model = make()
    given = x()
    outputs = [getattr(model, mode)()(given).detach() for mode in ("eval", "train")]
    assert (outputs[1] - outputs[0]).square().mean() > 0.1 * outputs[0].square().mean()
    step = normscope.explain(model, given).steps[1]
    assert (step.ok, step.follows) == (None, follows)
    assert "after train() outputs differ by " in step.seen[1]


def test_stored_statistics_that_training_never_moves_fail_the_second_step_and_not_the_fifth() -> None:
    torch.manual_seed(0)
    explanation = normscope.explain(SwitchesInline(True), x())
    assert explanation.first is explanation.steps[1]
    assert explanation.steps[1].follows.startswith(
        "NS106 custom-norm-deviates at hand-written: The norm written inside the forward of the model: training "
        "normalizes by its batch, evaluation by stored statistics that no call in training moves."
    )
    assert explanation.steps[4].ok is not False


def test_dropout_is_no_gap_and_other_noise_hides_one() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0.1 * torch.randn_like(x) if self.training else x

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    quiet = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Dropout(0.5), nn.Linear(8, 2))
    step = normscope.explain(quiet, torch.randn(16, 5, 8)).steps[1]
    assert (step.ok, step.follows) == (
        True,
        "no site keeps statistics, and train and eval give the same outputs.",
    )
    noisy = normscope.explain(nn.Sequential(net(nn.LayerNorm(16)), Noise()), x()).steps[1]
    assert noisy.ok is None
    assert noisy.follows.startswith("not decided: train mode is random beside dropout (another seed changes ")


def test_the_learning_rate_comes_last() -> None:
    model = net(nn.LayerNorm(16))
    calm = normscope.explain(model, x(), optimizer=torch.optim.SGD(model.parameters(), lr=1e-4)).steps[5]
    assert (calm.ok, calm.follows) == (
        True,
        "one step moves little of each weight; the rate is no obvious fault.",
    )
    wild = normscope.explain(model, x(), optimizer=torch.optim.SGD(model.parameters(), lr=50.0)).steps[5]
    assert (wild.ok, wild.todo) == (False, "take a smaller learning rate, or warm up")


def test_the_demos() -> None:
    for name, first in (("faulty", 1), ("healthy", None)):
        model, inputs, targets, optimizer = demo.load(name)
        explanation = normscope.explain(model, inputs, targets, loss_fn=demo.loss, optimizer=optimizer)
        assert (explanation.first.number if explanation.first else None) == first, str(explanation)
    assert [step.ok for step in explanation.steps] == [True] * 6


@pytest.mark.parametrize("name", ["mixed", "layer norm"])
def test_nothing_is_left_behind(name: str) -> None:
    model, inputs = sound()[name]
    model.train()
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    before, random = inputs.clone(), torch.random.get_rng_state()
    normscope.explain(model, inputs)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert modes == [m.training for m in model.modules()]
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(before, inputs)
    assert torch.equal(random, torch.random.get_rng_state())


def test_inputs_that_are_not_finite_broke_the_denominators() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.LayerNorm(8))
    steps = normscope.explain(model, torch.full((16, 8), float("inf"))).steps
    assert not any("internal error" in line for step in steps for line in step.seen)
    assert steps[2].follows == "denominators of 1 are not all finite on this batch."
    assert (
        "the whole model in float64 was not compared: ValueError: its output is not finite." in steps[3].seen
    )
    assert steps[3].ok


def test_needs_data() -> None:
    with pytest.raises(
        BadInput, match=r"^explain runs the model on data: pass inputs, a batch of 8 or more samples$"
    ):
        normscope.explain(net(nn.LayerNorm(16)), None)
