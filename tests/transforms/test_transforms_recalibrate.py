"""Recalibrated statistics are those of the data, nothing else moves, and getting worse is seen."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscope
import normscope.nn as own
from normscope.doctor.refusals import Refused
from normscope.errors import BadInput, ModelError
from normscope.transforms import freeze, recalibrate

torch.set_num_threads(1)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5),
        nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, momentum=0.01), nn.Flatten(), nn.Linear(36, 5),
    ).double()  # fmt: skip


X = 3 + 2 * seeded(23, 3, 7, 7)
CUTS = ([23], [8, 8, 7], [1, 22], [5, 4, 3, 11])


def snapshot(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                found[f"{path}.{key}"] = copy.copy(value)
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            found[f"{path}.{key}"] = None if tensor is None else (tensor.data_ptr(), tensor.tolist())
    return found


def by_hand(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """NumPy, from the formulas."""
    a = x.detach().numpy()
    if isinstance(norm, nn.modules.instancenorm._InstanceNorm):
        axes = tuple(range(2, a.ndim))
        return torch.from_numpy(a.mean(axes).mean(0)), torch.from_numpy(a.var(axes, ddof=1).mean(0))
    axes = (0, *range(2, a.ndim))
    return torch.from_numpy(a.mean(axes)), torch.from_numpy(a.var(axes, ddof=1))


# -- the numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(3), (23, 3)),
        (nn.BatchNorm1d(3, momentum=None), (23, 3, 4)),
        (nn.BatchNorm3d(3, affine=False), (23, 3, 2, 3, 2)),
        (nn.SyncBatchNorm(3), (23, 3, 4)),
        (nn.InstanceNorm2d(3, track_running_stats=True), (23, 3, 2, 5)),
        (own.BatchNorm2d(3), (23, 3, 2, 5)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else str(v),
)
@pytest.mark.parametrize("method", ["exact", "layerwise"])
def test_one_norm_gets_the_statistics_of_all_elements(
    norm: nn.Module, shape: tuple[int, ...], sizes: list[int], method: str
) -> None:
    if method == "exact" and 1 in sizes and len(shape) == 2:
        pytest.skip("torch raises where training sees one value a channel")
    x = 1e3 + 2 * seeded(*shape)
    norm = copy.deepcopy(norm).double()
    new, _ = recalibrate(norm, list(x.split(sizes)), method=method)
    mean, var = by_hand(norm, x)
    # sums of at most 276 numbers near 1e3; the variance is of centered numbers near 2
    torch.testing.assert_close(new.running_mean, mean, rtol=276 * 2.0**-52, atol=0)
    torch.testing.assert_close(new.running_var, var, rtol=1e-11, atol=0)
    counts = not isinstance(norm, nn.InstanceNorm2d)
    assert new.num_batches_tracked == (len(sizes) if counts else 0)


def test_layerwise_is_what_deployment_computes() -> None:
    """Each norm has the statistics of what comes into it in eval, for any cut of the data."""
    found = [recalibrate(net(), list(X.split(sizes)), method="layerwise")[0] for sizes in CUTS]
    for model in found:
        model.eval()
        for k in (1, 5):
            mean, var = by_hand(model[k], model[:k](X))
            # float64, two small layers of a few dozen products before
            torch.testing.assert_close(model[k].running_mean, mean, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(model[k].running_var, var, rtol=1e-11, atol=0)


def test_exact_sees_what_training_sees() -> None:
    """The second norm's input comes from batches normalized by themselves, dropout off."""
    sizes = [8, 8, 7]
    new, _ = recalibrate(net(), list(X.split(sizes)))
    trained = net().train()
    trained[3].eval()
    inputs = torch.cat([trained[:5](batch) for batch in X.split(sizes)])
    mean, var = by_hand(new[5], inputs)
    torch.testing.assert_close(new[5].running_mean, mean, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(new[5].running_var, var, rtol=1e-11, atol=0)


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_ema_is_what_training_would_store(momentum: float | None) -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(3, momentum=momentum), nn.InstanceNorm2d(3, track_running_stats=True)
    ).double()
    batches = list(X.split([8, 8, 7]))
    new, _ = recalibrate(model, batches, method="ema")
    trained = copy.deepcopy(model).train()
    for batch in batches:
        trained(batch)
    for (name, value), wanted in zip(new.named_buffers(), trained.buffers(), strict=True):
        # three updates by sums of some thousand numbers in float64
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12, msg=name)


