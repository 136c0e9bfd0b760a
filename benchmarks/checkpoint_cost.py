"""What checking a checkpoint costs: memory and time against reading the same file, on shards made for it.

    python benchmarks/checkpoint_cost.py --gigabytes 4 [--folder DIR]

Writes a transformers-like model in bfloat16 (matrices, two RMS norms a block) and a convolutional part with batch
norms, as shards of about 1 GB, and the first shard once more with ``torch.save``; removes them afterwards. Each
measurement is a fresh process: its peak resident memory beyond that of an empty check, and its time, with the file
in the page cache and, where ``posix_fadvise`` lets it be dropped, without.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

WIDTH, SHARD = 4096, 2**30
CHUNK = 2**24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one[0], Path(options.one[1]))))
        return
    home = Path(tempfile.mkdtemp(prefix="checkpoint-cost-", dir=options.folder))
    try:
        index, single = write(home, int(options.gigabytes * 2**30))
        empty = home / "empty.safetensors"
        save_file({"norm.weight": torch.ones(8)}, empty)
        files = list(home.glob("model-*.safetensors"))
        size, other = sum(file.stat().st_size for file in files), single.stat().st_size
        print(f"{size / 1e9:.2f} GB in {len(files)} shards; with torch.save {other / 1e9:.2f} GB")
        base = child("check", empty)
        print(f"{'empty check':34} {base['peak_mb']:6.0f} MB peak {base['seconds']:7.2f} s")
        for name, what, path in (
            ("check, sharded safetensors", "check", index),
            ("check, torch.save zip", "check", single),
            ("read every byte of the shards", "read", index),
        ):
            for cold in (True, False):
                if cold:
                    drop(home)
                got = child(what, path)
                state = "cold" if cold else "warm"
                extra = got["peak_mb"] - base["peak_mb"]
                print(
                    f"{name + ', ' + state:34} {extra:+6.0f} MB      {got['seconds']:7.2f} s  {got['norms']} norms"
                )
    finally:
        shutil.rmtree(home)


def write(home: Path, size: int) -> tuple[Path, Path]:
    """The index of the shards, and the first shard as a file of ``torch.save``."""
    generator = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    held, block, number = 0, 0, 0
    # one matrix of noise serves every block: what is measured does not depend on the values
    matrix = torch.randn(WIDTH, WIDTH, generator=generator).bfloat16()
    while held < size:
        path = f"model.layers.{block}"
        new = {f"{path}.self_attn.{name}_proj.weight": matrix.clone() for name in "qkvo"}
        for name in ("input_layernorm", "post_attention_layernorm"):
            new[f"{path}.{name}.weight"] = 1 + 0.1 * torch.randn(WIDTH, generator=generator).bfloat16()
        for name, tensor in torch.nn.BatchNorm2d(512).state_dict().items():
            new[f"encoder.{block}.bn.{name}"] = tensor + (name == "running_mean")
        shard |= new
        held += sum(tensor.nbytes for tensor in new.values())
        block += 1
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD or held >= size:
            number += 1
            file = f"model-{number:05}.safetensors"
            save_file(shard, home / file)
            places |= dict.fromkeys(shard, file)
            if number == 1:
                torch.save(shard, home / "model.pt")
            shard = {}
    index = home / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": held}, "weight_map": places}))
    return index, home / "model.pt"


def child(what: str, path: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--one", what, str(path)], capture_output=True, text=True, check=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measured(what: str, path: Path) -> dict[str, float]:
    """In this process: seconds, and the peak of resident memory."""
    from normscope.doctor.check_state import check_state

    start = time.perf_counter()
    norms = 0
    if what == "check":
        norms = len(check_state(path).sites)
    else:
        for file in sorted(path.parent.glob("model-*.safetensors")):
            with file.open("rb", buffering=0) as handle:
                while handle.read(CHUNK):
                    pass
    seconds = time.perf_counter() - start
    # of this process alone: getrusage begins with the peak of its parent
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"seconds": seconds, "peak_mb": int(status["VmHWM"].split()[0]) / 1024, "norms": norms}


def drop(home: Path) -> None:
    """Ask the system to forget the pages of these files."""
    for file in home.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
