"""One rank of several identifies and compares by itself: synchronized norms wait for nobody, and take no other data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn

import normscope as ns
from normscope.errors import ModelError
from normscope.identify.identification import identify
from normscope.spec import families

if not distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch.testing._internal.distributed.fake_pg import FakeStore

SHAPE = (8, 4)


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """A world whose second rank gives whatever memory held, at once; another backend waits."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    distributed.destroy_process_group()


class Mixing(nn.BatchNorm1d):
    """Its own synchronization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            distributed.all_reduce(x.mean(0))
        return super().forward(x)


@pytest.mark.parametrize("kind", [ns.nn.SyncBatchNorm, nn.SyncBatchNorm])
def test_a_synchronized_norm_is_a_batch_norm_on_the_rank_that_looks(kind: type[nn.Module]) -> None:
    for training in (True, False):
        found = identify(kind(4), SHAPE, training=training)
        assert found.spec is not None
        assert found.spec.same_function(families.batch_norm())
        assert found.notes == ()
    assert ns.compare(kind(4), nn.BatchNorm1d(4), SHAPE).same is True


def test_a_function_that_calls_one_is_a_batch_norm_too() -> None:
    norm = ns.nn.SyncBatchNorm(4).double()
    found = identify(lambda x: norm(x), torch.zeros(SHAPE, dtype=torch.float64))
    assert found.spec is not None
    assert found.spec.same_function(families.batch_norm(weight=False, bias=False, running=False))


def test_a_collective_of_its_own_is_told_and_not_waited_for() -> None:
    said = (
        "what is identified runs on this rank alone; it called allreduce, for which other ranks would have to come. "
        "Identify it in a process without torch.distributed"
    )
    with pytest.raises(ModelError) as caught:
        identify(Mixing(4), SHAPE, training=True)
    assert str(caught.value) == said
    assert (
        f"in training it raises, so that mode was not seen (AsksOtherRanks: {said})"
        in identify(Mixing(4), SHAPE, training=False).notes
    )