def test_a_norm_called_twice_takes_all_its_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.norm(x) + self.norm(y)

    new, _ = recalibrate(Twice().double(), (X, X + 10))
    mean, _ = by_hand(new.norm, torch.cat([X, X + 10]))
    torch.testing.assert_close(new.norm.running_mean, mean, rtol=1e-12, atol=0)


def test_half_models_are_summed_in_float64() -> None:
    x = (64 + seeded(4096, 2)).bfloat16()
    model = nn.Sequential(own.BatchNorm1d(2)).bfloat16()
    new, _ = recalibrate(model, list(x.split(100)))
    mean, var = by_hand(new[0], x.double())
    # the statistics are float32
    torch.testing.assert_close(new[0].running_mean.double(), mean, rtol=2.0**-23, atol=0)
    torch.testing.assert_close(new[0].running_var.double(), var, rtol=2.0**-23, atol=0)


# -- nothing else moves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("method", ["exact", "ema", "layerwise"])
def test_only_the_statistics_move(method: str, mode: bool) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.register_buffer("calls", torch.zeros(()))
            self.seen = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen += 1
            return self.inner(x)

    model = Counting().train(mode)
    before, rng = snapshot(model), torch.get_rng_state()
    data = list(X.split(8))
    copies = [batch.clone() for batch in data]
    new, _ = recalibrate(model, data, method=method)
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(a, b) for a, b in zip(data, copies, strict=True))
    same, _ = recalibrate(model, data, method=method, inplace=True)
    assert same is model
    after = snapshot(model)
    moved = {key for key in after if after[key] != before.get(key)}
    state = {"running_mean", "running_var", "num_batches_tracked"}
    assert moved == {f"inner.{k}.{name}" for k in (1, 5) for name in state} | {".normscope_recalibration"}
    assert all(after[key][0] == before[key][0] for key in moved if key.startswith("inner")), "the same memory"
    for key, value in new.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


@pytest.mark.parametrize("method", ["exact", "ema", "layerwise"])
def test_an_error_leaves_all_as_it_was(method: str) -> None:
    model = net()
    before = snapshot(model)

    def broken() -> Iterator[Tensor]:
        yield X[:8]
        raise OSError("disk gone")

    for data in (broken(), [X[:8], torch.zeros(4, 7, 7)], [X[:8], X[:4] * float("inf")]):
        with pytest.raises((OSError, ModelError, BadInput)):
            recalibrate(model, data, method=method, inplace=True)
        assert snapshot(model) == before


def test_a_rehearsal() -> None:
    model = net()
    before = snapshot(model)
    same, report = recalibrate(model, X, dry_run=True, held_out=X)
    assert same is model
    assert snapshot(model) == before
    assert report.held_out.moved > 0
    assert "recalibrate: 2 of 2 normalizations would be done (rehearsed, the model is as it was)" in str(
        report
    )


def test_frozen_statistics_stay() -> None:
    model, _ = freeze(net(), select="1")
    new, report = recalibrate(model, X)
    assert torch.equal(new[1].running_mean, model[1].running_mean)
    assert [(site.name, site.reason) for site in report.left] == [
        ("1", "its statistics are frozen: unfreeze them first")
    ]
    assert [site.name for site in report.done] == ["5"]


# -- data --------------------------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, image: Tensor, scale: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        assert labels is None, "labels are not taken"
        return self.net(image if scale is None else image * scale)


LABELS = torch.zeros(23)


