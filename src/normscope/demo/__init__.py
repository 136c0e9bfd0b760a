"""The demo: a digit classifier in which real mistakes were made, and the same model done rightly.

Both were trained by ``scripts/train_demo.py`` on scikit-learn's digits; the weights are as training left them. The
images that come with them are from the test set.
"""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FAULTY, HEALTHY = "faulty", "healthy"
NAMES = (FAULTY, HEALTHY)
TRAINING_SAMPLES = 1437
PIXEL_MEAN, PIXEL_STD = 4.8861, 6.0179
"""of the training images, whose pixels run from 0 to 16; checked by the training script"""


def standardize(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels as the networks were trained to see them."""
    return (pixels - PIXEL_MEAN) / PIXEL_STD


def load(name: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor, torch.optim.Optimizer]:
    """Model, inputs, targets and optimizer of a demo, each as its deployment script hands them over."""
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from normscope.demo.model import DigitNet

    folder = files("normscope.demo")
    model = DigitNet(faulty=name == FAULTY)
    with as_file(folder / f"digits-{name}.safetensors") as path:
        model.load_state_dict(load_file(str(path)))
    model.eval()
    with as_file(folder / "digits-test.npz") as path, np.load(path, allow_pickle=False) as data:
        pixels = torch.from_numpy(data["images"]).float().unsqueeze(1)
        targets = torch.from_numpy(data["labels"]).long()
    # Mistake made in deployment: the faulty demo's serving code forgot the standardization of its training code.
    inputs = pixels if name == FAULTY else standardize(pixels)
    return model, inputs, targets, optimizer_of(model, faulty=name == FAULTY)


def optimizer_of(model: torch.nn.Module, *, faulty: bool) -> torch.optim.Optimizer:
    """AdamW. The right one spares gains and biases from weight decay, the faulty one decays everything."""
    import torch

    if faulty:
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    spared = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": spared, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3)


def loss(output: Any, targets: Any) -> torch.Tensor:
    """Cross entropy."""
    import torch

    return torch.nn.functional.cross_entropy(output, targets)
