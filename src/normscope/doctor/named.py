"""The normalization that a class name promises, for norms written by hand.

A name promises the axes that the norm really takes (which of them are right is another question) less the samples,
where it is of no batch norm; that layer norm takes the features, where it is known which axis holds them; and the
conventions of the paper: the biased variance, eps inside the root, the mean subtracted or not.
"""

from __future__ import annotations

import re
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normscope.doctor.site import Site
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
PRODUCERS = ("conv", "linear", "embedding")
OF_BATCHES = ("batch norm",)
UNCENTERED = ("RMS norm", "T5's RMS norm")
OF_FEATURES = ("layer norm", *UNCENTERED)
GLOBAL = re.compile("[Gg]lobal")
"""a layer norm over all positions too, by its name"""
MAKES_UP = 2.0
"""a typical gain within this factor of what the mean of squares needs makes up for the sum"""


def meant(site: Site, spec: NormSpec) -> tuple[str, NormSpec] | None:
    """What a site should compute by the name of its class, as ``promised``.

    A sum of squares where weight or factor make up for the size of the sets is as good as their mean.
    """
    found = promised(site.type_name, spec, features_of(site, spec))
    if found is None or spec.scale != "l2":
        return found
    weight = site.array("weight")
    typical = (
        1.0 if weight is None else float(sorted(abs(weight.ravel() + spec.weight_offset))[weight.size // 2])
    )
    factor = abs(of_mean(site, spec))
    if any(1 / MAKES_UP <= size <= MAKES_UP for size in (factor, factor * typical)):
        return found[0], found[1].replace(scale="l2", gain=spec.gain)
    return found


def set_size(site: Site, spec: NormSpec) -> int:
    """Elements of a statistic set at the first call; 1 where there was none."""
    return spec.bind(site.calls[0].shape).set_size if site.calls else 1


def of_mean(site: Site, spec: NormSpec) -> float:
    """The normalized values of a norm by the sum of squares, as a part of those by their mean."""
    return spec.gain / sqrt(set_size(site, spec))


def promised(type_name: str, spec: NormSpec, features: str = "") -> tuple[str, NormSpec] | None:
    """What a class of this name should compute, on the axes that ``spec`` takes; None where the name says nothing.

    ``features`` names the axis that a norm over features should take, see ``features_of``.

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
    elif words in OF_FEATURES and features and not GLOBAL.search(name):
        meant = meant.replace(stats=_of_features(spec, features))
    return words, meant


def features_of(site: Site, spec: NormSpec) -> str:
    """The name of the axis of features, that of the weight or that of the layer before; "" where it is not known.

    Also where nothing is wrong with them: over images, and over channels first, a layer norm takes all there is.
    """
    if spec.sample_group is None or not site.calls or len(spec.sample_group) != 1:
        return ""
    call = site.calls[0]
    axes = spec.bind(call.shape).axes
    made = {n.feature_axis for n in call.fed_by if n.kind in PRODUCERS and n.feature_axis is not None}
    before = next((axis.name for axis in axes if len(made) == 1 and axis.dim in made), "")
    weight = (spec.weight or "").split()
    name = weight[0] if len(weight) == 1 else "" if weight else before
    own = [axis for axis in axes if axis.name == name]
    if len(own) != 1 or name not in spec.stats.split():
        return ""
    last, erased = len(call.shape) - 1, {axis.dim for axis in axes if not axis.kept}
    if own[0].kept:  # a gain for each head of a norm over the last axis says nothing about features
        return name if last not in erased or before == name else ""
    sequences = len(call.shape) == 3 and own[0].dim == last and len(erased) == 2
    return name if sequences and before in ("", name) else ""


def _of_features(spec: NormSpec, features: str) -> str:
    """Statistics over this axis alone."""
    left = spec.stats.partition("->")[0].strip()
    return f"{left} -> {' '.join(name for name in left.split() if name != features)}"


def _each_sample(spec: NormSpec) -> str:
    """The same axes with the samples kept."""
    group = spec.sample_group or ()
    left, _, right = spec.stats.partition("->")
    return f"{left.strip()} -> {' '.join([*(name for name in group if name not in right.split()), *right.split()])}"