@pytest.mark.parametrize(
    ("model", "data", "inputs", "note"),
    [
        (net(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, LABELS), batch_size=8), None, True),
        (net(), [(X, LABELS)], None, True),
        (net(), X, None, False),
        (net(), X.numpy(), None, False),
        (Named(), {"image": X, "labels": LABELS, "name": ["a"] * 23}, None, True),
        (Named(), (X,), None, False),
        (Named(), [(X, LABELS)], lambda batch: batch[0], False),
        (Named(), [(X, LABELS)], lambda batch: {"image": batch[0]}, False),
        (net(), (batch for batch in X.split(8)), None, False),
    ],
    ids=["loader", "pairs", "tensor", "array", "dict", "tuple", "inputs", "inputs to dict", "generator"],
)  # fmt: skip
def test_forms_of_data(model: nn.Module, data: Any, inputs: Any, note: bool) -> None:
    new, report = recalibrate(model, data, inputs=inputs)
    mean, _ = by_hand(net()[1], net()[0](X))
    norm = next(m for m in new.modules() if isinstance(m, nn.BatchNorm2d))
    torch.testing.assert_close(norm.running_mean, mean, rtol=1e-12, atol=1e-12)
    assert report.provenance["samples"] == 23
    assert bool(report.notes) == note


def test_what_was_not_read_is_told() -> None:
    _, report = recalibrate(net(), [(X, LABELS)])
    assert report.notes == ("1 of 2 values of each batch was passed to the model, the others were not read",)
    _, report = recalibrate(Named(), {"image": X, "labels": LABELS, "name": ["a"] * 23})
    assert report.notes == ("not passed to the model: labels, name",)


def test_the_fingerprint_is_of_the_set_of_samples() -> None:
    def fingerprint(data: Any) -> str:
        return recalibrate(nn.BatchNorm2d(3).double(), data)[1].provenance["data"]

    whole = fingerprint(X)
    assert fingerprint(list(X.flip(0).split([3, 20]))) == whole
    other = X.clone()
    other[5, 0, 0, 0] = torch.nextafter(other[5, 0, 0, 0], torch.tensor(9.0, dtype=torch.float64))
    assert fingerprint(other) != whole
    assert fingerprint(torch.cat([X, X[:1]])) != whole


def test_provenance_stays_with_the_model() -> None:
    model = net()
    new, report = recalibrate(model, X, source="hospital B", selection="the first 23 of March")
    kept = new.normscope_recalibration
    assert kept == report.provenance
    assert (kept["source"], kept["selection"], kept["method"]) == (
        "hospital B",
        "the first 23 of March",
        "exact",
    )
    assert kept["previous"]["1"] == {
        "running_mean": [0.0] * 6,
        "running_var": [1.0] * 6,
        "num_batches_tracked": 0.0,
    }
    assert pickle.loads(pickle.dumps(new)).normscope_recalibration == kept
    assert list(new.state_dict()) == list(model.state_dict())
    document = json.loads(report.to_json())
    assert document["provenance"] == kept
    assert document["shifts"][0]["site"] == "1"


# -- getting worse is seen ---------------------------------------------------------------------------------------------


def test_worse_is_worse() -> None:
    model, _ = recalibrate(net(), X)
    labels = model.eval()(X).argmax(1)

    def accuracy(subject: nn.Module) -> float:
        assert not subject.training
        return float((subject(X).argmax(1) == labels).double().mean())

    rng = torch.get_rng_state()
    _, report = recalibrate(model, 50 * seeded(20, 3, 7, 7), held_out=X, metric=accuracy)
    assert torch.equal(torch.get_rng_state(), rng)
    assert report.worse is True
    held = report.held_out
    assert (held.metric_before, held.samples) == (1.0, 23)
    assert held.same_class == held.metric_after < 1
    assert f"metric 1 -> {held.metric_after:.4g}: WORSE; keep the statistics that were there" in str(report)

    _, back = recalibrate(recalibrate(net(), 50 * X)[0], X, metric=accuracy)
    assert back.worse is False
    assert str(back).endswith("-> 1: better")


