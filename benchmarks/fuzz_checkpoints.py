"""Hostile and damaged checkpoints: each must end in a report or in one clear error, in bounded memory and time.

    python benchmarks/fuzz_checkpoints.py --inputs 20000

Hypothesis makes files of every kind that a target may be: valid ones whose header, pickle, archive or index was
changed in a field, in operations or in bytes, and ones written from nothing. The process runs under a limit of address
space, so that a file which makes the reader allocate what it claims shows as a failure, and not as a slow machine.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import pickletools
import resource
import struct
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import save

from normscope.doctor.check_state import check_state
from normscope.errors import NormscopeError

SECONDS = 5.0
"""that one file may take; the largest here have 100 kB"""
SPACE = 2**30
"""bytes of address space beyond those in use at the start"""
LONGEST = 2000
"""characters of a message"""


@dataclass
class Tally:
    inputs: int = 0
    reports: int = 0
    slowest: float = 0.0
    messages: Counter[str] = field(default_factory=Counter)
    """first words of the errors, with what varies taken out"""
    failures: list[str] = field(default_factory=list)

    def tried(self, path: Path) -> None:
        """Check one file, or folder, and note what came of it."""
        self.inputs += 1
        start = time.perf_counter()
        try:
            check_state(path)
            self.reports += 1
        except NormscopeError as error:
            text = str(error)
            if len(text) > LONGEST or not text.strip():
                self.failures.append(f"a message of {len(text)} characters: {text[:200]}")
            known = text.replace(str(path.parent), "").replace(path.name, "FILE")
            self.messages[
                " ".join(w for w in known.split() if not any(c.isdigit() or c == "'" for c in w))[:70]
            ] += 1
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error} ({path.suffix})")
        took = time.perf_counter() - start
        self.slowest = max(self.slowest, took)
        if took > SECONDS:
            self.failures.append(f"{took:.1f} s for {path.suffix}")


def state() -> dict[str, torch.Tensor]:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3), torch.nn.LayerNorm(3))
    return {f"features.{name}": tensor for name, tensor in model.state_dict().items()}


@cache
def saved(kind: str) -> bytes:
    if kind == "safetensors":
        return save(state())
    buffer = io.BytesIO()
    content: Any = {
        "epoch": 3,
        "state_dict": state(),
        "optimizer": {"state": {0: {"step": 1.5}}, "lr": [0.1]},
    }
    torch.save(content, buffer, _use_new_zipfile_serialization=kind == "zip")
    return buffer.getvalue()


HOSTILE_NUMBERS: list[Any] = [
    -1, 0, 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 1.5, True, None, "3", [], {}, [1], 1e308,
]  # fmt: skip
numbers = st.sampled_from(HOSTILE_NUMBERS) | st.integers(-(2**70), 2**70)
json_values = st.recursive(
    numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
ROLES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
NAMES = (*(f"bn.{role}" for role in ROLES), "norm.weight", "", "\0", "../x", "a" * 300)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A few bytes changed, taken out or put in; or the end cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        how = draw(st.sampled_from(("set", "cut", "insert", "truncate", "number", "copy")))
        if how == "set":
            data[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
        elif how == "cut":
            del data[place : place + draw(st.integers(1, 64))]
        elif how == "insert":
            data[place:place] = draw(st.binary(min_size=1, max_size=16))
        elif how == "truncate":
            del data[place:]
        elif how == "number":
            size, form = draw(st.sampled_from(((4, "<I"), (8, "<Q"), (2, "<H"))))
            value = draw(
                st.sampled_from((0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2 ** (8 * size - 2)))
            )
            data[place : place + size] = struct.pack(form, value)
        else:
            data[place:place] = data[place : place + draw(st.integers(1, 200))]
    return bytes(data)


@st.composite
def safetensors_files(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(("bytes", "fields", "text", "nested")))
    content = saved("safetensors")
    (length,) = struct.unpack("<Q", content[:8])
    if kind == "bytes":
        return draw(damaged(content))
    if kind == "nested":
        depth = draw(st.integers(1, 30_000))
        text = draw(st.sampled_from(("[", '{"a":'))) * depth
    elif kind == "fields":
        header = json.loads(content[8 : 8 + length])
        for _ in range(draw(st.integers(1, 3))):
            name = draw(st.sampled_from([*header, *NAMES]))
            entry = header.setdefault(name, {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
            where = draw(st.sampled_from(("shape", "data_offsets", "dtype", "whole", "extra")))
            if where == "whole":
                header[name] = draw(json_values)
            elif isinstance(entry, dict):
                entry[where] = draw(json_values | st.lists(numbers, min_size=1, max_size=3))
        text = json.dumps(header)
    else:
        text = content[8 : 8 + length].decode()
        old = draw(st.sampled_from(('"F32"', "0", '"dtype"', ",", "}", '"features.1.bias"', "[3]")))
        words = ("NaN", "Infinity", "1" * 5000, '"features.1.weight"', "{", "]", "\ud800", "-0", "1e999", "")
        new = draw(st.sampled_from(words))
        text = text.replace(old, new, draw(st.integers(1, 3)))
    encoded = text.encode("utf-8", "surrogatepass")
    claimed = draw(
        st.sampled_from((len(encoded), len(encoded), len(encoded), 0, 2**63, 2**64 - 1, 100_000_001))
    )
    return struct.pack("<Q", claimed) + encoded + content[8 + length :]


GLOBALS = (
    "os system", "builtins eval", "posix system", "collections OrderedDict", "torch._utils _rebuild_tensor_v2",
    "torch FloatStorage", "torch Tensor", "torch._utils _rebuild_parameter", "builtins bytearray", "torch Size",
    "torch._tensor _rebuild_from_type_v2", "torch float32", "torch._utils _rebuild_tensor_v3", "nt system",
)  # fmt: skip
OPERATIONS = [
    b"(", b"0", b"1", b"2", b"N", b"}", b"]", b")", b"\x8f", b"\x85", b"\x86", b"\x87", b"t", b"l", b"d", b"s", b"u",
    b"a", b"e", b"\x90", b"R", b"b", b"Q", b"\x81", b"\x92", b"o", b"\x94", b"K\x01", b"K\xff", b"\x88", b"\x93",
    b"J\xff\xff\xff\xff", b"q\x00", b"h\x00", b"r\xff\xff\xff\xff", b"j\x00\x00\x00\x00", b"P1\n", b"\x82\x01",
    b"\x8a\x09" + b"\xff" * 8 + b"\x00", b"G" + b"\x7f" * 8, b"I" + b"9" * 5000 + b"\n", b"X\x05\x00\x00\x00model",
    b"X\x07\x00\x00\x00storage", b"X\x01\x00\x00\x000", b"X\x07\x00\x00\x00bn.bias", b"X\xff\xff\xff\xff",
    b"\x8d" + b"\xff" * 8, b"\x96" + b"\xff" * 7 + b"\x7f", b"\x95" + b"\xff" * 8, b"\x8b\xff\xff\xff\x7f",
    *(b"c" + name.replace(" ", "\n").encode() + b"\n" for name in GLOBALS),
]  # fmt: skip
operations = st.lists(st.sampled_from(OPERATIONS) | st.binary(min_size=1, max_size=3), max_size=40).map(
    b"".join
)


@cache
def pieces() -> tuple[bytes, ...]:
    """The operations of a real ``data.pkl``, one by one."""
    with zipfile.ZipFile(io.BytesIO(saved("zip"))) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("data.pkl")]
        text = archive.read(name)
    places = [place or 0 for _, _, place in pickletools.genops(text)] + [len(text)]
    return tuple(text[a:b] for a, b in pairwise(places))


@st.composite
def pickles(draw: st.DrawFn) -> bytes:
    if draw(st.booleans()):
        return b"\x80\x02" + draw(operations) + b"."
    kept = list(pieces())
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(kept) - 1))
        how = draw(st.sampled_from(("drop", "swap", "put", "repeat")))
        if how == "drop":
            del kept[place]
        elif how == "swap":
            kept[place] = draw(st.sampled_from(OPERATIONS))
        elif how == "put":
            kept.insert(place, draw(operations))
        else:
            kept[place:place] = kept[place : place + draw(st.integers(1, 30))]
    return b"".join(kept)


RENAMED = ("../../etc/passwd", "/data.pkl", "a/data.pkl", "archive/code/x.py", "archive/constants.pkl")
SHARDS = (
    "a.safetensors", "../a.safetensors", "/etc/passwd", "..", ".", "", "a.safetensors/", "C:\\x", "x\0y", "missing.bin",
    "loop.index.json", "~", "link.safetensors", "pipe.safetensors", "deep/a.safetensors",
)  # fmt: skip


@st.composite
def torch_files(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(("bytes", "stream bytes", "pickle", "stream", "archive", "nothing")))
    if kind == "bytes":
        return draw(damaged(saved("zip")))
    if kind == "stream bytes":
        return draw(damaged(saved("stream")))
    if kind == "nothing":
        heads = (b"", b"PK", b"PK\x03\x04", b"PK\x05\x06" + b"\0" * 18, b"\x80\x02")
        return draw(st.sampled_from(heads)) + draw(st.binary(max_size=64))
    body = draw(pickles())
    if kind == "stream":
        head = b"".join(pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
        keys = pickle.dumps(draw(st.lists(st.sampled_from(("0", "1", "2")), max_size=4)), 2)
        return head + body + keys + draw(st.binary(max_size=80))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, zipfile.ZipFile(io.BytesIO(saved("zip"))) as real:
        for name in real.namelist():
            content = real.read(name)
            if kind == "pickle" and name.endswith("data.pkl"):
                content = body
            if kind == "archive":
                how = draw(
                    st.sampled_from(("keep", "keep", "drop", "deflate", "rename", "bomb", "twice", "short"))
                )
                if how == "drop":
                    continue
                if how == "rename":
                    name = draw(st.sampled_from(RENAMED))
                if how == "short":
                    content = content[: len(content) // 2]
                if how == "bomb":
                    content = b"\0" * 100_000
                packed = zipfile.ZIP_DEFLATED if how in ("deflate", "bomb") else zipfile.ZIP_STORED
                if how == "twice":
                    archive.writestr(name, content)
                archive.writestr(name, content, compress_type=packed)
                continue
            archive.writestr(name, content)
    return buffer.getvalue()


@st.composite
def indexes(draw: st.DrawFn) -> bytes:
    names = st.sampled_from(SHARDS)
    places: Any = draw(
        st.dictionaries(st.sampled_from([*state(), "nothing", ""]), names | json_values, max_size=5)
        | json_values
    )
    text = json.dumps(
        draw(st.just({"metadata": {}, "weight_map": places}) | st.just({"weight_map": places}) | json_values)
    )
    return draw(st.just(text.encode()) | damaged(text.encode() or b" "))


SETTINGS = ("layer_norm_eps", "rms_norm_eps", "text_config", "model_type")
configs = st.fixed_dictionaries({}, optional=dict.fromkeys(SETTINGS, json_values))
inputs = st.one_of(
    st.tuples(st.just("a.safetensors"), safetensors_files()),
    st.tuples(st.sampled_from(("a.pt", "a.ckpt", "a.bin")), torch_files()),
    st.tuples(st.just("m.safetensors.index.json"), indexes()),
    st.tuples(st.just("config.json"), configs.map(lambda c: json.dumps(c).encode()) | st.binary(max_size=40)),
)


def run(count: int, start: int = 0, *, limited: bool = False) -> Tally:
    """Try ``count`` files; ``limited`` puts the process under the limit of address space, for good."""
    tally = Tally()
    if limited:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPACE, used + SPACE))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good = saved("safetensors")
        (folder / "link.safetensors").symlink_to("/dev/zero")
        os.mkfifo(folder / "pipe.safetensors")

        @seed(start)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(inputs)
        def attempt(made: tuple[str, bytes]) -> None:
            file, content = made
            home = folder
            if file == "config.json":
                home = folder / "folder"
                home.mkdir(exist_ok=True)
                (home / "model.safetensors").write_bytes(good)
            if file != "a.safetensors":
                (folder / "a.safetensors").write_bytes(good)
            (home / file).write_bytes(content)
            tally.tried(home if home != folder else home / file)

        attempt()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # zipfile's, on names that stand twice as they should
    start = time.perf_counter()
    tally = run(options.inputs, options.seed, limited=True)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{tally.inputs} inputs in {seconds:.0f} s, the slowest {tally.slowest:.2f} s; peak {peak:.0f} MB")
    print(f"{tally.reports} reports, {sum(tally.messages.values())} errors of {len(tally.messages)} kinds")
    for message, times in tally.messages.most_common(25):
        print(f"{times:7d}  {message}")
    for failure in tally.failures[:20]:
        print(f"FAILED  {failure}")
    raise SystemExit(bool(tally.failures))


if __name__ == "__main__":
    main()
