"""Sound trainings of several kinds on real images (scikit-learn's digits): nothing is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normscope import Monitor

torch.set_num_threads(1)


class Residual(nn.Module):
    """Three residual blocks; the last gain of each begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8),
            )
            for _ in range(3)
        )  # fmt: skip
        for block in self.blocks:
            nn.init.zeros_(block[4].weight)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 2, 2)
        self.places = nn.Parameter(0.02 * torch.randn(16, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.patches(x).flatten(2).mT + self.places).mean(1))


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.InstanceNorm2d(16, affine=True), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16),
        nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 32),
        nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None]
    return (images - images.mean()) / images.std(), torch.tensor(found.target, dtype=torch.long)


@pytest.mark.parametrize("build", [Residual, Attention, grouped, dense], ids=lambda b: b.__name__)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_nothing_is_found(
    build: Callable[[], nn.Module], autocast: bool, digits: tuple[torch.Tensor, torch.Tensor]
) -> None:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images, labels = digits
    losses = []
    with Monitor(model, optimizer, every=10) as monitor:
        for step in range(110):
            at = torch.randint(1500, (32,))
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(images[at]), labels[at])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step % 40 == 39:
                model.eval()
                with torch.no_grad():
                    model(images[1500:])
                model.train()
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10]), "it has learned something"
    assert monitor.findings == ()
    report = monitor.report()
    assert report.findings == ()
    assert not [entry for entry in report.not_run if "internal error" in entry.reason]
    assert not [note for note in report.notes if "could not" in note]