def test_without_a_metric_nothing_is_claimed() -> None:
    _, report = recalibrate(net(), X, held_out=[X[:5], X[5:9]])
    assert report.worse is None
    assert report.held_out.samples == 9
    after = recalibrate(net(), X)[0].eval()(X[:9]).detach()
    before = net().eval()(X[:9]).detach()
    wanted = float((after - before).square().sum() / before.square().sum()) ** 0.5
    # sums of 45 squares
    assert report.held_out.moved == pytest.approx(wanted, rel=1e-10)
    logs = before.log_softmax(1)
    assert report.held_out.entropy_before == pytest.approx(
        float(-(logs.exp() * logs).sum(1).mean()), rel=1e-10
    )
    assert "whether that is better or worse only a metric can tell" in str(report)
    _, report = recalibrate(net(), X)
    assert str(report).endswith("whether it got worse was not looked at: pass held_out, and a metric")


def test_the_doctor_is_content_afterwards() -> None:
    new, _ = recalibrate(net(), list(X.split(8)))
    codes = {f.code for f in normscope.check(new.eval(), X).findings}
    assert not {"NS301", "NS302", "NS303", "NS311"} & codes
    assert "NS302" in {f.code for f in normscope.check(net().eval(), X).findings}


# -- errors ------------------------------------------------------------------------------------------------------------


def once() -> Iterator[Tensor]:
    yield X


@pytest.mark.parametrize(
    ("model", "data", "kwargs", "error", "text"),
    [
        (net(), X, {"method": "ewma"}, BadInput, "method is one of 'exact', 'ema', 'layerwise'; got 'ewma'"),
        (net(), 3, {}, BadInput, "data is a batch (tensor, tuple, dict) or an iterable of batches; got int"),
        (net(), [], {}, BadInput, "data held no batch; statistics of nothing would be NaN"),
        (
            net(), once(), {"method": "layerwise"}, BadInput,
            "data is a generator that can be run over once, and another pass is needed; pass a list of batches or a "
            "DataLoader",
        ),
        (
            net(), X.split(8), {}, BadInput,
            "data is a tuple of 3, which is one batch for model(*args), and the forward takes 1; pass a list where it "
            "is batches, list(data), or the inputs alone",
        ),
        (
            Named(), [(X, LABELS)], {}, BadInput,
            "a batch has 2 values and the forward takes 1 to 3, so what is input and what is label cannot be told; "
            "pass inputs=lambda batch: ... that returns the model's inputs",
        ),
        (
            net(), [X * torch.tensor([1.0, float("inf"), 1.0]).double()[:, None, None]], {}, BadInput,
            "1: 6 of 6 channels get statistics that are not finite (NaN, infinity, or numbers beyond float64 came "
            "in); the model is as it was. Check the data and what stands before this norm",
        ),
        (
            nn.BatchNorm1d(2).double(), seeded(1, 2), {"method": "layerwise"}, BadInput,
            "the model itself: 2 of 2 channels get statistics that are not finite (one element a channel came in); the "
            "model is as it was. Check the data and what stands before this norm",
        ),
        (
            nn.Sequential(nn.LayerNorm(7)), X, {}, Refused,
            "no normalization has running statistics to recalibrate (0: stores no statistics)",
        ),
        (nn.Linear(2, 2), X, {}, Refused, "no normalization has running statistics to recalibrate"),
        (
            net(), X, {"metric": lambda model: "good"}, BadInput,
            "the metric, which takes a model and returns a number, failed: ValueError: could not convert string to "
            "float: 'good'",
        ),
        (
            net(), X, {"inputs": lambda batch: batch.image}, BadInput,
            "inputs failed on a batch: AttributeError: 'Tensor' object has no attribute 'image'",
        ),
    ],
)  # fmt: skip
def test_errors(model: nn.Module, data: Any, kwargs: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error) as caught:
        recalibrate(model, data, **kwargs)
    assert str(caught.value) == text


