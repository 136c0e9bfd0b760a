"""What lies around a layer does not make it wrong: the caller's modes, and layers that cannot be run at all."""

import pytest
import torch
from torch import nn

import normscope
from normscope import NormSpec, verify
from normscope.errors import BadInput
from normscope.reading import UnknownNormalization

torch.set_num_threads(1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_records_them_inside_and_restores(mode):
    with mode():
        inside = nn.BatchNorm1d(3)  # under inference mode, one of inference tensors
        assert verify.run().passed
        assert verify.run_layer(inside).passed
        assert verify.run_layer(nn.LayerNorm(4), spec=NormSpec("... d -> ...", weight="d", bias="d")).passed
        assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
    assert torch.is_grad_enabled()


def test_gradients_switched_off_for_good_stay_off():
    torch.set_grad_enabled(False)
    try:
        assert verify.run_layer(nn.GroupNorm(2, 4)).passed
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_autocast_casts_nothing():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert verify.run().passed
        assert verify.run_layer(nn.LayerNorm(4)).passed
        assert torch.is_autocast_enabled("cpu")


META = (
    "verify computes with numbers, and the default device is meta, whose tensors hold none. Call it outside "
    'torch.device("meta"), or after torch.set_default_device("cpu")'
)


@pytest.mark.parametrize("call", [verify.run, lambda: verify.run_layer(nn.LayerNorm(4))])
def test_a_default_device_without_numbers_is_refused(call):
    with torch.device("meta"), pytest.raises(BadInput) as error:
        call()
    assert str(error.value) == META


def filled(module, **values):
    with torch.no_grad():
        for name, value in values.items():
            getattr(module, name)[0] = value
    return module


BLOCKED = {
    "eps 0 in training": (
        lambda: nn.BatchNorm1d(2, eps=0.0),
        "in train on an input of shape (8, 2) it raised ValueError: batch_norm eps must be positive during training, "
        "but got 0.0",
    ),
    "meta": (
        lambda: nn.LayerNorm(3, device="meta"),
        "it is on the meta device, where tensors hold no numbers. Materialize it first: to_empty, then load",
    ),
    "NaN": (
        lambda: filled(nn.LayerNorm(3), weight=torch.nan),
        "its weight holds NaN or infinity. Retrain or reload it",
    ),
    "infinity": (
        lambda: filled(nn.InstanceNorm1d(3, track_running_stats=True), running_var=torch.inf),
        "its running_var holds NaN or infinity. Retrain or reload it",
    ),
    "negative": (
        lambda: filled(nn.BatchNorm2d(3), running_var=-0.5),
        "its running_var goes down to -0.5, and no variance is negative. Retrain or reload it",
    ),
    "one element without eps": (
        lambda: nn.LayerNorm(1, eps=0.0),
        "in train its formula divides by 0, or leaves the numbers of float64: "
        f"{normscope.spec_of(nn.LayerNorm(1, eps=0.0))}",
    ),
    "0 / 0": (
        lambda: filled(nn.BatchNorm2d(3, eps=0.0), running_var=0.0),
        "its running_var is 0 somewhere and eps is 0, so that it divides by 0. Give it an eps above 0",
    ),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_what_cannot_run_is_not_verifiable_and_not_wrong(name):
    make, why = BLOCKED[name]
    kind = type(make()).__name__
    with pytest.raises(UnknownNormalization) as error:
        verify.run_layer(make())
    assert str(error.value) == f"torch.nn.{kind} is not verifiable: because {why}"
    report = verify.run_layer(nn.Sequential(nn.LayerNorm(3), make()))
    assert report.passed
    assert {item.topic for item in report.evidence} == {"0"}
    (item,) = report.not_verified
    assert (item.site, item.type_name, item.why) == (
        "1",
        f"torch.nn.{kind}",
        f"not verifiable: because {why}",
    )
    assert str(report).endswith("1 norm passed; 1 norm not verified: 1")


def test_no_axes_to_normalize_over():
    with pytest.raises(
        UnknownNormalization, match=r"LayerNorm is not verifiable: because in train .* 1-dimensional"
    ):
        verify.run_layer(nn.LayerNorm(()))


def test_several_and_none_of_them_verifiable():
    with pytest.raises(UnknownNormalization) as error:
        verify.run_layer(nn.Sequential(BLOCKED["NaN"][0](), BLOCKED["negative"][0]()))
    assert str(error.value) == (
        "no norm of torch.nn.Sequential can be verified: 0 (torch.nn.LayerNorm): not verifiable: because "
        f"{BLOCKED['NaN'][1]}; 1 (torch.nn.BatchNorm2d): not verifiable: because {BLOCKED['negative'][1]}"
    )


def test_a_declared_layer_of_nan():
    layer = filled(nn.LayerNorm(4), bias=torch.nan)
    with pytest.raises(
        BadInput, match=r"LayerNorm is not verifiable: because its bias holds NaN or infinity"
    ):
        verify.run_layer(layer, spec=NormSpec("... d -> ...", weight="d", bias="d"))
