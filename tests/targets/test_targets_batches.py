"""Data files: what is in them comes out, and nothing in them can run."""

from __future__ import annotations

import io
import os
import pickle
import traceback
import warnings
from functools import cache
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
        ("absent.npz", "there is no file {path}"),
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
        (
            "none.pt",
            "{path} holds an object of type NoneType; the batch must be a tensor, a tuple of them, or a dict of them",
        ),
        (
            "list.pt",
            "{path} holds an empty list; the batch must be a tensor, a tuple of them, or a dict of them",
        ),
        ("nones.pt", "{path} holds None under inputs and mask; leave that out"),
        ("numbered.pt", "{path} holds a value named 0; names must be strings: inputs, targets, mask"),
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
    torch.save(None, tmp_path / "none.pt")
    torch.save([], tmp_path / "list.pt")
    torch.save({"inputs": None, "mask": None}, tmp_path / "nones.pt")
    torch.save({0: torch.ones(2)}, tmp_path / "numbered.pt")
    path = tmp_path / name
    with pytest.raises(BadInput) as caught:
        batches.read(path)
    assert str(caught.value) == message.format(path=path)


class Config:
    """A class of the user's, which a checkpoint often holds beside the tensors."""


class Bound:
    def __reduce__(self) -> tuple[object, tuple[()]]:
        return (torch.ones(2).tolist, ())


@cache
def forbidden() -> dict[str, tuple[bytes, str]]:
    """name -> content, and what it asks for."""

    def saved(value: object, **how: bool) -> bytes:
        file = io.BytesIO()
        torch.save(value, file, **how)
        return file.getvalue()

    scripted = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), scripted)
    config = f"it asks for {Config.__module__}.Config"
    return {
        "trap": (saved({"x": Trap()}), "it asks for exec"),
        "trap.old": (saved({"x": Trap()}, _use_new_zipfile_serialization=False), "it asks for exec"),
        "trap.bare": (pickle.dumps(Trap(), 4), "it asks for builtins.exec"),
        "trap.bare2": (pickle.dumps(Trap(), 2), "it asks for exec"),
        "system": (saved(System()), f"it asks for {os.system.__module__}.system"),
        "bound": (saved(Bound()), "it asks for getattr"),
        "config": (saved({"x": torch.ones(2), "config": Config()}), config),
        "config.old": (saved(Config(), _use_new_zipfile_serialization=False), config),
        "module": (saved(torch.nn.ReLU()), "it asks for torch.nn.modules.activation.ReLU"),
        "scripted": (scripted.getvalue(), "it is a TorchScript archive, which is code"),
    }


class System:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, ("echo the trap ran",))


@pytest.mark.parametrize("name", forbidden())
def test_a_pt_file_that_is_more_than_tensors_is_refused_with_the_name_of_what_it_asks_for(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.pt"
    content, reason = forbidden()[name]
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as warned, pytest.raises(BadTarget) as caught:
        batches.read(path)
    assert warned == []
    assert str(caught.value) == (
        f"{path} cannot be read as plain tensors ({reason}). Files that run code are never loaded: "
        "save it again as safetensors, or with torch.save(model.state_dict(), ...)"
    )
    shown = "".join(traceback.format_exception(caught.value))
    assert "set to `False`" not in shown  # the loader's advice to switch the safety off


def test_a_header_that_claims_more_than_memory_holds(tmp_path: Path) -> None:
    path = tmp_path / "huge.npy"
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (10**14,)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(BadInput) as caught:
        batches.read(path)
    assert str(caught.value).startswith(
        f"{path} claims more data than fits into memory; is it broken? (MemoryError: Unable to allocate"
    )


def test_suffixes_and_byte_orders_of_any_kind(tmp_path: Path) -> None:
    x = np.arange(6.0, dtype=">f4").reshape(2, 3)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "x.npy").rename(tmp_path / "x.NPY")
    assert batches.read(tmp_path / "x.NPY").inputs.tolist() == x.tolist()
    save_file({"x": torch.ones(2)}, str(tmp_path / "x.SafeTensors"))
    assert batches.read(tmp_path / "x.SafeTensors").inputs.tolist() == [1, 1]


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
    "spec",
    [
        "",
        "8x",
        "axb",
        "0x3",
        "-1x3",
        "2x3:int3",
        "2x3:int64:y",
        "2x3:float32:1:2",
        "2x3:int64:0",
        "2x3:float32:3",
        "2x3:int8:300",
        "2x3:cat",
        "9" * 30,
        "99999999999x99999999",
    ],
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


