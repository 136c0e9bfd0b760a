"""The process state around a model run: random numbers and torch's global switches."""

from __future__ import annotations

import random
import sys

import numpy as np
import torch

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


class Ambient:
    """What a model's forward can change outside of itself, recorded when made and put back by ``restore``.

    Random states of Python, NumPy and torch (CUDA and MPS where they are in use), grad mode, autocast, default
    dtype, deterministic algorithms, matrix multiplication precision, number of threads, recursion limit, and
    NumPy's handling of floating-point errors, which an interrupted ``np.errstate`` does not always put back.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002 - the legacy global state is what models use
        self._torch = torch.get_rng_state()
        # an accelerator that is not initialized has no state yet, and asking for it would initialize it
        self._cuda = torch.cuda.get_rng_state_all() if _cuda_in_use() else None
        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        self._grad = torch.is_grad_enabled()
        self._dtype = torch.get_default_dtype()
        self._precision = _matmul_precision()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._autocast = {
            device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
        }
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._threads = torch.get_num_threads()
        self._depth = sys.getrecursionlimit()
        self._errors = np.geterr()

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)
        torch.set_grad_enabled(self._grad)
        torch.set_default_dtype(self._dtype)
        if self._precision is not None and _matmul_precision() != self._precision:
            torch.set_float32_matmul_precision(self._precision)
        if (
            torch.are_deterministic_algorithms_enabled() != self._deterministic
            or torch.is_deterministic_algorithms_warn_only_enabled() != self._warn_only
        ):
            torch.use_deterministic_algorithms(self._deterministic, warn_only=self._warn_only)
        for device, (enabled, dtype) in self._autocast.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._autocast_cache)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        sys.setrecursionlimit(self._depth)
        np.seterr(**self._errors)
        # weights cast to half precision during the run may have been cast from values since put back
        torch.clear_autocast_cache()


def seed_everything(seed: int) -> None:
    """Start every global random generator in use from ``seed``, so that two runs draw the same numbers."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    # not torch.manual_seed: it would leave a pending seed for a CUDA context that is not there yet
    torch.default_generator.manual_seed(seed)
    if _cuda_in_use():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def _matmul_precision() -> str | None:
    """None where it was set by backend (``torch.backends.fp32_precision``), which torch then refuses to sum up."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
