"""A check of models with GhostBatchNorm and BatchRenorm: what couples is said, and nothing innocent is."""

import pytest
import torch
from torch import nn

import normscope as ns


def net(norm):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        norm(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    with torch.no_grad():
        for _ in range(60):
            model(batch(32))
    return model


def batch(n):
    return 2 * torch.randn(n, 3, 10, 10) + 1


def codes(report):
    return {finding.code: finding for finding in report.findings if finding.severity != "info"}


RENORM = {
    "warming up": {},
    "fixed": {"r_max": 3.0, "d_max": 5.0},
    "moving": {"r_max": (1, 3, 0, 90), "d_max": (0, 5, 0, 90)},
}


@pytest.mark.parametrize("limits", RENORM.values(), ids=RENORM)
def test_renormalization_is_innocent(limits):
    model = net(lambda c: ns.nn.BatchRenorm2d(c, momentum=0.1, **limits))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = ns.check(model, batch(32), torch.arange(32) % 4, loss_fn=nn.functional.cross_entropy)
    assert codes(report) == {}
    assert not [line for line in report.not_run if "internal" in line.reason]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("size", "coupled"), [(8, True), (2, True), (1, False)])
def test_ghost_couples_within_its_virtual_batch(size, coupled):
    report = ns.check(net(lambda c: ns.nn.GhostBatchNorm2d(c, size=size)), batch(32))
    assert codes(report) == {}
    assert any(finding.code == "NS201" for finding in report.findings) is coupled


@pytest.mark.parametrize("samples", [1, 5, 33])
def test_a_batch_of_another_size_is_checked_in_eval(samples):
    """The layer raises in training and not in evaluation: a result, and no internal error."""
    report = ns.check(net(lambda c: ns.nn.GhostBatchNorm2d(c, size=8)).eval(), batch(samples))
    assert codes(report) == {}
    assert not [line for line in report.not_run if "internal" in line.reason]


def test_a_last_batch_that_virtual_batches_do_not_divide():
    """32 divides into 8s, the last batch of 1004 samples, 12, does not."""
    report = ns.check(net(lambda c: ns.nn.GhostBatchNorm2d(c, size=8)), batch(32), dataset_size=1004)
    assert codes(report)["NS204"].message == (
        "1004 training samples in batches of 32 leave a last batch of 12 samples, which do not fall into its virtual "
        "batches: the layer raises (unless the loader drops that batch, which cannot be seen)."
    )
    assert codes(report)["NS204"].evidence["set_size"] == 0
