"""The whole table of ``normscope bench``, whole models included, written as JSON and as text.

    python benchmarks/kernels.py [--json kernels.json] [--text kernels.txt] [--seconds 1] [--threads N]

Takes half an hour to an hour.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import normscope
from normscope import bench
from normscope.bench.table import to_text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("kernels.json"))
    parser.add_argument("--text", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = bench.run(
        bench.cases(),
        bench.models(),
        seconds=options.seconds,
        allocator=str(normscope.tune_allocator()),
        progress=lambda what: print(what, file=sys.stderr, flush=True),
    )
    options.json.write_text(report.to_json() + "\n", encoding="utf-8")
    text = to_text(report)
    if options.text:
        options.text.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
