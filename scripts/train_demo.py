"""Train the two demos on scikit-learn's digits and write weights and test images into the package.

    python scripts/train_demo.py src/normscope/demo

Prints the accuracies. The same seed gives the same weights on the same machine and build of PyTorch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from normscope import demo
from normscope.demo.model import DigitNet

EPOCHS, BATCH = 30, 32


def main(folder: Path) -> None:
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images, digits.target, test_size=360, stratify=digits.target, random_state=0
    )
    assert len(train_x) == demo.TRAINING_SAMPLES
    assert abs(train_x.mean() - demo.PIXEL_MEAN) < 1e-4, train_x.mean()
    assert abs(train_x.std() - demo.PIXEL_STD) < 1e-4, train_x.std()
    pixels = torch.from_numpy(train_x).float().unsqueeze(1)
    labels = torch.from_numpy(train_y).long()
    test_pixels = torch.from_numpy(test_x).float().unsqueeze(1)
    test_labels = torch.from_numpy(test_y).long()
    for name in demo.NAMES:
        model = trained(name, demo.standardize(pixels), labels)
        save_file(model.state_dict(), str(folder / f"digits-{name}.safetensors"))
        right = accuracy(model, demo.standardize(test_pixels), test_labels)
        deployed = accuracy(model, test_pixels, test_labels)
        print(f"{name}: test accuracy {right:.3f} standardized, {deployed:.3f} on raw pixels")
    np.savez_compressed(
        folder / "digits-test.npz", images=test_x[:64].astype(np.uint8), labels=test_y[:64].astype(np.uint8)
    )


def trained(name: str, x: torch.Tensor, y: torch.Tensor) -> DigitNet:
    torch.manual_seed(0)
    model = DigitNet(faulty=name == demo.FAULTY)
    optimizer = demo.optimizer_of(model, faulty=name == demo.FAULTY)
    steps = EPOCHS * (len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for _ in range(EPOCHS):
        model.train()
        order = torch.randperm(len(x))
        for rows in order.split(BATCH)[: len(x) // BATCH]:  # the ragged last batch is dropped
            optimizer.zero_grad()
            demo.loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: DigitNet, x: torch.Tensor, y: torch.Tensor) -> float:
    return float((model(x).argmax(1) == y).float().mean())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/train_demo.py FOLDER")
    main(Path(sys.argv[1]))
