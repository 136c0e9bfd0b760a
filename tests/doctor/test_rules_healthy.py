"""Sound models of common shapes, really trained for a moment: no rule on state, training or graph may warn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import normscope

torch.set_num_threads(1)
RULES = [
    *(
        "NS104",
        "NS105",
        "NS301",
        "NS302",
        "NS303",
        "NS305",
        "NS306",
        "NS307",
        "NS308",
        "NS309",
        "NS311",
        "NS314",
    ),
    *("NS501", "NS502", "NS601"),
]


class Residual(nn.Module):
    """A residual block whose last gain starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class Pooled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*stem, Residual(8), Residual(8), Pooled(), nn.Dropout(0.2), nn.Linear(8, 4))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Sequential(nn.GroupNorm(4, 16), nn.Conv2d(16, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        return self.out(torch.cat([self.up(self.deep(skip)), skip], 1)).mean((2, 3))


class Tokens(nn.Module):
    """A pre-norm transformer on rows of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 16)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.1, batch_first=True, norm_first=True, layer_norm_eps=1e-6
        )
        self.encoder = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(16, eps=1e-6), enable_nested_tensor=False
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x.transpose(1, 2).flatten(2))).mean(1))


def recalibrated() -> nn.Module:
    """Statistics recomputed after training, in the recommended way; momentum is still None."""
    model = trained(resnet())
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    with torch.no_grad():
        for _ in range(20):
            model(batch(32))
    return model


def batch(count: int) -> torch.Tensor:
    return 2 * torch.randn(count, 3, 8, 8) + 0.5


def trained(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(80):
        x = batch(32)
        target = (x[:, 0].mean((1, 2)) > 0.5).long() + 2 * (x[:, 1].mean((1, 2)) > 0.5).long()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    "make", [lambda: trained(resnet()), lambda: trained(UNet()), lambda: trained(Tokens()), recalibrated, resnet],
    ids=["resnet", "unet", "transformer", "recalibrated", "fresh"],
)  # fmt: skip
def test_no_warning(make: Callable[[], nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    model = make().train(mode == "train")
    spared = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": spared, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    report = normscope.check(model, batch(16), optimizer=optimizer, select=RULES)
    assert not [entry for entry in report.not_run if "internal error" in entry.reason]
    assert report.ok, str(report)
    allowed = {"NS302"} if make is resnet else set()
    assert {f.code for f in report.findings} <= allowed, str(report)
