"""Files of weights: what is in them comes out tensor by tensor, and what is wrong with them is said in one sentence."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from normscope.errors import BadTarget
from normscope.targets.state_files import names_state, open_state
from normscope.targets.state_files.values import LARGEST_READ

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    """Every dtype, several shapes, a scalar and an empty tensor."""
    generator = torch.Generator().manual_seed(0)
    found = {
        f"t.{str(dtype).removeprefix('torch.')}": (4 * torch.randn(3, 5, generator=generator)).to(dtype)
        for dtype in DTYPES
    }
    return {**found, "scalar": torch.tensor(7), "empty": torch.zeros(0, 3), "vector": torch.arange(4.0)}


def assert_same(path: Path, expected: dict[str, torch.Tensor]) -> None:
    held = open_state(path).tensors
    assert list(held) == list(expected)
    for name, tensor in expected.items():
        got = held[name].read()
        assert got.dtype == tensor.dtype, name
        assert got.shape == tensor.shape, name
        assert (held[name].shape, held[name].dtype) == (
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
        )
        # bytes, so that NaN and float8 compare too
        assert (
            got.contiguous().view(torch.uint8).tolist() == tensor.contiguous().view(torch.uint8).tolist()
            if got.ndim and got.numel()
            else torch.equal(got, tensor)
        ), name


class TestWhatIsInComesOut:
    def test_safetensors(self, tmp_path: Path) -> None:
        save_file(tensors(), tmp_path / "a.safetensors")
        held = open_state(tmp_path / "a.safetensors").tensors
        expected = tensors()
        assert_same(tmp_path / "a.safetensors", {name: expected[name] for name in held})
        assert set(held) == set(expected)

    @pytest.mark.parametrize("zipped", [True, False])
    @pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".bin"])
    def test_torch_save_now_and_before_1_6(self, zipped: bool, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / f"a{suffix}"
        torch.save(OrderedDict(tensors()), path, _use_new_zipfile_serialization=zipped)
        assert_same(path, tensors())

    @pytest.mark.parametrize("zipped", [True, False])
    def test_views_strides_parameters_and_shared_storages(self, zipped: bool, tmp_path: Path) -> None:
        base = torch.arange(24.0).reshape(4, 6)
        state: dict[str, torch.Tensor] = {
            "row": base[1],
            "column": base[:, 2],
            "transposed": base.t(),
            "expanded": base[0, :1].expand(5),
            "again": base,
            "parameter": torch.nn.Parameter(base[2:].clone()),
        }
        tagged = torch.nn.Parameter(torch.ones(2))
        tagged.note = "attributes of a tensor are a dictionary beside it"  # type: ignore[attr-defined]
        path = tmp_path / "a.pt"
        torch.save({**state, "tagged": tagged}, path, _use_new_zipfile_serialization=zipped)
        held = open_state(path).tensors
        for name, tensor in {**state, "tagged": tagged}.items():
            assert torch.equal(held[name].read(), tensor.detach()), name

    def test_protocols(self, tmp_path: Path) -> None:
        for protocol in (2, 3, 4, 5):
            torch.save(tensors(), tmp_path / "a.pt", pickle_protocol=protocol)
            assert_same(tmp_path / "a.pt", tensors())

    def test_shards(self, tmp_path: Path) -> None:
        whole = tensors()
        parts = dict(list(whole.items())[:6]), dict(list(whole.items())[6:])
        places: dict[str, str] = {}
        for number, part in enumerate(parts):
            save_file(part, tmp_path / f"m-{number}.safetensors")
            places |= dict.fromkeys(part, f"m-{number}.safetensors")
        index = tmp_path / "m.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
        assert_same(index, whole)

    def test_shards_of_torch_save(self, tmp_path: Path) -> None:
        torch.save(tensors(), tmp_path / "m-1.bin")
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), "m-1.bin")}))
        assert_same(index, tensors())

    def test_a_folder_with_its_configuration(self, tmp_path: Path) -> None:
        save_file({"norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text('{"rms_norm_eps": 1e-6}')
        state = open_state(tmp_path)
        assert list(state.tensors) == ["norm.weight"]
        assert state.config == {"rms_norm_eps": 1e-6}
        assert state.notes == []

    def test_a_broken_configuration_costs_a_note(self, tmp_path: Path) -> None:
        save_file({"norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
        assert open_state(tmp_path).notes == [f"{tmp_path} has no config.json, which would name eps"]
        (tmp_path / "config.json").write_text('{"a": 1, "a": 2}')
        assert open_state(tmp_path).notes == [
            f"its eps is not known: {tmp_path / 'config.json'} is not the JSON it should be: ValueError: "
            "the name 'a' stands twice"
        ]

    def test_links_in_a_folder_are_followed(self, tmp_path: Path) -> None:
        """The cache of a model hub is made of them."""
        (tmp_path / "blobs").mkdir()
        (tmp_path / "snapshot").mkdir()
        save_file({"norm.weight": torch.ones(4)}, tmp_path / "blobs" / "abc")
        (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/abc")
        assert list(open_state(tmp_path / "snapshot").tensors) == ["norm.weight"]

    def test_only_what_is_asked_for_is_read(self, tmp_path: Path) -> None:
        """A sparse file of 3 GB opens at once, and its small tensor is read."""
        small = torch.arange(4.0)
        header = json.dumps(
            {
                "big": {"dtype": "F32", "shape": [750_000_000], "data_offsets": [0, 3_000_000_000]},
                "small": {"dtype": "F32", "shape": [4], "data_offsets": [3_000_000_000, 3_000_000_016]},
            }
        ).encode()
        path = tmp_path / "a.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.seek(8 + len(header) + 3_000_000_000)
            file.write(small.numpy().tobytes())
        held = open_state(path).tensors
        assert torch.equal(held["small"].read(), small)
        with pytest.raises(BadTarget) as caught:
            held["big"].read()
        assert str(caught.value) == (
            f"{path}: a tensor of 3000000000 bytes is larger than any norm's; it is not read"
        )
        assert LARGEST_READ < 300e6


class TestNests:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda s: {"state_dict": s},
            lambda s: {"model": s, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}},
            lambda s: {"epoch": 3, "hyper": {"lr": 0.1}, "model": {"state_dict": s}},
            lambda s: {"payload": s},
        ],
    )
    def test_the_state_dict_is_found(
        self, wrap: Callable[[dict[str, torch.Tensor]], Any], tmp_path: Path
    ) -> None:
        torch.save(wrap({"bn.weight": torch.ones(2)}), tmp_path / "a.ckpt")
        state = open_state(tmp_path / "a.ckpt")
        assert list(state.tensors) == ["bn.weight"]
        assert state.notes == []

    def test_what_is_left_out_is_said(self, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        torch.save({"ema": {"w": torch.ones(2)}, "model": {"w": torch.ones(2)}}, path)
        assert open_state(path).notes == [f"{path}: checked 'model'; it also holds 'ema'"]
        optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}}
        torch.save({"model": {"w": torch.ones(2)}, "optimizer": optimizer}, path)
        assert open_state(path).notes == [f"{path}: checked 'model'; it also holds 'optimizer'"]

    def test_a_dictionary_inside_itself_ends(self, tmp_path: Path) -> None:
        knot: dict[str, Any] = {}
        knot["model"] = knot
        knot["others"] = {str(i): knot for i in range(200)}
        torch.save(knot, tmp_path / "a.pt")
        with pytest.raises(BadTarget, match="holds no named tensors"):
            open_state(tmp_path / "a.pt")


class Trap:
    """Unpickling this would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('the trap ran')",))


