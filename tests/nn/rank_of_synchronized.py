"""One rank of synchronized batch norms, started by torchrun: FOLDER, of four. Writes what the rank found."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import normscope as ns
from normscope.spec import RunningState

SIZES = (3, 5, 0, 1)
WORLD, CHANNELS = len(SIZES), 6
SHAPES = {"positions": (7,), "image": (4, 3), "vectors": ()}
SECONDS = 2


def whole(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Input, gradient of the output, and mask of all ranks; channels of other means and scales."""
    generator = torch.Generator().manual_seed(len(name))
    shape = (sum(SIZES), CHANNELS, *SHAPES[name])
    level = torch.arange(CHANNELS, dtype=torch.float64).view(1, -1, *[1] * len(SHAPES[name]))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * (1 + level) + 3 * level
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand((shape[0], 1, *shape[2:]), generator=generator) < 0.7
    return x.to(dtype), grad.to(dtype), mask


def mine(t: Tensor, rank: int) -> Tensor:
    return t.split(SIZES)[rank].clone()


def layer(dtype: torch.dtype, **more: Any) -> nn.Module:
    return filled(ns.nn.SyncBatchNorm(CHANNELS, 1e-3, 0.3, dtype=dtype, **more))


def filled(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        for start, tensor in enumerate(t for t in norm.state_dict().values() if t.is_floating_point()):
            tensor.copy_(1 + torch.arange(start, start + CHANNELS).sin() / 2)
    return norm


def step(norm: nn.Module, x: Tensor, grad: Tensor, **given: Any) -> dict[str, Tensor]:
    x = x.requires_grad_()
    y = norm(x, **given)
    y.backward(grad)
    found = {"y": y.detach(), "dx": x.grad, **{f"d{n}": p.grad.clone() for n, p in norm.named_parameters()}}
    return found | {name: buffer.clone() for name, buffer in norm.named_buffers()}


def cases(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32):
        for name in SHAPES:
            x, grad, mask = (mine(t, rank) for t in whole(name, dtype))
            if name == "image":
                x = x.contiguous(memory_format=torch.channels_last)
            found[f"{name} {dtype}"] = step(layer(dtype), x, grad)
            if name != "vectors":
                poisoned = x.detach().masked_fill(~mask, float("nan"))
                found[f"{name} {dtype} masked"] = step(layer(dtype), poisoned, grad, mask=mask)
    return found


def net(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, CHANNELS, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(CHANNELS * 5, 3)
    ).double()


def train(model: nn.Module, batches: list[Tensor], share: float) -> dict[str, Tensor]:
    """Ten steps; ``share`` makes the sum over a rank's samples its part of the mean over all."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for x in batches:
        optimizer.zero_grad()
        (model(x).square().sum() * share).backward()
        optimizer.step()
    return dict(getattr(model, "module", model).state_dict())


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn((sum(SIZES), 2, 7), generator=generator, dtype=torch.float64) for _ in range(10)]


def caught(work: Any) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


SPIKING = {
    "a step's own": (ns.families.batch_norm_through_time(eps=1e-3, momentum=0.3), (2, 3)),
    "of all steps": (ns.families.temporal_effective_batch_norm(eps=1e-3, momentum=0.3, bias=False), (3,)),
}
"""specifications that no layer synchronizes, and the shape of their statistics; the second has its weight elsewhere"""


def spiking(kind: str, rank: int | None) -> dict[str, Tensor]:
    """``normalize(group=)`` of one rank, or of all samples in one process, which are on the second axis."""
    spec, sets = SPIKING[kind]
    x = whole("positions", torch.float64)[0].view(9, 2, 3, 7).transpose(0, 1)
    own = x.contiguous() if rank is None else torch.stack([mine(step, rank) for step in x])
    weight = torch.linspace(0.5, 2, 6, dtype=torch.float64).view(2, 3).requires_grad_()
    state = RunningState(torch.zeros(sets, dtype=torch.float64), torch.ones(sets, dtype=torch.float64))
    group = None if rank is None else dist.group.WORLD
    y = ns.normalize(own.requires_grad_(), spec, weight, running=state, group=group)
    y.sin().sum().backward()
    assert own.grad is not None
    assert weight.grad is not None
    return {"y": y.detach(), "dx": own.grad, "dw": weight.grad, "mean": state.mean, "var": state.var}


class Recomputed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        return y


def accumulated(rank: int) -> dict[str, Tensor]:
    """Two micro-batches and one update, under checkpoints, whose recomputations meet in collectives too."""
    model = Recomputed(layer(torch.float64), nn.ReLU())
    with ns.nn.accumulating(model, 2):
        for x in batches()[:2]:
            model(mine(x.repeat(1, 3, 1), rank).requires_grad_()).square().sum().backward()
    return {name: t.clone() for name, t in model[0].named_buffers()}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    hasty = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
    own = pairs[rank // 2]
    double = torch.float64
    x, grad, mask = (mine(t, rank) for t in whole("positions", double))
    found = cases(rank)
    found["pair"] = step(layer(double, process_group=own), x, grad)
    found |= {kind: spiking(kind, rank) for kind in SPIKING}

    cumulative = layer(double)
    cumulative.momentum = None
    found["cumulative"] = [step(cumulative, x.detach() * factor, grad) for factor in (1, 2)][-1]
    half = layer(torch.bfloat16)
    found["half"] = {"y": half(x.detach().bfloat16()).detach(), "var": half.running_var}
    still = layer(double)
    found["nothing"] = step(still, x.detach(), grad, mask=torch.zeros_like(mask), fill="bias")
    found["evaluation"] = layer(double).eval()(x.detach()).detach()
    constant = layer(torch.float32)
    found["constant"] = constant(torch.full_like(x, 1e6 + 1 / 16).float()).detach()

    model = net(ns.nn.BatchNorm1d(CHANNELS))
    model = DistributedDataParallel(ns.nn.SyncBatchNorm.convert_sync_batchnorm(model))
    data = [mine(batch, rank) for batch in batches()]
    found["trained"] = train(model, data, WORLD / sum(SIZES))

    found["accumulated"] = accumulated(rank)

    value = x.detach().requires_grad_()
    y = layer(double)(value).square().sum()
    found["twice"] = caught(lambda: torch.autograd.grad(y, value, create_graph=True))
    one = torch.full((int(rank == 1), CHANNELS), 3.0, dtype=double)
    found["lone"] = caught(lambda: layer(double)(one))
    if rank < 2:
        found["outside"] = caught(
            lambda: layer(double, process_group=dist.GroupMember.NON_GROUP_MEMBER).ranks
        )
    if rank == 0:  # no other rank takes part
        found["checked"] = not ns.check(nn.Sequential(layer(double)), x.detach(), select=["NS101"]).findings
    torch.save(found, folder / f"{rank}.pt")

    late = {}
    if rank == 0:  # its partner does not come
        late["late"] = caught(lambda: layer(double, process_group=hasty)(x))
    y = layer(double)(x.detach().requires_grad_()).sum()
    dist.barrier()
    if rank < 3:  # and rank 3 goes, before its backward pass
        late["gone"] = caught(y.backward)
    torch.save(late, folder / f"late{rank}.pt")
    sys.stdout.flush()
    os._exit(0)  # gloo's own clean-up may wait for ever for a rank that has gone


if __name__ == "__main__":
    main(Path(sys.argv[1]))
