"""Run studies in full and write their pages into the book: ``python scripts/studies.py [NAME ...]``.

Runs stand in ``normscope-studies/`` and go on where they were stopped; ``--quick`` runs the smaller form. Without
names, all of them. Figures must be looked at before they are committed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from normscope import studies
from normscope.studies.lab.book import write_docs, write_gallery

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all, if none is given")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("normscope-studies"), help="where runs are kept")
    parser.add_argument(
        "--docs", type=Path, default=ROOT / "docs" / "studies", help="where pages are written"
    )
    parser.add_argument("--workers", type=int)
    given = parser.parse_args()
    scale = "quick" if given.quick else "full"
    for name in given.names or studies.names():
        begin = time.monotonic()
        results = studies.run(name, out=given.runs / name, scale=scale, workers=given.workers)
        print(
            f"{results}\n  {write_docs(results, given.docs)}, {time.monotonic() - begin:.0f} s",
            file=sys.stderr,
        )
    write_gallery(given.docs)


if __name__ == "__main__":
    main()
