"""Running statistics under accumulation and checkpointing: one update a step, by all that the step has seen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normscope as ns
from normscope.errors import BadInput
from normscope.nn import accumulating


def batch(samples: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 5 + 3 * torch.randn(samples, *shape, generator=generator, dtype=torch.float64)


def statistics(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for name, buffer in model.named_buffers() if "running" in name]


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, norm: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), norm, nn.ReLU(), nn.Linear(6, 6))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


# What accumulation does without it ------------------------------------------------------------------------------------


def test_micro_batches_normalize_as_themselves_and_not_as_one() -> None:
    """k micro-batches of b are k batches of b: to outputs and gradients with the option too, and to what is stored
    without it."""
    x = batch(12, 3)
    norm = ns.nn.BatchNorm1d(3).double()
    parts = x.split(4)
    alone = torch.cat([copy.deepcopy(norm)(part) for part in parts])
    together = copy.deepcopy(norm)
    assert (together(x) - alone).abs().max() > 0.1
    plain, merged = copy.deepcopy(norm), copy.deepcopy(norm)
    assert torch.equal(torch.cat([plain(part) for part in parts]), alone)
    model = nn.Sequential(merged)
    with accumulating(model, 3):
        assert torch.equal(torch.cat([model(part) for part in parts]), alone)
    assert plain.num_batches_tracked == 3
    assert (plain.running_mean - together.running_mean).abs().max() > 0.1
    assert merged.num_batches_tracked == together.num_batches_tracked == 1
    # twelve numbers, summed in another order
    torch.testing.assert_close(statistics(merged), statistics(together), rtol=1e-14, atol=1e-14)


# What is merged -------------------------------------------------------------------------------------------------------

NORMS: list[tuple[Any, tuple[int, ...], int]] = [
    (lambda: nn.BatchNorm2d(3), (3, 4, 2), 0),
    (lambda: nn.BatchNorm1d(3, momentum=None), (3,), 0),
    (lambda: ns.nn.BatchNorm1d(3, 1e-3, 0.3, running_correction=0), (3, 4), 0),
    (lambda: ns.nn.BatchNorm3d(3, affine=False), (3, 2, 2, 2), 0),
    (lambda: ns.nn.SyncBatchNorm(3), (3, 4), 0),
    (lambda: ns.nn.ThresholdBatchNorm1d(3, 0.5), (3, 4), 1),
    (lambda: ns.nn.BatchNormThroughTime1d(2, 3), (3, 4), 1),
    (lambda: ns.nn.TemporalEffectiveBatchNorm1d(2, 3), (3, 4), 1),
]


@pytest.mark.parametrize(
    ("make", "shape", "samples"), NORMS, ids=[type(make()).__name__ for make, _, _ in NORMS]
)
def test_one_update_by_all_micro_batches_is_that_of_the_whole_batch(
    make: Any, shape: tuple[int, ...], samples: int
) -> None:
    """Of unequal sizes, twice in a row."""
    whole, norm = make().double(), make().double()
    model = nn.Sequential(norm)
    with accumulating(model, 3) as run:
        for seed in (1, 2):
            x = batch(9, *shape, seed=seed)
            x = torch.stack([x, 2 * x]) if samples else x
            whole(x)
            for part in x.split((2, 3, 4), samples):
                model(part)
            assert run.seen == 0
    assert torch.equal(norm.num_batches_tracked, whole.num_batches_tracked)
    # 144 numbers of about 5, summed in another order
    torch.testing.assert_close(statistics(norm), statistics(whole), rtol=1e-13, atol=1e-13)


def test_masks_lengths_and_packed_sequences_count_what_counts() -> None:
    x = batch(6, 3, 5)
    lengths = torch.tensor([5, 2, 1, 5, 3, 4])
    mask = (torch.arange(5) < lengths[:, None])[:, None]
    whole = ns.nn.BatchNorm1d(3).double()
    whole(x, lengths=lengths)
    frames = [row[:, :n].T for row, n in zip(x, lengths.tolist(), strict=True)]
    packed = [nn.utils.rnn.pack_sequence(part, enforce_sorted=False) for part in (frames[:4], frames[4:])]
    calls = [
        [((x[:2], mask[:2]), {}), ((x[2:],), {"mask": mask[2:]})],
        [((part,), {"lengths": n}) for part, n in zip(x.split(3), lengths.split(3), strict=True)],
        [((part,), {}) for part in packed],
    ]
    for given in calls:
        norm = ns.nn.BatchNorm1d(3).double()
        with accumulating(norm, 2):
            for args, kwargs in given:
                norm(*args, **kwargs)
        torch.testing.assert_close(statistics(norm), statistics(whole), rtol=1e-14, atol=1e-14)  # as above
    norm = ns.nn.BatchNorm1d(3).double()
    before = statistics(norm)
    with accumulating(norm, 2):
        norm(x, torch.zeros_like(mask))
        norm(x, torch.zeros_like(mask))
    assert all(map(torch.equal, statistics(norm), before))
    assert norm.num_batches_tracked == 0


def test_large_means_cost_no_digits() -> None:
    norm, whole = ns.nn.BatchNorm1d(1, momentum=1.0), ns.nn.BatchNorm1d(1, momentum=1.0).double()
    x = 1e4 + torch.linspace(-1, 1, 64)[:, None]
    whole(x.double())
    with accumulating(norm, 4):
        for part in x.split(16):
            norm(part)
    assert abs(float(norm.running_var / whole.running_var) - 1) < 1e-6


# Recomputation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, ns.nn.BatchNorm1d])
def test_recomputation_moves_nothing(reentrant: bool, steps: int, kind: type[nn.Module]) -> None:
    """As without checkpoints, where every forward is one: gradients and all that is stored, bit for bit."""
    torch.manual_seed(0)
    plain = Checkpointed(kind(6), None).double()
    model, twice = copy.deepcopy(plain), copy.deepcopy(plain)
    model.reentrant = twice.reentrant = reentrant
    found = []
    for net in (plain, model):
        with accumulating(net, steps):
            for seed in range(4):
                net(batch(5, 6, seed=seed).requires_grad_()).square().sum().backward()
        found.append([*(p.grad for p in net.parameters()), *net.buffers()])
    assert all(map(torch.equal, *found))
    assert model.block[1].num_batches_tracked == 4 // steps
    twice(batch(5, 6).requires_grad_()).square().sum().backward()
    assert twice.block[1].num_batches_tracked == 2  # without the option


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, ns.nn.BatchNorm1d])
def test_a_recomputation_that_stops_in_the_norm(kind: type[nn.Module]) -> None:
    """Nothing behind the norm keeps a tensor, so that torch raises within it, once it has what it needs."""
    model = Checkpointed(kind(6), False)
    del model.block[2:]
    with accumulating(model):
        model(torch.randn(5, 6).requires_grad_()).sum().backward()
        assert model.block[1].track_running_stats
    assert model.block[1].num_batches_tracked == 1


def test_compiled_with_breaks_at_the_norms() -> None:
    model = nn.Sequential(nn.Linear(6, 6), ns.nn.BatchNorm1d(6)).double()
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with accumulating(model, 2), accumulating(eager, 2):
        for seed in range(4):
            x = batch(5, 6, seed=seed)
            assert torch.equal(compiled(x), eager(x))
    torch._dynamo.reset()  # what was compiled decides which sizes are left open later
    assert all(map(torch.equal, model.buffers(), eager.buffers()))
    assert model[1].num_batches_tracked == 2


def test_a_model_that_is_recomputed_whole_is_one_micro_batch() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
    with accumulating(model, 2) as run:
        checkpoint(model, batch(5, 6), use_reentrant=False).sum().backward()
        assert run.seen == 1


# Where it begins and ends ---------------------------------------------------------------------------------------------


def test_a_last_step_of_fewer_micro_batches() -> None:
    x = batch(8, 3)
    norm, whole = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    whole(x)
    whole(x[:4])
    run = accumulating(norm, 3)
    norm(x[:4])
    norm(x[4:])
    run.update()
    norm(x[:4])
    run.remove()
    torch.testing.assert_close(statistics(norm), statistics(whole), rtol=1e-14, atol=1e-14)  # as above
    norm(x)
    assert norm.num_batches_tracked == 3  # its own again


def test_other_forwards_are_left_as_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval()).double()
    x = batch(4, 3)
    with accumulating(model, 2) as run:
        model[0](x)  # no forward of the model
        assert model[0].num_batches_tracked == 1
        model.eval()(x)
        assert run.seen == 0
        model.train()
        model[1].eval()
        model(x)
        model(x)
    assert [int(norm.num_batches_tracked) for norm in model] == [2, 0]


def test_a_forward_that_fails_leaves_no_trace() -> None:
    norm = nn.BatchNorm1d(3).double()
    model = nn.Sequential(norm, nn.Linear(4, 4).double())
    before = statistics(norm)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), accumulating(model, 1):
        model(batch(4, 3))
    with accumulating(model, 1) as run:
        with pytest.raises(ValueError, match="expected 2D or 3D input"):
            model(batch(4, 3, 1, 1))
        assert norm.track_running_stats
        assert run.seen == 0
    assert all(map(torch.equal, statistics(norm), before))
    assert not any((norm._forward_hooks, norm._forward_pre_hooks, model._forward_hooks))


def test_a_norm_that_is_called_twice_moves_once() -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3).double()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.norm(a) - self.norm(b)

    model, whole = Siamese(), nn.BatchNorm1d(3).double()
    x = batch(8, 3)
    whole(x)
    with accumulating(model):
        model(*x.split(4))
    torch.testing.assert_close(statistics(model), statistics(whole), rtol=1e-14, atol=1e-14)  # as above


# Errors ---------------------------------------------------------------------------------------------------------------


def refused(work: Any) -> str:
    with pytest.raises(BadInput) as caught:
        work()
    return str(caught.value)


def test_what_stores_something_else_is_refused_by_name() -> None:
    for norm in (
        ns.nn.BatchRenorm1d(3),
        ns.nn.GhostBatchNorm1d(3, size=2),
        nn.InstanceNorm1d(3, track_running_stats=True),
    ):
        assert refused(lambda norm=norm: accumulating(nn.ModuleDict({"odd": norm}))) == (
            f"accumulating merges the moments of batch norms; got odd, a {type(norm).__name__}, which stores something "
            "else. Replace it, or set its track_running_stats=False."
        )
        norm.track_running_stats = False
        accumulating(nn.ModuleDict({"odd": norm})).remove()


def test_one_accumulation_at_a_time_of_whole_steps() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    with accumulating(model, 2):
        assert refused(lambda: accumulating(model[0])) == (
            "a norm takes part in one accumulation at a time; got a model of which one does already. Leave the block "
            "of the other (remove()) first."
        )
    assert refused(lambda: accumulating(model, 0)) == (
        "accumulating needs every size in steps to be an integer of 1 or more; got 0. Give the micro-batches of one "
        "optimizer step."
    )


def test_one_element_in_a_whole_step_is_refused() -> None:
    norm = ns.nn.BatchNorm1d(3, track_running_stats=True).double()
    model = nn.Sequential(norm)
    with accumulating(model, 2) as run:
        run._tables[norm] = [torch.ones(3, 3, dtype=torch.float64)]
        assert refused(run.update) == (
            "a stored variance divides by M - 1; got 0 with M = 1 in all micro-batches of a step together. Take larger "
            "batches."
        )
