#!/bin/sh
# Tests of Flax and Keras layers, in an environment of their own without torch.
# Usage: tests/frameworks/run.sh [ENVIRONMENT]  (default: a directory under the temporary one; kept for the next time)
# Where TORCH_PYTHON names an interpreter with torch, those of ports run there too, and the Keras tests on the torch
# backend, with the environment's packages on its path: torch, JAX and Keras in one process.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
env=${1:-${TMPDIR:-/tmp}/normscope-frameworks}
[ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
"$env/bin/python" -m pip install --quiet jax flax keras numpy pytest typer rich safetensors "setuptools>=77"
cd "$root"
export OMP_NUM_THREADS=1 PYTHONPATH="$root/src"  # not installed: that would take the kernels of another build away
KERAS_BACKEND=jax "$env/bin/python" -m pytest -q tests/frameworks
if [ -n "${TORCH_PYTHON:-}" ]; then
    packages=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    KERAS_BACKEND=torch PYTHONPATH="$root/src:$packages" "$TORCH_PYTHON" -m pytest -q tests/frameworks \
        --ignore tests/frameworks/test_frameworks_flax.py
fi
