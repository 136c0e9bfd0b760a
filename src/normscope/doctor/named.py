"""The normalization that a class name promises, for norms written by hand.

A name promises the axes that the norm really takes (which of them are right is another question), and the conventions
of the paper: the biased variance, eps inside the root, the mean subtracted or not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normscope.spec import NormSpec

UNCENTERED = r"rms|t5"
CENTERED = r"layer_?norm|group_?norm|instance_?norm|batch_?norm|^(ln|gn|bn)(_?\dd)?$"
OF_EACH_SAMPLE = r"layer_?norm|group_?norm|instance_?norm|rms|^(ln|gn)(_?\dd)?$"
WORDS = (
    ("rms", "RMS norm"),
    ("t5", "T5's RMS norm"),
    ("layer", "layer norm"),
    ("group", "group norm"),
    ("instance", "instance norm"),
    ("batch", "batch norm"),
    ("ln", "layer norm"),
    ("gn", "group norm"),
    ("bn", "batch norm"),
)


def promised(type_name: str, spec: NormSpec) -> tuple[str, NormSpec] | None:
    """What a class of this name should compute, on the axes that ``spec`` takes; None where the name says nothing.

    >>> from normscope.spec import NormSpec
    >>> found = NormSpec("b l c -> b l", weight="c", correction=1, eps=1e-6, eps_at="std")
    >>> words, spec = promised("models.LayerNorm", found)
    >>> words, spec.correction, spec.eps_at
    ('layer norm', 0, 'variance')
    """
    name = type_name.rpartition(".")[2].lower()
    if spec.whiten or not re.search(f"{UNCENTERED}|{CENTERED}", name):
        return None
    center = re.search(UNCENTERED, name) is None
    meant = spec.replace(
        center=center, scale="std" if center else "rms", correction=0, eps_at="variance", gain=1.0
    )
    if re.search(OF_EACH_SAMPLE, name) and spec.properties().couples_samples and spec.running is None:
        meant = meant.replace(stats=_each_sample(spec))
    return next(words for part, words in WORDS if part in name), meant


def _each_sample(spec: NormSpec) -> str:
    """The same axes with the samples kept."""
    group = spec.sample_group or ()
    left, _, right = spec.stats.partition("->")
    return f"{left.strip()} -> {' '.join([*(name for name in group if name not in right.split()), *right.split()])}"
