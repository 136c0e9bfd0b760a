"""Copy-on-write: what is written is cloned, nothing else; what escapes is caught or told."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from normscope.doctor import session as session_module
from normscope.doctor.copy_on_write import CopyOnWrite, Vault, written_arguments
from normscope.doctor.session import Session

torch.set_num_threads(1)


class Applies(nn.Module):
    """A forward that applies a function to its parameter of 1000 float32."""

    def __init__(self, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1000.0))
        self.register_buffer("small", torch.zeros(10))
        self.function = function

    def forward(self, x):
        with torch.no_grad():
            self.function(self.weight)
        return x * self.weight


def extra_after(function) -> int:
    model, x = Applies(function), torch.ones(1000)
    with Session(model) as session:
        session.forward((x,))
        assert model.weight.tolist() == list(range(1000))
        assert session.unverified == []
        return session.extra_bytes


BUFFERS = 40
WRITES = {
    "in place": lambda w: w.add_(1),
    "a view": lambda w: w[::2].mul_(2),
    "data": lambda w: w.data.fill_(0),
    "index": lambda w: w.__setitem__(3, 0.0),
    "list of tensors": lambda w: torch._foreach_neg_([w]),
    "out": lambda w: torch.exp(w, out=w),
    "reshaped": lambda w: w.view(10, 100).t().zero_(),
    "other dtype": lambda w: w.view(torch.int32).bitwise_not_(),
    "numpy": lambda w: np.negative(w.numpy(), out=w.numpy()),
    "dlpack": lambda w: np.from_dlpack(w.detach()).fill(0),
    "pointer": lambda w: ctypes.memset(w.data_ptr(), 7, 400),
    "storage": lambda w: w.untyped_storage().fill_(1),
}
READS = {
    "arithmetic": lambda w: w + 1,
    "metadata in place": lambda w: w.data.unsqueeze_(0),
    "a copy": lambda w: w.clone().add_(1),
    "detach": lambda w: w.detach(),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_cloned_once(name):
    assert extra_after(WRITES[name]) == BUFFERS + 4000


@pytest.mark.parametrize("name", READS)
def test_what_is_read_is_not_cloned(name):
    assert extra_after(READS[name]) == BUFFERS


def test_memory_is_buffers_and_what_is_written():
    """A batch norm net in training writes its running statistics and nothing else."""
    model = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100))
    with Session(model) as session:
        session.forward((torch.randn(4, 100),), mode="train")
        assert session.extra_bytes == 2 * 400 + 8  # mean and variance in float32, the counter in int64


def test_every_operator_that_takes_running_statistics_is_known_to_write_them():
    """The schemas of several of them do not say so."""
    forward = [
        schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and any(a.name == "running_mean" for a in schema.arguments)
    ]
    assert {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::batch_norm_gather_stats"} <= {
        schema.name for schema in forward
    }
    for schema in forward:
        packet = getattr(torch.ops.aten, schema.name.split("::")[1])
        overload = getattr(packet, schema.overload_name or "default")
        names = {name for _, name in written_arguments(overload)}
        assert {"running_mean", "running_var"} <= names, schema


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_native_batch_norm_on_plain_tensors(dtype):
    mean, variance = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
    vault = Vault()
    for tensor in (mean, variance):
        vault.hold(tensor)
    with CopyOnWrite((vault,)):
        torch.native_batch_norm(torch.randn(8, 3, dtype=dtype), None, None, mean, variance, True, 0.1, 1e-5)
    assert mean.abs().min() > 0
    vault.restore()
    assert mean.tolist() == [0, 0, 0]
    assert variance.tolist() == [1, 1, 1]


def test_nan_payloads_and_negative_zero_come_back_bit_for_bit():
    bits = torch.tensor([0x7FC00001, 0xFFC00002, 0x80000000, 0x7F800001], dtype=torch.int64).to(torch.int32)
    tensor = bits.clone().view(torch.float32)
    vault = Vault()
    vault.hold(tensor)
    vault.save(tensor)
    tensor.zero_()
    vault.restore()
    assert torch.equal(tensor.view(torch.int32), bits)


def test_sparse_tensors_and_wrapper_subclasses_are_reached():
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse = torch.eye(3).to_sparse()
            self.rows = torch.eye(3).to_sparse_csr()
            self.two = TwoTensor(torch.zeros(3), torch.ones(3))

        def forward(self, x):
            self.sparse.mul_(3)
            self.sparse._values().add_(1)
            self.rows.values().mul_(3)
            self.two.add_(3)
            return x

    model = Holds()
    assert is_traceable_wrapper_subclass(model.two)
    with Session(model) as session:
        session.forward((torch.ones(3),))
    assert torch.equal(model.sparse.to_dense(), torch.eye(3))
    assert torch.equal(model.rows.to_dense(), torch.eye(3))
    assert model.two.a.tolist() == [0, 0, 0]
    assert model.two.b.tolist() == [1, 1, 1]
    assert session.unverified == []


def test_read_only_memory_is_not_touched():
    """Restoring compares first: memory mapped read-only would otherwise be a segmentation fault."""
    array = np.zeros(4)
    array.flags.writeable = False
    model = nn.Module()
    with pytest.warns(UserWarning, match="not writable"):
        model.register_buffer("table", torch.from_numpy(array))
    model.forward = lambda x: x + model.table
    with Session(model) as session:
        session.forward((torch.zeros(4),))
    assert array.tolist() == [0, 0, 0, 0]


def test_a_write_that_no_operation_shows_is_named():
    model = Applies(lambda w: None)
    address = model.weight.data_ptr()
    model.function = lambda w: ctypes.memset(address, 7, 4)
    with Session(model) as session:
        session.forward((torch.ones(1000),))
    assert session.unverified == [
        "weight: its memory was changed by something no operation showed (a C++ extension, a raw pointer) and "
        "could not be put back"
    ]


def test_parameters_too_large_for_a_checksum_are_named(monkeypatch):
    monkeypatch.setattr(session_module, "CHECKSUM_LIMIT", 2**10)
    model = Applies(lambda w: w.data_ptr())
    with Session(model) as session:
        session.forward((torch.ones(1000),))
        assert session.extra_bytes == BUFFERS  # an address alone is then no reason to double the memory
    assert session.unverified == [
        "parameters (0.0 GiB, more than 0 GiB) have no checksum: a write by a C++ extension or through a raw pointer "
        "would go unseen"
    ]


def test_higher_order_operators_pass():
    class Attends(nn.Module):
        def forward(self, x):
            return flex_attention(x, x, x)

    x = torch.randn(1, 2, 16, 16)
    with Session(Attends()) as session:
        output = session.forward((x,))
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)  # float32, sums over 16


def test_functorch_transforms_pass():
    model = nn.Linear(4, 4)

    class Jacobian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x):
            return torch.func.vmap(torch.func.jacrev(self.inner))(x)

    with Session(Jacobian()) as session:
        jacobians = session.forward((torch.randn(3, 4),))
    assert torch.equal(jacobians[0], model.weight)


def test_large_buffers_wait_for_a_write(monkeypatch):
    monkeypatch.setattr(session_module, "BUFFERS_UP_FRONT", 100)
    model = Applies(lambda w: None)
    model.register_buffer("large", torch.zeros(100))
    with Session(model) as session:
        assert session.extra_bytes == BUFFERS
        model.function = lambda w: model.large.add_(1)
        session.forward((torch.ones(1000),))
        assert session.extra_bytes == BUFFERS + 400
    assert (model.large == 0).all()
