"""A fault found by check: a model trained on standardized images is deployed on images scaled to 0 .. 1.

Nothing raises: shapes and types are right, and the model answers, only worse. Its stored statistics no longer describe
what comes in, and ``normscope.check`` says so, at the first batch norm, with numbers. Fed rightly it is silent.
"""

import torch
from torch import nn

import normscope as ns

torch.manual_seed(0)
torch.set_num_threads(1)


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Grey images of 0 .. 255 with a bright disc, left or right of the middle, in noise."""
    labels = torch.arange(count) % 2
    row, column = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    centre = 4 + 8 * labels[:, None, None] + torch.randn(count, 1, 1)
    disc = ((row - 8) ** 2 + (column - centre) ** 2 < 12).float()
    light = 60 + 40 * torch.randn(count, 1, 1)
    noisy = light + 30 * disc + 20 * torch.randn(count, 16, 16)
    return noisy.clamp(0, 255)[:, None], labels


def standardized(images: torch.Tensor) -> torch.Tensor:
    return (images - 65) / 45


model = nn.Sequential(
    nn.Conv2d(1, 8, 3, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.Conv2d(8, 16, 3, stride=2, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d((1, 4)),
    nn.Flatten(),
    nn.Linear(64, 2),
)
for _ in range(60):
    batch, labels = images(32)
    loss = nn.functional.cross_entropy(model(standardized(batch)), labels)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
model.eval()

batch, labels = images(64)
for words, inputs in (
    ("standardized, as in training", standardized(batch)),
    ("scaled to 0 .. 1", batch / 255),
):
    accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
    report = ns.check(model, inputs)
    stale = [finding for finding in report.findings if finding.code == "NS304"]
    print(f"images {words}: accuracy {accuracy:.2f}, NS304 {'at ' + stale[0].site if stale else 'silent'}")
    for finding in stale:
        print(f"  {finding.message}")
        print(f"  fix: {finding.fix}")
    assert (accuracy > 0.95) == (not stale)
    assert [finding.site for finding in stale] == (["1"] if words.startswith("scaled") else [])
