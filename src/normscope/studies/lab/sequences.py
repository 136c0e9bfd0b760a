"""Sequences of varying length for studies: spoken vowels, and characters of a text, where `data.locate` finds them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from normscope.errors import BadInput
from normscope.studies.lab import data


@dataclass(frozen=True, eq=False)
class Sequences:
    """Frames (N, T, C), zero behind the end of a sequence; lengths (N,); labels (N,), or (N, T) of each frame.

    Cells share the tensors: change none in place.
    """

    frames: Tensor
    lengths: Tensor
    labels: Tensor

    def __getitem__(self, chosen: Tensor) -> Sequences:
        return Sequences(self.frames[chosen], self.lengths[chosen], self.labels[chosen])

    def __len__(self) -> int:
        return len(self.lengths)


def vowels() -> tuple[Sequences, Sequences]:
    """Japanese vowels by nine speakers, 270 to train on and 370 to test: 12 coefficients a frame, 7 to 29 frames.

    Where they are not there, scikit-learn's digits column by column, without the blank columns beside a digit.
    """
    return _vowels(data.locate(["japanese-vowels"])["japanese-vowels"])


@lru_cache
def _vowels(source: data.Source) -> tuple[Sequences, Sequences]:
    if source.folder is None:
        images = data.load(data.STAND_IN)
        train, test = (
            _padded([_trimmed(image) for image in pixels], labels.tolist())
            for pixels, labels in ((images.train, images.train_labels), (images.test, images.test_labels))
        )
    else:
        train, test = (_of_file(source.folder / name) for name in data.FILES["japanese-vowels"])
    longest = max(train.frames.shape[1], test.frames.shape[1])
    train, test = (_to_steps(part, longest) for part in (train, test))
    return _mixed(train), _mixed(test)


def characters(longest: int) -> tuple[Sequences, Sequences, str]:
    """Lines of Python's own documentation, 10 characters or more, cut to ``longest`` and one: one-hot characters, and
    at each place the next one as its label. A tenth of the lines to test on; the last value is the alphabet.

    Raises BadInput where this Python comes without its documentation.
    """
    return _characters(data.locate(["python-topics"])["python-topics"], longest)


@lru_cache
def _characters(source: data.Source, longest: int) -> tuple[Sequences, Sequences, str]:
    if source.folder is None:
        raise BadInput(f"there is no text: {data.HOW['python-topics']}")
    lines = [line for line in _text(source.folder / data.FILES["python-topics"][0]) if len(line) > 10]
    alphabet = "".join(sorted(set("".join(lines))))
    places = {character: k for k, character in enumerate(alphabet)}
    coded = [torch.tensor([places[character] for character in line[: longest + 1]]) for line in lines]
    lengths = torch.tensor([len(line) - 1 for line in coded])
    whole = nn.utils.rnn.pad_sequence(coded, batch_first=True)
    known = (torch.arange(whole.shape[1] - 1) < lengths[:, None])[..., None]
    frames = nn.functional.one_hot(whole[:, :-1], len(alphabet)).float() * known
    found = Sequences(frames, lengths, whole[:, 1:])
    found, test = _mixed(found), len(coded) // 10
    return found[torch.arange(test, len(coded))], found[torch.arange(test)], alphabet


def _text(path: Path) -> tuple[str, ...]:
    """The texts of the dict in the file, read as literals: the file is not run."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign):
            topics: dict[str, str] = ast.literal_eval(statement.value)
            lines = (line.strip() for text in topics.values() for line in text.splitlines())
            return tuple(dict.fromkeys(line for line in lines if line.isascii()))
    raise BadInput(f"{path} holds no texts")


def _of_file(path: Path) -> Sequences:
    """The ts format: behind @data a line a sequence, its dimensions between colons, the label last."""
    text = path.read_text(encoding="utf-8")
    rows = [line.split(":") for line in text[text.index("@data") + 5 :].split()]
    frames = [torch.tensor([[float(v) for v in part.split(",")] for part in row[:-1]]).T for row in rows]
    return _padded(frames, [int(row[-1]) - 1 for row in rows])


def _trimmed(image: Tensor) -> Tensor:
    columns = image[0].sum(0).nonzero()[:, 0]
    return image[0, :, int(columns[0]) : int(columns[-1]) + 1].T


def _padded(frames: Sequence[Tensor], labels: Sequence[int]) -> Sequences:
    lengths = torch.tensor([len(one) for one in frames])
    return Sequences(nn.utils.rnn.pad_sequence(list(frames), batch_first=True), lengths, torch.tensor(labels))


def _mixed(found: Sequences) -> Sequences:
    """They come sorted by speaker."""
    return found[torch.from_numpy(np.random.default_rng(0).permutation(len(found)))]


def _to_steps(found: Sequences, steps: int) -> Sequences:
    frames = nn.functional.pad(found.frames, (0, 0, 0, steps - found.frames.shape[1]))
    return Sequences(frames, found.lengths, found.labels)
