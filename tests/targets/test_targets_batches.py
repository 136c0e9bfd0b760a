"""Data files: what is in them comes out, and nothing in them can run."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from normscope import targets
from normscope.errors import BadInput, BadTarget, NormscopeError
from normscope.targets import batches, checkpoints


class Trap:
    """Unpickling this would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('the trap ran')",))


def test_each_format_gives_the_same_batch(tmp_path: Path) -> None:
    x, y = np.arange(12.0, dtype=np.float32).reshape(4, 3), np.arange(4)
    np.savez(tmp_path / "a.npz", inputs=x, targets=y)
    torch.save({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, tmp_path / "b.pt")
    save_file({"input": torch.from_numpy(x), "labels": torch.from_numpy(y)}, str(tmp_path / "c.safetensors"))
    for name in ("a.npz", "b.pt", "c.safetensors"):
        batch = batches.read(tmp_path / name)
        assert torch.equal(batch.inputs, torch.from_numpy(x)), name
        assert torch.equal(batch.targets, torch.from_numpy(y)), name
    np.save(tmp_path / "d.npy", x)
    assert torch.equal(batches.read(tmp_path / "d.npy").inputs, torch.from_numpy(x))
    torch.save((torch.from_numpy(x), torch.from_numpy(y)), tmp_path / "e.pt")
    assert isinstance(batches.read(tmp_path / "e.pt").inputs, tuple)


def test_other_names_are_keyword_arguments(tmp_path: Path) -> None:
    ids = np.zeros((2, 5), dtype=np.int64)
    np.savez(tmp_path / "a.npz", input_ids=ids, attention_mask=ids + 1, mask=ids + 1)
    batch = batches.read(tmp_path / "a.npz")
    assert set(batch.inputs) == {"input_ids", "attention_mask"}
    assert batch.mask.shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.npz", "there is no file {path}"),
        ("a.txt", "{path}: the batch must be a .npz, .npy, .pt or .safetensors file, got .txt"),
        (
            "pickled.npy",
            "{path} holds no plain arrays (or pickled objects, which could run code); save it with numpy.save",
        ),
        (
            "pickled.npz",
            "{path} holds no plain arrays (or pickled objects, which could run code); save it with numpy.save",
        ),
        ("both.npz", "{path} holds both inputs and x; keep one"),
        ("empty.npz", "{path} holds no inputs; name them inputs, or as the model's keyword arguments"),
        ("extra.npz", "{path} holds other beside the inputs; name all as keyword arguments instead"),
    ],
)
def test_bad_data_has_one_clear_message(name: str, message: str, tmp_path: Path) -> None:
    x = np.zeros((2, 2))
    (tmp_path / "a.txt").write_text("1")
    np.save(tmp_path / "pickled.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "pickled.npz", x=np.array([Trap()], dtype=object))
    np.savez(tmp_path / "both.npz", inputs=x, x=x)
    np.savez(tmp_path / "empty.npz", y=x)
    np.savez(tmp_path / "extra.npz", x=x, other=x)
    path = tmp_path / name
    with pytest.raises(BadInput) as caught:
        batches.read(path)
    assert str(caught.value) == message.format(path=path)


def test_a_pt_file_that_needs_pickle_is_refused_with_the_name_of_what_it_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "evil.pt"
    torch.save({"x": Trap()}, path)
    with pytest.raises(BadTarget) as caught:
        batches.read(path)
    assert str(caught.value) == (
        f"{path} cannot be read as plain tensors (it asks for exec). Files that run code are never loaded: "
        "save it again as safetensors, or with torch.save(model.state_dict(), ...)"
    )
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(BadTarget, match="plain tensors"):
        batches.read(path)


@given(st.binary(max_size=200), st.sampled_from([".npz", ".npy", ".pt", ".safetensors"]))
def test_garbage_is_one_error(tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str) -> None:
    path = tmp_path_factory.mktemp("garbage") / f"x{suffix}"
    path.write_bytes(content)
    with pytest.raises(NormscopeError):
        batches.read(path)


def test_random_input() -> None:
    assert batches.random("8x3x4x5").shape == (8, 3, 4, 5)
    ids = batches.random("2x16:int64:100")
    assert ids.dtype == torch.int64
    assert int(ids.max()) < 100
    assert batches.random("2x3:bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "spec", ["", "8x", "axb", "0x3", "-1x3", "2x3:int3", "2x3:int64:y", "2x3:float32:1:2", "2x3:int64:0"]
)
def test_bad_random_input(spec: str) -> None:
    with pytest.raises(BadInput):
        batches.random(spec)


def test_weights_load_with_nests_and_prefixes(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(3)
    model.running_mean.fill_(5.0)
    wrapped = {"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}, "epoch": 3}
    torch.save(wrapped, tmp_path / "w.pt")
    other = torch.nn.BatchNorm1d(3)
    checkpoints.load_into(other, tmp_path / "w.pt")
    assert torch.equal(other.running_mean, model.running_mean)
    with pytest.raises(BadTarget, match=r"w\.pt does not fit the model"):
        checkpoints.load_into(torch.nn.BatchNorm1d(4), tmp_path / "w.pt")


def test_a_file_as_target_says_what_to_do() -> None:
    with pytest.raises(BadTarget) as caught:
        targets.resolve("model.safetensors")
    assert str(caught.value) == (
        "model.safetensors is a file of weights or a graph; a check needs the model's code: name it as "
        "package.module:attribute and pass the file with --weights model.safetensors"
    )
