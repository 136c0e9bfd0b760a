"""Data from files alone, and training whose streams are apart."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from normscope.errors import BadInput
from normscope.studies.lab import data
from normscope.studies.lab.networks import conv_net, mlp, norm, weights
from normscope.studies.lab.training import Plan, batches, evaluate, train

NORMS = ("none", "batch", "layer", "layer-channels", "rms", "group", "instance")


def idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


def test_files_are_read_as_they_are(tmp_path: Path) -> None:
    pixels = np.arange(3 * 4 * 5).reshape(3, 4, 5)
    for part, array in zip(data.FASHION, (pixels, [7, 0, 2], pixels[:1], [1]), strict=True):
        idx(tmp_path / f"{part}-ubyte.gz", np.asarray(array))
    with data.folder(tmp_path):
        found = data.load("fashion-mnist")
    assert torch.equal(found.train, torch.from_numpy(pixels).float().div(255).unsqueeze(1))
    assert found.train_labels.tolist() == [7, 0, 2]
    assert found.test.shape == (1, 1, 4, 5)
    assert found.shape == (1, 4, 5)

    rows = np.concatenate([np.full((1100, 784), 255), np.arange(1100)[:, None] % 10], axis=1)
    with gzip.open(tmp_path / data.MNIST, "wt") as file:
        np.savetxt(file, rows, fmt="%d", delimiter=",")
    with data.folder(tmp_path):
        digits = data.load("mnist-5k")
    assert (len(digits.train), len(digits.test), digits.classes) == (100, 1000, 10)
    assert bool(digits.train.eq(1).all())


def test_what_stands_in_is_told_and_what_was_named_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "DEBIAN", tmp_path / "nowhere")
    monkeypatch.delenv("NORMSCOPE_DATA", raising=False)
    (source,) = data.locate(["fashion-mnist"]).values()
    assert source.told == (
        "scikit-learn's digits (scikit-learn) in place of fashion-mnist, which is not there: Debian and Ubuntu have "
        "it as the package dataset-fashion-mnist; elsewhere put its four -ubyte.gz files into a folder and name it "
        "with --data or NORMSCOPE_DATA"
    )
    assert data.load("fashion-mnist").shape == (1, 8, 8)
    with data.folder(tmp_path), pytest.raises(BadInput) as refused:
        data.locate(["fashion-mnist", "digits"])
    assert str(refused.value) == f"{tmp_path} holds none of fashion-mnist: {data.HOW['fashion-mnist']}"
    with pytest.raises(
        BadInput, match=r"the run began with fashion-mnist abc, and .* give every worker the same files"
    ):
        data.same({"fashion-mnist": "abc"})


def test_arms_share_their_batches_and_their_first_weights() -> None:
    first = [chosen.tolist() for chosen, _ in zip(batches(10, 3, seed=1), range(4), strict=False)]
    torch.rand(5)
    assert first == [chosen.tolist() for chosen, _ in zip(batches(10, 3, seed=1), range(4), strict=False)]
    assert len({i for chosen in first[:3] for i in chosen}) == 9  # an epoch sees a sample once
    models = []
    for name in ("batch", "layer"):
        with weights(5):
            models.append(conv_net((1, 8, 8), [4, 8], 10, norm(name)))
    assert all(
        torch.equal(a.weight, b.weight) for a, b in zip(*(convolutions(m) for m in models), strict=True)
    )


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dims", [0, 2])
def test_every_norm_trains_the_same_twice(name: str, dims: int) -> None:
    images = data.load("digits", train=64, test=20).standardized()
    plan = Plan(steps=4, batch=16, rate=0.05, decay=True, weight_decay=1e-4)

    def trained() -> tuple[list[float], tuple[float, float]]:
        with weights(0):
            layer = norm(name, dims=dims, groups=2)
            model = (
                mlp(64, [8, 8], 10, layer)
                if dims == 0
                else conv_net((1, 8, 8), [4, 8], 10, layer, dropout=0.1)
            )
        losses = train(model, images, plan, seed=3).losses
        return losses, evaluate(model, images.test, images.test_labels)

    if name == "instance" and dims == 0:
        with pytest.raises(BadInput, match="instance norm needs places to normalize over"):
            trained()
        return
    losses, (loss, accuracy) = trained()
    assert (losses, (loss, accuracy)) == trained()
    assert len(losses) == 4
    assert 0 <= accuracy <= 1


def test_evaluating_changes_nothing_and_stops_where_a_loss_is_not_finite() -> None:
    images = data.load("digits", train=64, test=60)
    model = conv_net((1, 8, 8), [4, 8], 10, norm("batch"), dropout=0.5)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    stored = evaluate(model, images.test, images.test_labels)
    of_batch = evaluate(model, images.test, images.test_labels, batch=30, batch_statistics=True)
    assert stored != of_batch
    assert of_batch == evaluate(
        model, images.test, images.test_labels, batch=30, batch_statistics=True
    )  # no dropout
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    diverged = train(
        model, images, Plan(steps=9, batch=8, rate=0.1), 0, loss=lambda m, x, y: m(x).sum() * torch.inf
    )
    assert diverged.diverged
    assert len(diverged.losses) == 1
