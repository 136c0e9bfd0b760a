"""Averages of models keep statistics and counters right; sensitivity to stored state is what a run shows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import normscope
from normscope.doctor.refusals import Refused
from normscope.errors import BadInput
from normscope.transforms import average, check_average, recalibrate, state_sensitivity
from normscope.transforms.recalibrate import RecalibrationReport

torch.set_num_threads(1)
X = 2 + torch.randn(40, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Flatten()
    )
    for _ in range(3 + 2 * seed**2):
        model(X + seed + torch.randn_like(X))
    return model


MODELS = [net(0), net(1), net(2)]


# -- average -----------------------------------------------------------------------------------------------------------


def test_parameters_are_the_mean_and_buffers_the_last() -> None:
    before = [copy.deepcopy(model.state_dict()) for model in MODELS]
    mean, report = average(MODELS)
    for name, parameter in mean.named_parameters():
        wanted = torch.stack([state[name].double() for state in before]).mean(0).float()
        # rounded once from float64, whose sum may lie on the other side of a tie
        torch.testing.assert_close(parameter.detach(), wanted, rtol=2.0**-23, atol=1e-9)
    for name, buffer in mean.named_buffers():
        assert torch.equal(buffer, before[-1][name])
        assert buffer.dtype == before[-1][name].dtype
    for model, state in zip(MODELS, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [(site.name, site.reason) for site in report.left] == [
        (
            name,
            "its statistics are the last model's; data=... takes statistics of the averaged model's own activations",
        )
        for name in ("1", "4")
    ]


def test_weights() -> None:
    mean, _ = average(MODELS, [1, 2, 5])
    wanted = sum(w * model[0].weight.double() for w, model in zip((0.125, 0.25, 0.625), MODELS, strict=True))
    torch.testing.assert_close(mean[0].weight.double(), wanted, rtol=2.0**-23, atol=1e-9)
    same, _ = average([MODELS[1]])
    assert all(
        torch.equal(a, b)
        for a, b in zip(same.state_dict().values(), MODELS[1].state_dict().values(), strict=True)
    )


def test_with_data_the_statistics_are_those_of_the_average() -> None:
    mean, report = average(MODELS, data=list(X.split(16)), method="layerwise")
    assert isinstance(report, RecalibrationReport)
    wanted, _ = recalibrate(average(MODELS)[0], list(X.split(16)), method="layerwise")
    for name, value in wanted.state_dict().items():
        assert torch.equal(value, mean.state_dict()[name])
    inputs = mean[0](X).transpose(0, 1).flatten(1)
    torch.testing.assert_close(mean[1].running_mean, inputs.mean(1).detach(), rtol=1e-4, atol=1e-5)
    assert check_average(mean, MODELS) == ()


def test_the_checker_finds_averaged_buffers() -> None:
    wrong = AveragedModel(MODELS[0], use_buffers=True)
    for model in MODELS:
        wrong.update_parameters(model)
    found = check_average(wrong.module, MODELS)
    assert [line.partition(":")[0] for line in found] == [
        f"{site}.{name}" for site in (1, 4) for name in ("running_mean", "running_var", "num_batches_tracked")
    ]
    assert found[0] == (
        "1.running_mean: is the mean of the models' own; take statistics of the averaged model: transforms.recalibrate"
    )
    wrong.module[1].num_batches_tracked = torch.tensor(4.5)
    assert "1.num_batches_tracked: 4.5 of dtype float32; a counter is a whole number" in check_average(
        wrong.module, MODELS
    )


def test_the_checker_is_silent_where_buffers_are_copied() -> None:
    assert check_average(average(MODELS)[0], MODELS) == ()
    same = [copy.deepcopy(MODELS[0]) for _ in range(3)]
    assert check_average(average(same)[0], same) == (), "equal statistics have themselves as mean"


def test_the_checker_finds_the_weights_of_an_exponential_average() -> None:
    ema = AveragedModel(MODELS[0], multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=True)
    for model in MODELS:
        ema.update_parameters(model)
    found = check_average(ema, MODELS)  # the wrapper itself
    assert found[-1] == (
        "running statistics: are a weighted mean of the models' own (weights 0.56, 0.19, 0.25); take statistics of the "
        "averaged model: transforms.recalibrate"
    )
    plain = AveragedModel(MODELS[0])
    for model in MODELS:
        plain.update_parameters(model)
    assert check_average(plain, MODELS) == (), "torch copies the buffers of the last"
    close = [copy.deepcopy(MODELS[0]) for _ in range(3)]
    close[1][1].running_mean += 1e-6
    assert check_average(average(close)[0], close) == ()


def test_average_errors() -> None:
    with pytest.raises(BadInput) as caught:
        average([])
    assert str(caught.value) == "models is empty: give the checkpoints to average, oldest first"
    with pytest.raises(BadInput) as caught:
        average(MODELS, [1.0, 0.0, 2.0])
    assert str(caught.value) == "weights are 3 numbers above 0, one for each model; got [1.0, 0.0, 2.0]"
    with pytest.raises(BadInput) as caught:
        average([nn.Linear(2, 3), nn.Linear(2, 4)])
    assert str(caught.value) == (
        "model 2 is of another architecture than model 1: bias has shape (4,) and (3,)"
    )
    with pytest.raises(BadInput) as caught:
        check_average(MODELS[0], MODELS[:1])
    assert str(caught.value) == "an average is compared with the models it was made of, at least two; got 1"


# -- state sensitivity -------------------------------------------------------------------------------------------------


def states() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    a = copy.deepcopy(MODELS[0].state_dict())
    b = copy.deepcopy(a)
    b["4.running_var"] *= 4
    return a, b


def test_a_known_difference() -> None:
    """Four times the variance at the last norm: its output, less the bias (0 here), is half; so the model's."""
    a, b = states()
    found = normscope.state_sensitivity(MODELS[0], X, a, b)
    # eps against variances of about 0.1 and float32
    assert found.output == pytest.approx(0.5, abs=1e-3)
    assert [(s.site, s.alone) for s in found.sites] == [("1", 0.0), ("4", found.output)]
    assert found.sites[0].output == 0.0
    assert found.sites[1].output == pytest.approx(0.5, abs=1e-3)


