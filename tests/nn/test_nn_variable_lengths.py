"""Texts of many lengths: docstrings of Python's standard library, and a network with a norm of every kind."""

from __future__ import annotations

import ast
import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import normscope.nn as own

MODULES = ("turtle", "statistics", "ipaddress")
EACH, LONGEST, WIDTH = 12, 96, 16
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
"""float64: sums of some 1,000 terms in another order (1e-12), in each of five norms, which may raise them tenfold"""


def docstrings() -> tuple[list[Tensor], Tensor]:
    """Texts of functions and classes as ASCII codes, and the module that each stands in."""
    texts, labels = [], []
    for label, module in enumerate(MODULES):
        found = importlib.util.find_spec(module)
        assert found is not None
        source = Path(found.origin)
        kinds = (ast.FunctionDef, ast.ClassDef)
        nodes = [node for node in ast.walk(ast.parse(source.read_text("utf-8"))) if isinstance(node, kinds)]
        said = [text for node in nodes if (text := ast.get_docstring(node)) and len(text) > 8]
        texts += [torch.tensor(list(text[:LONGEST].encode("ascii", "replace"))) for text in said[:EACH]]
        labels += [label] * EACH
    return texts, torch.tensor(labels)


class Reader(nn.Module):
    """Two convolutions and an attention, with batch, instance, group, RMS and layer norm; the class of the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH, padding_idx=0)
        self.first, self.second = (nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(2))
        self.batch, self.instance = own.BatchNorm1d(WIDTH), own.InstanceNorm1d(WIDTH, affine=True)
        self.group, self.rms, self.layer = own.GroupNorm(4, WIDTH), own.RMSNorm(WIDTH), own.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, len(MODULES))

    def forward(self, codes: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(codes.shape[1]) < lengths[:, None]
        x = self.embedding(codes).mT
        x = self.batch(self.first(x), lengths=lengths).relu()
        x = x + self.instance(self.second(x), lengths=lengths)
        x = self.group(x, lengths=lengths).mT
        tokens = self.rms(x, mask=mask[..., None])
        x = x + self.attention(tokens, tokens, tokens, key_padding_mask=~mask, need_weights=False)[0]
        x = self.layer(x, mask=mask[..., None])
        return self.head(x.sum(1) / lengths[:, None])


def padded(texts: list[Tensor], more: int = 0) -> tuple[Tensor, Tensor]:
    codes = pad_sequence([*texts, torch.zeros(max(map(len, texts)) + more)], batch_first=True)[:-1]
    return codes.long(), torch.tensor([len(text) for text in texts])


@pytest.fixture(scope="module")
def trained() -> Reader:
    torch.manual_seed(0)
    model, (texts, labels) = Reader().double(), docstrings()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        logits = model(*padded(texts))
        nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
    assert (logits.argmax(1) == labels).double().mean() > 0.8  # guessing: a third
    return model


def test_a_padded_batch_and_single_texts_give_the_same(trained: Reader) -> None:
    model, (texts, labels) = copy.deepcopy(trained).eval(), docstrings()
    assert len({len(text) for text in texts}) > 10
    with torch.no_grad():
        batch = model(*padded(texts, more=40))
        single = torch.cat([model(*padded([text])) for text in texts])
    torch.testing.assert_close(batch, single, **CLOSE)
    assert (batch.argmax(1) == labels).double().mean() > 0.8  # by the statistics that were stored

    every, _ = padded(texts)
    with torch.no_grad():  # what the lengths are for: with all the same, padding counts
        whole = model(every, torch.full((len(texts),), every.shape[1]))
    assert (whole - batch).abs().max() > 0.1


def test_in_training_padding_reaches_neither_outputs_nor_gradients_nor_statistics(trained: Reader) -> None:
    texts, labels = docstrings()
    found = []
    for more in (0, 75):
        model = copy.deepcopy(trained)
        model.zero_grad()
        logits = model(*padded(texts, more))
        nn.functional.cross_entropy(logits, labels).backward()
        found.append([logits, *(p.grad for p in model.parameters()), *model.buffers()])
    for short, long in zip(*found, strict=True):
        torch.testing.assert_close(long, short, **CLOSE)