ADVICE = (
    "Files that run code are never loaded: save it again as safetensors, or with "
    "torch.save(model.state_dict(), ...)"
)


class TestCodeIsRefusedByName:
    @pytest.mark.parametrize("zipped", [True, False])
    def test_a_trap(self, zipped: bool, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        torch.save({"w": torch.ones(2), "x": Trap()}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(BadTarget) as caught:
            open_state(path)
        name = "__builtin__.exec"  # as protocol 2 writes builtins
        assert str(caught.value) == f"{path} cannot be read as plain tensors (it asks for {name}). {ADVICE}"

    def test_a_whole_model(self, tmp_path: Path) -> None:
        torch.save(torch.nn.BatchNorm1d(2), tmp_path / "a.pt")
        with pytest.raises(BadTarget, match=r"it asks for torch\.nn\.modules\.batchnorm\.BatchNorm1d\)"):
            open_state(tmp_path / "a.pt")

    def test_settings_of_a_trainer(self, tmp_path: Path) -> None:
        import argparse

        torch.save({"w": torch.ones(2), "args": argparse.Namespace(lr=1)}, tmp_path / "a.pt")
        with pytest.raises(BadTarget, match=r"it asks for argparse\.Namespace\)"):
            open_state(tmp_path / "a.pt")

    def test_what_torch_refuses_is_refused(self, tmp_path: Path) -> None:
        """The list of names is no longer than PyTorch's own, wherever it names something that could run."""
        from torch._weights_only_unpickler import _get_allowed_globals

        from normscope.targets.state_files.descriptions import KNOWN

        for name in _get_allowed_globals():
            assert KNOWN.fullmatch(name) or name.startswith(("torch.sparse.", "torch.cuda.sparse.")), name
        for name in (
            "os.system",
            "builtins.eval",
            "torch.load",
            "torch.hub.load",
            "torch._utils.x",
            "torch.conv1d",
        ):
            assert not KNOWN.fullmatch(name), name

    def test_a_script(self, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.script(torch.nn.BatchNorm1d(2)).save(str(tmp_path / "a.pt"))
        with pytest.raises(BadTarget, match="it is a TorchScript archive, which is code"):
            open_state(tmp_path / "a.pt")

    def test_a_bare_pickle(self, tmp_path: Path) -> None:
        (tmp_path / "a.pt").write_bytes(pickle.dumps(Trap()))
        with pytest.raises(BadTarget, match=r"it asks for builtins\.exec\)"):
            open_state(tmp_path / "a.pt")
        (tmp_path / "b.pt").write_bytes(pickle.dumps({"w": [1.0]}))
        with pytest.raises(BadTarget, match=r"it does not begin as torch\.save writes it"):
            open_state(tmp_path / "b.pt")

    def test_nothing_is_imported_for_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "harm.py").write_text("raise SystemExit('imported')")
        (tmp_path / "a.pt").write_bytes(b"\x80\x02charm\nrun\n.")
        script = (
            "from normscope.targets.state_files import open_state\n"
            "from normscope.errors import BadTarget\n"
            "try:\n    open_state('a.pt')\nexcept BadTarget as error:\n    print(error)\n"
        )
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
        assert "it asks for harm.run" in done.stdout, done.stderr


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def one(shape: Any = (1,), offsets: Any = (0, 4), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


class TestHostileSafetensors:
    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (b"", "{0} is too short for a safetensors file: 0 bytes"),
            (
                struct.pack("<Q", 2**63) + b"{}",
                "{0} is no safetensors file, or broken: its first bytes ask for a header of 9223372036854775808 "
                "bytes; the file has 10, and at most 33554432 are read",
            ),
            (
                struct.pack("<Q", 30_000) + b"[" * 30_000,
                "the header of {0} is nested too deeply",
            ),
            (
                struct.pack("<Q", 2) + b"[]",
                "the header of {0} is no object of named tensors",
            ),
            (
                struct.pack("<Q", 16) + b'{"a": 1, "a": 2}',
                "the header of {0} is not the JSON it should be: ValueError: the name 'a' stands twice",
            ),
            (
                struct.pack("<Q", 10) + b'{"a": NaN}',
                "the header of {0} is not the JSON it should be: ValueError: NaN is no number",
            ),
            (
                header(a=one(), b=one()) + b"\0" * 4,
                "{0}: the tensor 'b' overlaps another one",
            ),
            (
                header(a=one(), b=one(offsets=(8, 12))) + b"\0" * 12,
                "{0}: the tensor 'b' leaves a gap before it",
            ),
            (
                header(a=one()) + b"\0" * 3,
                "{0}: the tensor 'a' ends at byte 4 of the data, but the file holds 3: truncated?",
            ),
            (
                header(a=one()) + b"\0" * 7,
                "{0}: 3 bytes after the last tensor belong to none",
            ),
            (
                header(a=one(shape=[-1])) + b"\0" * 4,
                "{0}: the tensor 'a' has a shape that is no list of at most 64 whole numbers from 0 on",
            ),
            (
                header(a=one(shape=[True])) + b"\0" * 4,
                "{0}: the tensor 'a' has a shape that is no list of at most 64 whole numbers from 0 on",
            ),
            (
                header(a=one(shape=[2**62, 2**62])) + b"\0" * 4,
                f"{{0}}: the tensor 'a' has 4 bytes; its shape and dtype need {2**126}",
            ),
            (
                header(a=one(offsets=[4, 0])) + b"\0" * 4,
                "{0}: the tensor 'a' has data_offsets that are no pair [begin, end] of whole numbers",
            ),
            (
                header(a=one(offsets=[0, 4.0])) + b"\0" * 4,
                "{0}: the tensor 'a' has data_offsets that are no pair [begin, end] of whole numbers",
            ),
            (
                header(a={"dtype": "F32", "shape": [1]}) + b"\0" * 4,
                "{0}: the tensor 'a' needs dtype, shape and data_offsets, and nothing else",
            ),
            (header(), "{0} holds no tensors"),
        ],
    )  # fmt: skip
    def test_one_clear_error(self, content: bytes, text: str, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        path.write_bytes(content)
        with pytest.raises(BadTarget) as caught:
            open_state(path)
        assert str(caught.value) == text.format(path)

    def test_names_that_are_no_utf8(self, tmp_path: Path) -> None:
        text = b'{"\xff\xfe": 1}'
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(BadTarget, match="is not the JSON it should be: UnicodeDecodeError"):
            open_state(tmp_path / "a.safetensors")

    def test_integers_of_thousands_of_digits(self, tmp_path: Path) -> None:
        text = b'{"a": ' + b"9" * 100_000 + b"}"
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(BadTarget):
            open_state(tmp_path / "a.safetensors")

    def test_a_header_of_brackets_is_counted_before_it_is_parsed(self, tmp_path: Path) -> None:
        text = b"[" + b"[]," * 2_100_000 + b"1]"
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(BadTarget, match=r"has 4200001 parts; at most 4000000 are read"):
            open_state(tmp_path / "a.safetensors")

    def test_a_truncated_download(self, tmp_path: Path) -> None:
        content = save({"a.weight": torch.ones(100)})
        (tmp_path / "a.safetensors").write_bytes(content[:-50])
        with pytest.raises(
            BadTarget, match="ends at byte 400 of the data, but the file holds 350: truncated"
        ):
            open_state(tmp_path / "a.safetensors")


def archive(change: Callable[[str, bytes], tuple[str, bytes, int] | None]) -> bytes:
    """A file of ``torch.save`` with its records changed, or left out."""
    made, buffer = io.BytesIO(), io.BytesIO()
    torch.save({"bn.weight": torch.arange(8.0), "bn.bias": torch.zeros(8)}, made)
    with zipfile.ZipFile(made) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            if (changed := change(name, source.read(name))) is not None:
                target.writestr(*changed)
    return buffer.getvalue()


def read_all(path: Path) -> None:
    for tensor in open_state(path).tensors.values():
        tensor.read()


class TestHostileArchives:
    def refused(self, tmp_path: Path, content: bytes) -> str:
        path = tmp_path / "a.pt"
        path.write_bytes(content)
        with pytest.raises(BadTarget) as caught:
            read_all(path)
        return str(caught.value).replace(str(path), "FILE")

    def test_a_bomb(self, tmp_path: Path) -> None:
        bomb = archive(lambda n, c: (n, b"\0" * 10**7 if n.endswith("/0") else c, zipfile.ZIP_DEFLATED))
        assert len(bomb) < 50_000
        assert self.refused(tmp_path, bomb).endswith(
            "of its archive is compressed or encrypted, which torch.save never does; it is not unpacked"
        )

    def test_a_record_that_is_too_short(self, tmp_path: Path) -> None:
        short = archive(lambda n, c: (n, c[:8] if n.endswith("/data/0") else c, zipfile.ZIP_STORED))
        assert self.refused(tmp_path, short) == "FILE: a tensor ends at byte 32 of a storage that has 8"

    def test_a_record_that_is_gone(self, tmp_path: Path) -> None:
        gone = archive(lambda n, c: None if n.endswith("/data/1") else (n, c, zipfile.ZIP_STORED))
        assert self.refused(tmp_path, gone) == (
            "FILE is broken or of another format: its archive lacks the record data/1"
        )

    def test_no_pickle_and_other_byte_order(self, tmp_path: Path) -> None:
        none = archive(lambda n, c: None if n.endswith("data.pkl") else (n, c, zipfile.ZIP_STORED))
        assert "its archive holds no data.pkl, as torch.save writes it" in self.refused(tmp_path, none)
        big = archive(lambda n, c: (n, b"big" if n.endswith("byteorder") else c, zipfile.ZIP_STORED))
        assert "its numbers are not in little-endian order" in self.refused(tmp_path, big)

    def test_an_empty_archive_and_one_cut_off(self, tmp_path: Path) -> None:
        """zipfile opens an archive without records."""
        assert "holds no data.pkl" in self.refused(tmp_path, b"PK\x05\x06" + b"\0" * 18)
        whole = archive(lambda n, c: (n, c, zipfile.ZIP_STORED))
        assert self.refused(tmp_path, whole[:-30]) == (
            "FILE is broken: its archive has no end; was it copied whole?"
        )

    def test_records_over_each_other(self, tmp_path: Path) -> None:
        """Two entries of the directory on one record: the same bytes many times over."""
        whole = bytearray(archive(lambda n, c: (n, c, zipfile.ZIP_STORED)))
        starts = [i for i in range(len(whole)) if whole[i : i + 4] == b"PK\x01\x02"]
        whole[starts[2] + 42 : starts[2] + 46] = whole[starts[1] + 42 : starts[1] + 46]
        assert "is damaged, or reaches into the next one" in self.refused(tmp_path, bytes(whole))

    def test_a_directory_that_claims_a_million_records(self, tmp_path: Path) -> None:
        whole = bytearray(archive(lambda n, c: (n, c, zipfile.ZIP_STORED)))
        end = whole.rfind(b"PK\x05\x06")
        whole[end + 12 : end + 16] = struct.pack("<I", 2**31)
        assert "at most 100000 in 16777216 are read" in self.refused(tmp_path, bytes(whole))

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (b"\x80\x02r\xff\xff\xff\x7f.", "its pickle is damaged (IndexError)"),
            (b"\x80\x02]r\xff\xff\xff\x7f.", "nothing"),
            (b"\x80\x02\x96" + b"\xff" * 7 + b"\x7f.", "it asks for more bytes than a state dict has"),
            (b"\x80\x02" + b"(" * 40_000 + b".", "nothing"),
            (b"\x80\x02" + b")" + b"\x85" * 40_000 + b".", "nothing"),
            (b"\x80\x02" + b"N0" * 1_600_000, "its pickle has more than 3000000 operations"),
            (b"\x80\x02N", "it asks for more bytes than a state dict has"),
        ],
    )
    def test_pickles_that_ask_for_memory_or_time(self, body: bytes, reason: str, tmp_path: Path) -> None:
        hostile = archive(lambda n, c: (n, body if n.endswith("data.pkl") else c, zipfile.ZIP_STORED))
        said = self.refused(tmp_path, hostile)
        assert (reason in said) if reason != "nothing" else ("holds no named tensors" in said)

    def test_tensors_outside_their_storage(self, tmp_path: Path) -> None:
        """The claim is compared with the record; PyTorch's loader would read, or allocate, what it claims."""

        def widened(name: str, content: bytes) -> tuple[str, bytes, int]:
            return name, content.replace(b"K\x08\x85", b"J\xff\xff\xff\x7f\x85"), zipfile.ZIP_STORED

        assert self.refused(tmp_path, archive(widened)) == (
            f"FILE: a tensor ends at byte {(2**31 - 1) * 4} of a storage that has 32"
        )
        negative = archive(
            lambda n, c: (n, c.replace(b"K\x08\x85", b"J\xff\xff\xff\xff\x85"), zipfile.ZIP_STORED)
        )
        assert "a tensor has sizes that are no whole numbers from 0 on" in self.refused(tmp_path, negative)


