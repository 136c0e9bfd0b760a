"""Put the demo's real output into the READMEs.

python scripts/readme_output.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- output: demo -->\n```text\n).*?(```)", re.S)


def demo_output() -> str:
    """What ``normscope check demo`` prints where standard output is no terminal."""
    command = [sys.executable, "-c", "from normscope.cli import main; main()", "check", "demo"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 1:
        raise SystemExit(f"the demo exits 1, got {done.returncode}: {done.stderr}")
    return done.stdout


def main() -> None:
    output = demo_output()
    for name in ("README.md", "README.zh-CN.md"):
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        if not BLOCK.search(text):
            raise SystemExit(f"{name} has no block '<!-- output: demo -->'")
        page.write_text(BLOCK.sub(lambda m: m[1] + output + m[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