def test_left_with_reasons() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
            self.fixed = own.FrozenBatchNorm(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fixed(self.used(x))

    _, report = recalibrate(Branch().double(), X)
    assert [(site.name, site.reason) for site in report.left] == [
        ("unused", "is not called on these data"),
        ("fixed", "its statistics are frozen by its class"),
    ]


def test_numpy_agrees_with_the_reference() -> None:
    spec = normscope.spec_of(nn.BatchNorm2d(3))
    mean, var, count = normscope.reference.statistics(X.numpy(), spec)
    new, _ = recalibrate(nn.BatchNorm2d(3).double(), X)
    np.testing.assert_allclose(new.running_mean.numpy(), np.squeeze(mean), rtol=1e-13)
    np.testing.assert_allclose(new.running_var.numpy(), np.squeeze(var) * count / (count - 1), rtol=1e-12)


# -- what broke it -----------------------------------------------------------------------------------------------------


def test_a_variance_that_half_cannot_hold_is_refused() -> None:
    model = nn.BatchNorm2d(3).half()
    with pytest.raises(BadInput) as caught:
        recalibrate(model, (1000 * X).half())
    assert str(caught.value).startswith(
        "the model itself: 3 of 3 channels get statistics that are not finite (NaN, infinity, or numbers beyond "
        "float16 came in)"
    )


def test_a_last_batch_of_one_says_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    x = seeded(5, 3)
    with pytest.raises(BadInput) as caught:
        recalibrate(model, list(x.split(2)))
    assert str(caught.value) == (
        "batch 3 cannot be normalized by itself: Expected more than 1 value per channel when training, got input size "
        'torch.Size([1, 4]). Use method="layerwise", which runs norms in eval, or batches of at least two samples '
        "(drop_last=True)"
    )
    assert recalibrate(model, list(x.split(2)), method="layerwise")[1].done


def test_norms_that_store_in_one_tensor_are_left() -> None:
    model = net()
    model[5].running_mean = model[1].running_mean
    with pytest.raises(Refused) as caught:
        recalibrate(model, X)
    assert str(caught.value) == (
        "no normalization has running statistics to recalibrate (1: stores its statistics in a tensor of 5, where only "
        "one's fit; 5: stores its statistics in a tensor of 1, where only one's fit)"
    )


@pytest.mark.parametrize("method", ["exact", "layerwise"])
def test_inference_mode(method: str) -> None:
    wanted, _ = recalibrate(net(), X, method=method)
    with torch.inference_mode():
        found, _ = recalibrate(net().eval(), X, method="layerwise")
        made = net().eval()
    assert not any(t.is_inference() for t in found.state_dict().values())
    recalibrate(made, X, method="layerwise", inplace=True)
    inside, _ = recalibrate(made, X, method=method)
    assert torch.equal(inside[1].running_var, wanted[1].running_var)
    assert made[1].running_var.is_inference()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            [seeded(4, 3)],
            "It was given inputs float64 (4, 3), and its parameters are float32. Pass inputs=lambda batch: ... that "
            "returns the model's inputs as float32",
        ),
        (
            [(torch.arange(4), torch.ones(4, 3))],
            "It was given inputs int64 (4,), and its parameters are float32. Pass inputs=lambda batch: ... that "
            "returns the model's inputs, of what a batch holds",
        ),
    ],
)
def test_batches_that_the_model_cannot_take_ended_in_a_bare_error_of_torch(data: Any, text: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    for held_out in (False, True):
        with pytest.raises(ModelError) as caught:
            recalibrate(model, [torch.ones(4, 3)] if held_out else data, held_out=data if held_out else None)
        assert isinstance(caught.value.__cause__, RuntimeError)
        told = f"the model raised on batch 1: RuntimeError: {caught.value.__cause__}. "
        assert str(caught.value) == told + text


def test_data_that_change_from_pass_to_pass_are_told() -> None:
    class Anew:
        def __init__(self, change: float) -> None:
            self.change, self.passes = change, 0

        def __iter__(self) -> Iterator[Tensor]:
            self.passes += 1
            x = X[torch.randperm(23, generator=torch.Generator().manual_seed(self.passes))]
            yield from (x + self.change * self.passes).split(8)

    told = (
        "the data were not the same in each pass (random augmentation, a sampler that draws anew): norms got "
        "statistics of different samples, and the fingerprint is of the last pass"
    )
    for change, said in ((0.1, (told,)), (0.0, ())):  # another order is the same data
        _, report = recalibrate(net(), Anew(change), method="layerwise")
        assert report.notes == said
    assert recalibrate(net(), Anew(0.1))[1].notes == ()
