"""The normalization that a class name promises, for norms written by hand.

A name promises the axes that the norm really takes (which of them are right is another question), and the conventions
of the paper: the biased variance, eps inside the root, the mean subtracted or not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normscope.spec import NormSpec

NAMES = (
    (r"RMS|Rms|(?<![a-zA-Z])rms", "RMS norm"),
    (r"T5", "T5's RMS norm"),
    (r"[Ll]ayer_?[Nn]orm|(?<![A-Z])LN(?![a-zA-Z])", "layer norm"),
    (r"[Gg]roup_?[Nn]orm|(?<![A-Z])GN(?![a-zA-Z])", "group norm"),
    (r"[Ii]nstance_?[Nn]orm", "instance norm"),
    (r"[Bb]atch_?[Nn]orm|(?<![A-Z])BN(?![a-zA-Z])", "batch norm"),
)
"""what a class name holds -> the norm that it promises; the first that fits"""
OF_BATCHES = ("batch norm",)
UNCENTERED = ("RMS norm", "T5's RMS norm")


def promised(type_name: str, spec: NormSpec) -> tuple[str, NormSpec] | None:
    """What a class of this name should compute, on the axes that ``spec`` takes; None where the name says nothing.

    >>> from normscope.spec import NormSpec
    >>> found = NormSpec("b l c -> b l", weight="c", correction=1, eps=1e-6, eps_at="std")
    >>> words, spec = promised("models.LayerNorm", found)
    >>> words, spec.correction, spec.eps_at
    ('layer norm', 0, 'variance')
    >>> promised("L2NormSSD", found) is None
    True
    """
    name = type_name.rpartition(".")[2]
    words = next((words for part, words in NAMES if re.search(part, name)), None)
    if words is None or spec.whiten:
        return None
    center = words not in UNCENTERED
    meant = spec.replace(
        center=center, scale="std" if center else "rms", correction=0, eps_at="variance", gain=1.0
    )
    if words not in OF_BATCHES and spec.properties().couples_samples and spec.running is None:
        meant = meant.replace(stats=_each_sample(spec))
    return words, meant


def _each_sample(spec: NormSpec) -> str:
    """The same axes with the samples kept."""
    group = spec.sample_group or ()
    left, _, right = spec.stats.partition("->")
    return f"{left.strip()} -> {' '.join([*(name for name in group if name not in right.split()), *right.split()])}"