class TestPathsAndIndexes:
    @pytest.mark.parametrize(
        "name", ["../a.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "C:\\x", "x\0y", "m.index.json"]
    )  # fmt: skip
    def test_an_index_leads_nowhere_else(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors")
        index = tmp_path / "sub" / "m.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(BadTarget) as caught:
            open_state(index)
        assert str(caught.value) == (
            f"{index} names the file {name!r}; only plain names in its own folder are followed"
        )

    @pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"w": 3}}', "3"])
    def test_an_index_of_another_kind(self, content: str, tmp_path: Path) -> None:
        index = tmp_path / "m.safetensors.index.json"
        index.write_text(content)
        with pytest.raises(BadTarget) as caught:
            open_state(index)
        assert str(caught.value) == f"{index} has no weight_map from tensor names to file names"

    def test_an_index_that_does_not_match_its_shards(self, tmp_path: Path) -> None:
        save_file({"w": torch.ones(1), "more": torch.ones(1)}, tmp_path / "a.safetensors")
        index = tmp_path / "m.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "x": "a.safetensors"}}))
        with pytest.raises(BadTarget) as caught:
            open_state(index)
        assert str(caught.value) == f"{index}: a.safetensors lacks x"
        index.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
        assert open_state(index).notes == ["a.safetensors holds 1 tensor that the index does not list"]

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
    def test_pipes_devices_loops_and_folders(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.safetensors")
        (tmp_path / "zero.pt").symlink_to("/dev/zero")
        (tmp_path / "loop.pt").symlink_to("loop.pt")
        reasons = {
            "pipe.safetensors": "is no ordinary file",
            "zero.pt": "is no ordinary file",
            "loop.pt": "cannot be opened: OSError",
            "none.pt": "there is no file",
        }
        for name, reason in reasons.items():
            with pytest.raises(BadTarget, match=reason):
                open_state(tmp_path / name)
        (tmp_path / "empty").mkdir()
        with pytest.raises(
            BadTarget, match=r"holds no config.json with weights and no .safetensors file; name a file"
        ):
            open_state(tmp_path / "empty")
        with pytest.raises(BadTarget, match="is no file name"):
            open_state("a\0b.pt")

    def test_what_is_a_state(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (
            "a.safetensors",
            "A.PT",
            "x.ckpt",
            "pytorch_model.bin",
            "m.safetensors.index.json",
            str(tmp_path),
        ):
            assert names_state(name), name
        (tmp_path / "demo").mkdir()
        (tmp_path / "package").mkdir()
        (tmp_path / "weights").mkdir()
        save_file({"w": torch.ones(1)}, tmp_path / "weights" / "x.safetensors")
        monkeypatch.chdir(tmp_path)
        assert [names_state(n) for n in ("demo", "package", "weights", "./demo")] == [
            False,
            False,
            True,
            True,
        ]
        for name in ("torchvision.models:resnet18", "demo", "a.onnx", "a.pt2", "a.npz"):
            assert not names_state(name), name