def test_a_prefix_comes_off_only_where_the_model_has_none(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    inner = torch.nn.LayerNorm(3)
    torch.save({f"module.{k}": v for k, v in inner.state_dict().items()}, path)
    state, _, notes = checkpoints.load_into(torch.nn.LayerNorm(3), path)
    assert list(state) == ["weight", "bias"]
    assert notes == [f"{path}: took the prefix 'module.' off every key"]
    wrapper = torch.nn.Module()
    wrapper.module = torch.nn.LayerNorm(3)
    assert checkpoints.load_into(wrapper, path)[2] == []


def test_weights_that_do_not_fit_say_so_in_a_few_lines(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(torch.nn.BatchNorm1d(3).state_dict(), path)
    with pytest.raises(BadTarget) as caught:
        checkpoints.load_into(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(99))), path)
    assert str(caught.value) == (
        f"{path} does not fit the model:\n"
        "198 names of the model are missing: 0.weight, 0.bias, 1.weight and 195 more\n"
        "5 names are not the model's: weight, bias, running_mean and 2 more\n"
        "Not one name is the model's: name the model that these weights were saved from."
    )
    for content, message in (
        ({1: torch.ones(2)}, "holds a tensor named 1; a state dict names parameters by strings"),
        ({"epoch": 3}, "holds no named tensors; it must hold a state dict, as model.state_dict() gives"),
    ):
        torch.save(content, path)
        with pytest.raises(BadTarget) as caught:
            checkpoints.load_into(torch.nn.Linear(2, 2), path)
        assert str(caught.value) == f"{path} {message}"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (
            {
                "0.weight": torch.ones(5, 3),
                "0.bias": torch.ones(2),
                "1.weight": torch.ones(4),
                "2.x": torch.ones(1),
            },
            "1 name of the model is missing: 1.bias\n"
            "1 name is not the model's: 2.x\n"
            "2 tensors have another shape: 0.weight is (5, 3), in the model (2, 3), 1.weight is (4,), in the model "
            "(2,)\n"
            "Build the model with the settings that these weights were saved with.",
        ),
        (
            {"net.0.weight": torch.ones(2, 3)}
            | {f"net.{n}": torch.ones(2) for n in ("0.bias", "1.weight", "1.bias", "h")},
            "4 names of the model are missing: 0.weight, 0.bias, 1.weight and 1 more\n"
            "5 names are not the model's: net.0.weight, net.0.bias, net.1.weight and 2 more\n"
            "All names of the model stand there behind 'net.': take it off, or name the model that has it.",
        ),
        (
            {f"{a}.{n}": torch.ones(2) for a in "xy" for n in ("0.bias", "1.weight", "1.bias")},
            "4 names of the model are missing: 0.weight, 0.bias, 1.weight and 1 more\n"
            "6 names are not the model's: x.0.bias, x.1.weight, x.1.bias and 3 more\n"
            "Not one name is the model's: name the model that these weights were saved from.",
        ),
        (
            {"weight": torch.ones(2, 3), "bias": torch.ones(2)},
            "4 names of the model are missing: 0.weight, 0.bias, 1.weight and 1 more\n"
            "2 names are not the model's: weight, bias\n"
            "All names stand in the model behind '0.': put it before them, or name that part of the model.",
        ),
    ],
)
def test_weights_that_do_not_fit_were_told_in_words_of_torch(
    state: dict[str, torch.Tensor], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "w.pt"
    torch.save(state, path)
    with pytest.raises(BadTarget) as caught:
        checkpoints.load_into(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2)), path)
    assert str(caught.value) == f"{path} does not fit the model:\n{said}"


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net").mkdir()
    for advice in ("name a file of weights", "name one of its files: a.pt"):
        with pytest.raises(BadTarget) as caught:
            targets.resolve("net")
        assert str(caught.value) == (
            f"the folder net holds no config.json with weights and no .safetensors file; {advice}"
        )
        Path("net/a.pt").touch()


def test_a_file_as_target_says_what_to_do() -> None:
    with pytest.raises(BadTarget) as caught:
        targets.resolve("model.safetensors")
    assert str(caught.value) == (
        "model.safetensors is a file of weights, and this needs the model's code: name the model as "
        "package.module:attribute and pass the file with --weights model.safetensors"
    )
