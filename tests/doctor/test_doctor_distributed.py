"""Models whose values are not here: freed memory, DTensors and FSDP2 are refused, in words, and left alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import normscope as ns
from normscope.doctor.copy_on_write import storages_of
from normscope.doctor.refusals import Refused
from normscope.errors import BadInput
from normscope.identify.memory import freed

torch.set_num_threads(1)

FREED = (
    "0.bias has shape (8,), but its memory was freed or made smaller than that. Load the weights again, or build the "
    "model anew and load its state dict, then check it"
)
UNSHARD = "Check the model before it is distributed, or load its full state dict into a plain copy"
DTENSOR = f"0.weight is a DTensor, a piece of a parameter that a device mesh shares. {UNSHARD}"
FSDP2 = (
    "the model is sharded by fully_shard: its parameters are pieces of the model's, and freed between runs. "
    f"{UNSHARD}"
)

RANK = """
import os, sys
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
import normscope as ns

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)

def net():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))

def forwarded(model):
    model(torch.randn(4, 8))
    return model

def part(model):
    fully_shard(model[2])
    return model

MODELS = {
    "distribute_module": lambda: distribute_module(net(), init_device_mesh("cpu", (1,))),
    "fully_shard": lambda: fully_shard(net()),
    "fully_shard after a forward": lambda: forwarded(fully_shard(net())),
    "fully_shard of a part": lambda: part(net()),
}
for name, make in MODELS.items():
    model = make()
    for what in (ns.check, ns.explain):
        try:
            what(model, torch.randn(8, 8))
            said = "no error"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(name, what.__name__, said, sep="|", flush=True)
os._exit(0)  # a process group that is torn down at exit may hang
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_device_mesh_object_has_no_attribute_layout(tmp_path: Path):
    """Torch lists a DTensor's device mesh among its parts; check and explain ended in an AttributeError."""
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(tmp_path / "store")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = {
        "distribute_module": DTENSOR,
        "fully_shard": FSDP2,
        "fully_shard after a forward": FSDP2,
        "fully_shard of a part": FSDP2.replace("the model is", "2 is", 1),
    }
    wanted = [
        f"{name}|{what}|Refused: {text}" for name, text in said.items() for what in ("check", "explain")
    ]
    assert done.stdout.splitlines() == wanted


def broken(path: str = "0") -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    model.get_submodule(path).bias.untyped_storage().resize_(0)
    return model


@pytest.mark.parametrize("inputs", [None, torch.zeros(8, 8)], ids=["state", "data"])
def test_freed_storage_killed_the_process(inputs):
    with pytest.raises(Refused, match=f"^{re.escape(FREED)}$"):
        ns.check(broken(), inputs)


def test_freed_storage_of_a_norm_killed_identify():
    message = (
        "a module is identified by its values, and the memory of bias of LayerNorm was freed or made smaller than its "
        "shape. Load its values again"
    )
    with pytest.raises(BadInput, match=f"^{re.escape(message)}$"):
        ns.identify(broken("1")[1], torch.zeros(8, 8))


def test_freed_tensors_that_are_plain_attributes_are_refused():
    model = nn.Sequential(nn.LayerNorm(4))
    model[0].cache = torch.zeros(2, 3)
    model[0].cache.untyped_storage().resize_(20)  # one float short
    with pytest.raises(Refused, match=r"^0\.cache has shape \(2, 3\), but its memory was freed"):
        ns.check(model)


def test_tensors_that_are_all_there_are_not_freed():
    base = torch.arange(24.0).reshape(4, 6)
    whole = (
        base.t(), base[1:, ::2], base[:0], base[0, 0], base.expand(3, 4, 6), base.to_sparse(),
        base.to_sparse_csr(), base.to_sparse_csc(), TwoTensor(base, base.clone()),
    )  # fmt: skip
    assert not any(freed(tensor) for tensor in whole)
    inner = base.clone()
    wrapped = TwoTensor(base, inner)
    inner.untyped_storage().resize_(0)
    assert freed(wrapped)


class Listing(TwoTensor):
    """Says, as DTensor does, that a part of it is no tensor."""

    def __tensor_flatten__(self):
        names, context = super().__tensor_flatten__()
        return [*names, "device_mesh"], context

    device_mesh = object()


def test_parts_that_are_no_tensors_have_no_storage():
    tensor = Listing(torch.zeros(3), torch.ones(3))
    assert [s.data_ptr() for s in storages_of(tensor)] == [tensor.a.data_ptr(), tensor.b.data_ptr()]