def test_sites_alone_against_runs_by_hand() -> None:
    a, b = MODELS[0].state_dict(), MODELS[2].state_dict()
    found = state_sensitivity(MODELS[0], X, a, b)

    def run(*taken: str) -> torch.Tensor:
        model = copy.deepcopy(MODELS[0])
        swapped = {k: b[k] if k.partition(".")[0] in taken and "running" in k else v for k, v in a.items()}
        model.load_state_dict(swapped)
        return model.eval()(X).double().detach()

    size = run().square().sum().sqrt()
    for wanted, value in (
        (run("1", "4"), found.output),
        (run("1"), found.sites[0].alone),
        (run("4"), found.sites[1].alone),
    ):
        # the same operations on the same numbers, sums of 640 squares
        assert value == pytest.approx(float((wanted - run()).square().sum().sqrt() / size), rel=1e-9)
    assert "it says nothing of what was learned, and not which set is right" in str(found)
    assert str(found).startswith(f"state sensitivity: outputs differ by {found.output:.2g} of their size")


def test_it_leaves_the_model_alone() -> None:
    a, b = states()
    model = copy.deepcopy(MODELS[0]).train()
    before = copy.deepcopy(model.state_dict())
    same = state_sensitivity(model, X, a, a)
    assert (same.output, [s.alone for s in same.sites]) == (0.0, [0.0, 0.0])
    state_sensitivity(model, X, a, b)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_sensitivity_errors() -> None:
    a, b = states()
    del b["4.running_var"]
    with pytest.raises(BadInput) as caught:
        state_sensitivity(MODELS[0], X, a, b)
    assert str(caught.value) == (
        "state_b lacks 4.running_var, which the other set or the norm has; give both sets whole"
    )
    with pytest.raises(BadInput) as caught:
        state_sensitivity(MODELS[0], X, a, a | {"1.running_mean": torch.zeros(3)})
    assert str(caught.value) == "state_b: 1.running_mean has shape (3,), and the model's has (6,)"
    with pytest.raises(BadInput) as caught:
        state_sensitivity(MODELS[0], X, a, a | {"1.running_mean": torch.full((6,), float("nan"))})
    assert str(caught.value) == "state_b: 1.running_mean is not finite"
    with pytest.raises(BadInput) as caught:
        state_sensitivity(MODELS[0], X, {}, {"bn.running_mean": torch.zeros(3)})
    assert str(caught.value) == (
        "neither state has a statistic of this model; its norms store 1.running_mean, 4.running_mean"
    )


def test_an_average_of_lazy_parameters_ended_in_a_runtime_error() -> None:
    made, lazy = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.LazyLinear(2))
    for models in ([lazy, made], [made, lazy], [AveragedModel(made), lazy]):
        with pytest.raises(Refused) as caught:
            average(models)
        assert str(caught.value) == (
            "0.weight is lazy: it gets its shape in the first forward pass, which also changes the module's class. "
            "Run the model once on a batch, then check it"
        )
