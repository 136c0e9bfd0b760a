"""Importing the readers costs nothing: frameworks come in with their objects."""

import subprocess
import sys


def test_import_needs_no_framework():
    code = (
        "import sys, normscope.reading as r; r.readers(); "
        "print([name for name in ('torch', 'numpy', 'onnx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
