"""A training with three faults that raise no error, and the same training without them, both monitored.

    python examples/monitor_fashion_mnist.py [--steps 200] [--data FOLDER]

A student learns Fashion-MNIST from labels and from a trained teacher (distillation). In the faulty run the teacher is
in train mode, so its statistics drift and its targets depend on the batch; checkpointing runs the norms of one block
twice, so they average as with twice the momentum; and the validation loop forgets ``model.eval()``. The monitor names
all three where they are, and nothing in the sound run.

Debian's package dataset-fashion-mnist holds the data; without it scikit-learn's digits are taken.
"""

from __future__ import annotations

import argparse
import copy
import gzip
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import normscope

FOLDER = Path("/usr/share/datasets/fashion-mnist")
BATCH = 64


def load(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 1, H, W) of mean 0 and standard deviation 1, and labels."""
    try:
        with gzip.open(folder / "train-images-idx3-ubyte.gz") as file:
            pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)[:20000]
        with gzip.open(folder / "train-labels-idx1-ubyte.gz") as file:
            labels = np.frombuffer(file.read(), np.uint8, offset=8)[:20000]
        print(f"Fashion-MNIST: {len(pixels)} images")
    except FileNotFoundError:
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels, labels = digits.images[:, None], digits.target
        print(f"no Fashion-MNIST in {folder} (apt-get install dataset-fashion-mnist): {len(pixels)} digits")
    images = torch.tensor(pixels, dtype=torch.float32)
    return (images - images.mean()) / images.std(), torch.tensor(labels, dtype=torch.long)


class Net(nn.Module):
    """Three convolutions with batch norm; ``again`` recomputes the second block in the backward pass."""

    def __init__(self, width: int, *, again: bool = False) -> None:
        super().__init__()

        def block(channels: int, out: int, stride: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()
            )

        self.first, self.second = block(1, width, 2), block(width, 2 * width, 2)
        self.third = block(2 * width, 2 * width, 1)
        self.head = nn.Linear(2 * width, 10)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        again = self.again and torch.is_grad_enabled()
        x = checkpoint(self.second, x, use_reentrant=False) if again else self.second(x)
        return self.head(self.third(x).mean((2, 3)))


def batches(images: torch.Tensor, labels: torch.Tensor, steps: int):
    for _ in range(steps):
        at = torch.randint(len(images), (BATCH,))
        yield images[at], labels[at]


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, *, in_eval: bool = True) -> float:
    was = model.training
    model.train(not in_eval)
    with torch.no_grad():
        guessed = torch.cat([model(x).argmax(1) for x in images.split(250)])
    model.train(was)
    return float((guessed == labels).float().mean())


def distil(teacher: nn.Module, data, test, steps: int, *, faulty: bool) -> normscope.Monitor:
    """Train a student for ``steps``; validate it four times."""
    torch.manual_seed(1)
    student = Net(12, again=faulty)
    teacher.train(faulty)  # the first fault: it belongs in eval
    optimizer = torch.optim.SGD(student.parameters(), lr=0.03, momentum=0.9)
    models = {"student": student, "teacher": teacher}
    with normscope.Monitor(models, optimizer, every=max(1, steps // 8)) as monitor:
        for step, (x, y) in enumerate(batches(*data, steps), 1):
            with torch.no_grad():
                targets = teacher(x).softmax(1)
            output = student(x)
            loss = F.cross_entropy(output, y) + F.kl_div(
                output.log_softmax(1), targets, reduction="batchmean"
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % (steps // 4) == 0:
                share = accuracy(student, *test, in_eval=not faulty)
                print(f"  step {step:4}: loss {loss:.3f}, validation {share:.3f}")
    print(f"  in eval: student {accuracy(student, *test):.3f}, teacher {accuracy(teacher, *test):.3f}")
    return monitor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--data", type=Path, default=FOLDER)
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load(options.data)
    data, test = (images[:-1000], labels[:-1000]), (images[-1000:], labels[-1000:])

    teacher = Net(16)
    optimizer = torch.optim.SGD(teacher.parameters(), lr=0.03, momentum=0.9)
    for x, y in batches(*data, options.steps):
        optimizer.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        optimizer.step()
    print(f"teacher after {options.steps} steps: {accuracy(teacher, *test):.3f}")
    teacher.requires_grad_(False)

    print("sound:")
    sound = distil(copy.deepcopy(teacher), data, test, options.steps, faulty=False)
    print("  findings:", len(sound.findings))
    print("faulty:")
    faulty = distil(copy.deepcopy(teacher), data, test, options.steps, faulty=True)
    found = [one for finding in faulty.report().at_least("warning") for one in (finding, *finding.also)]
    for one in found:
        print(f"  {one.code} {one.site}: {one.evidence.get('diagnosis')}")

    assert sound.findings == (), sound.report()
    assert sound.report().ok, sound.report()
    assert sorted(
        (one.code, one.site, one.evidence["diagnosis"]) for one in found if one.code != "NS305"
    ) == [
        ("NS310", "student.second.1", "recomputed"),
        ("NS315", "student.first.1", "between steps"),
        ("NS315", "student.second.1", "between steps"),
        ("NS315", "student.third.1", "between steps"),
        ("NS315", "teacher.first.1", "teacher"),
        ("NS315", "teacher.second.1", "teacher"),
        ("NS315", "teacher.third.1", "teacher"),
    ], faulty.report()
    # The teacher's frozen weights beside live statistics are what NS305 sees in a plain check too.
    assert {one.site.split(".")[0] for one in found if one.code == "NS305"} == {"teacher"}


if __name__ == "__main__":
    main()
