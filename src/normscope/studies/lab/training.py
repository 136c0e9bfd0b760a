"""The training loop that studies share: data order, noise and weights each from a stream of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import cos, isfinite, pi

import torch
from torch import Tensor, nn
from torch.nn import functional

from normscope.studies.lab.data import Images


def stream(seed: int, what: str) -> torch.Generator:
    """Random numbers for one purpose (``"order"``, ``"noise"``): another purpose or seed gives independent ones.

    >>> torch.equal(torch.rand(3, generator=stream(0, "order")), torch.rand(3, generator=stream(0, "noise")))
    False
    """
    number = hashlib.sha256(f"{seed} {what}".encode()).digest()[:7]
    return torch.Generator().manual_seed(int.from_bytes(number, "big"))


@dataclass(frozen=True)
class Plan:
    """How to train: SGD with momentum, or AdamW; constant rate or, with ``decay``, falling to 0 along a cosine."""

    steps: int
    batch: int
    rate: float
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    decay: bool = False


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    """of every step, on its batch, before the step"""

    @property
    def diverged(self) -> bool:
        """A loss that is not finite: training stops there."""
        return not self.losses or not isfinite(self.losses[-1])

    def last(self, steps: int = 20) -> float:
        """The mean loss over the last steps."""
        some = self.losses[-steps:]
        return sum(some) / len(some)


def batches(count: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Indices of batches without end: every epoch in a new order, the incomplete rest of an epoch left out.

    The order depends on the seed alone, so that arms see the same batches.

    >>> [b.tolist() for b, _ in zip(batches(4, 2, seed=0), range(2))]
    [[..., ...], [..., ...]]
    """
    generator, batch = stream(seed, "order"), min(batch, count)
    while True:
        order = torch.randperm(count, generator=generator)
        yield from torch.split(order[: count - count % batch], batch)


def train(
    model: nn.Module,
    data: Images,
    plan: Plan,
    seed: int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    before: Callable[[int, Tensor, Tensor], None] = lambda step, x, y: None,
    after: Callable[[int], None] = lambda step: None,
) -> Trained:
    """Train in place on the training part and leave the model in training mode.

    What layers draw themselves (dropout) follows from the seed too, and the random state around stays as it is.

    Arguments:
        optimizer: one's own, with rates and decay of its own; the plan's, if not given.
        loss: of a batch; cross-entropy of ``model(x)``, if not given.
        before: called with step, images and labels before each step, after: with the step behind it (gradients are
            still there).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(seed, "noise").initial_seed())
        return Trained(
            list(_steps(model, data, plan, seed, optimizer or _optimizer(model, plan), loss, before, after))
        )


def _steps(
    model: nn.Module,
    data: Images,
    plan: Plan,
    seed: int,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None,
    before: Callable[[int, Tensor, Tensor], None],
    after: Callable[[int], None],
) -> Iterator[float]:
    rates = [group["lr"] for group in optimizer.param_groups]
    model.train()
    for step, chosen in zip(range(plan.steps), batches(len(data.train), plan.batch, seed), strict=False):
        x, y = data.train[chosen], data.train_labels[chosen]
        before(step, x, y)
        if plan.decay:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * 0.5 * (1 + cos(pi * step / plan.steps))
        optimizer.zero_grad(set_to_none=True)
        found = functional.cross_entropy(model(x), y) if loss is None else loss(model, x, y)
        yield (value := found.item())
        if not isfinite(value):
            return
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        after(step)


def _optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    if plan.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=plan.rate, weight_decay=plan.weight_decay)
    return torch.optim.SGD(
        model.parameters(), lr=plan.rate, momentum=plan.momentum, weight_decay=plan.weight_decay
    )


@torch.no_grad()
def evaluate(
    model: nn.Module, images: Tensor, labels: Tensor, *, batch: int = 500, batch_statistics: bool = False
) -> tuple[float, float]:
    """Mean loss and accuracy in evaluation mode.

    With ``batch_statistics`` the layers that store statistics normalize by those of batches of ``batch`` instead. Modes
    and buffers stay as they are.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for module in modes:
        module.training = batch_statistics and hasattr(module, "running_mean")
    total, right = 0.0, 0
    for x, y in zip(torch.split(images, batch), torch.split(labels, batch), strict=True):
        scores = model(x)
        total += functional.cross_entropy(scores, y, reduction="sum").item()
        right += int((scores.argmax(1) == y).sum())
    for module, mode in modes.items():
        module.training = mode
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return total / len(labels), right / len(labels)
