"""The norms of a state dict, found by the names and shapes of their tensors alone.

=====================================================  ================================================================
one path holds                                         is
=====================================================  ================================================================
running_mean or running_var, of one vector             a norm with stored statistics (batch norm, mostly)
weight and bias, two vectors of one size               a norm; its name says which, or nothing does
weight and bias of one shape, under a norm's name      a layer norm over several axes
a vector weight alone, under a norm's name             an RMS norm, or a layer norm without a bias: not certain
=====================================================  ================================================================

The bias of a linear layer or a convolution stands beside a matrix, and the weight of a PReLU, or the scale of a branch,
under no norm's name: none of them is taken. Nor are the weight and bias beside an alpha of one number, a Dynamic Tanh,
and what stands beside the stored matrix of a whitening, which has no variance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from normscope.doctor.stored_state import Stored

ROLES = {
    "weight": "weight", "bias": "bias", "running_mean": "running_mean", "running_var": "running_var",
    "num_batches_tracked": "num_batches_tracked", "gamma": "weight", "beta": "bias", "scale": "weight",
    "moving_mean": "running_mean", "moving_variance": "running_var", "g": "weight", "w": "weight", "gain": "weight",
    "b": "bias",
}  # fmt: skip
"""last part of a name -> what it is; BERT's first checkpoints say gamma and beta, Keras and Flax the others;
norms written by hand g or w, and b"""
ALPHA = "alpha"
"""a gain under a norm's name; elsewhere a slope, or the scale of a Dynamic Tanh, which is one number"""
BATCH, LAYER, GROUP, INSTANCE, RMS, UNKNOWN = "batch", "layer", "group", "instance", "rms", ""
NAMED = "its name is a batch norm's"
FLOATING = ("float64", "float32", "float16", "bfloat16")
WORDS = (
    (r"(sync)?_?batch_?norm(alization)?(_?\dd)?_?\d*[a-z]?|bn_?\d*[a-z]?|bn_\w+|\w+_bn\d*", BATCH),
    (r"rms_?norm(alization)?_?\d*|\w*_rms_?norm|rmsn|rms_?\d*", RMS),
    (r"group_?norm(alization)?_?\d*|gn_?\d*", GROUP),
    (r"instance_?norm(alization)?(_?\dd)?_?\d*", INSTANCE),
    (r"\w*layer_?norm(alization)?_?\d*(_\w+)?|ln_?\d*|ln_\w+|\w+_ln", LAYER),
    (r"(\w*_)?norms?_?\d*(_\w+)?|\w*norms?\d*|\w*_norm_\w+", UNKNOWN),
)
"""what the last named part of a path says, from the clearest on"""
MATRICES = ("running_covariance", "running_whitening")
"""what whitening stores beside its mean"""
LIST_INDEX = re.compile(r"\d+")


@dataclass(frozen=True)
class StoredNorm:
    """The tensors of one norm."""

    path: str
    tensors: Mapping[str, Stored]
    """by the names in STATE_NAMES"""
    kind: str
    """batch | layer | group | instance | rms, "" where nothing tells"""
    named: bool
    """its name is a norm's"""

    @property
    def has_statistics(self) -> bool:
        return "running_mean" in self.tensors or "running_var" in self.tensors

    @property
    def place(self) -> str:
        """The path with a star for every number: alike for the blocks of one stack.

        A number at the end stays: the layers of one flat sequence are of many kinds.
        """
        head, dot, last = self.path.rpartition(".")
        return LIST_INDEX.sub("*", head) + dot + (last if last.isdigit() else LIST_INDEX.sub("*", last))


@dataclass(frozen=True)
class Search:
    norms: tuple[StoredNorm, ...]
    vectors: tuple[str, ...]
    """weights of one axis that stand alone under no norm's name: left out"""
    alone: tuple[StoredNorm, ...]
    """paths that hold one vector, whatever its name, and nothing else: a gain, where somebody else says so"""
    quantized: tuple[str, ...]
    """norms whose parameters are stored as integers: left out"""


def find_norms(state: Mapping[str, Stored]) -> Search:
    """Every norm of a state dict, in its order."""
    groups: dict[str, dict[str, Stored]] = {}
    quantized: dict[str, None] = {}
    bounded: set[str] = set()
    held: dict[str, dict[str, Stored]] = {}
    whitened: set[str] = set()
    for name, tensor in state.items():
        path, _, last = name.rpartition(".")
        held.setdefault(path, {})[last] = tensor
        role = ROLES.get(last)
        if last == ALPHA and tensor.size > 1 and says(path) is not None:
            role = "weight"
        if role is None:
            owner = path.rpartition(".")[0] if path.endswith((".weight", ".bias")) else path
            if last in ("qweight", "weight_q") and says(owner) is not None:
                quantized[owner] = None
            if last == ALPHA and tensor.size == 1:
                bounded.add(path)
            if last in MATRICES:
                whitened.add(path)
            continue
        group = groups.setdefault(path, {})
        if role not in group or role == last:  # weight before gamma, where a block holds both
            group[role] = tensor
    norms, vectors = [], []
    for path, group in groups.items():
        norm = _norm(path, group)
        if path in whitened or (norm is not None and path in bounded and not norm.has_statistics):
            continue
        if norm is not None:
            norms.append(norm)
        elif set(group) == {"weight"} and _vector(group["weight"]):
            vectors.append(path)
    known = {norm.path for norm in norms}
    single = [
        (path, last, tensor)
        for path, tensors in held.items()
        for last, tensor in tensors.items()
        if len(tensors) == 1 and path not in known and _vector(tensor)
    ]
    vectors += [path for path, last, _ in single if last == ALPHA]
    alone = tuple(StoredNorm(path, {"weight": tensor}, RMS, False) for path, _, tensor in single)
    return Search(tuple(norms), tuple(vectors), alone, tuple(quantized))


def says(path: str) -> str | None:
    """The kind of norm that a path names, "" for a norm of any kind, None where it names none.

    >>> says("layer1.0.bn2"), says("encoder.layer.3.output.LayerNorm"), says("model.layers.0.self_attn.q_norm")
    ('batch', 'layer', '')
    >>> says("blocks.0.norms.1"), says("classifier.normal_head"), says("features.3")
    ('', None, None)
    """
    parts = [part for part in path.split(".") if part and not LIST_INDEX.fullmatch(part)]
    if not parts:
        return None
    word = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", parts[-1]).lower()
    if "normal" in word and "normaliz" not in word:
        return None
    return next((kind for pattern, kind in WORDS if re.fullmatch(pattern, word.lstrip("_"))), None)


def _norm(path: str, group: dict[str, Stored]) -> StoredNorm | None:
    kind = says(path)
    statistics = [group[role] for role in ("running_mean", "running_var") if role in group]
    shapes = {tensor.shape for role, tensor in group.items() if role != "num_batches_tracked"}
    real = all(t.dtype in FLOATING for role, t in group.items() if role != "num_batches_tracked")
    if not shapes or len(shapes) > 1 or not real or () in shapes:
        return None
    shape = next(iter(shapes))
    if statistics:
        return StoredNorm(path, group, BATCH if kind in (None, UNKNOWN) else kind, kind is not None)
    if "weight" not in group:
        return None
    if "bias" in group and (len(shape) == 1 or kind is not None):
        return StoredNorm(path, group, kind or (LAYER if len(shape) > 1 else UNKNOWN), kind is not None)
    if len(shape) == 1 and kind is not None:
        return StoredNorm(path, group, RMS if kind in (UNKNOWN, LAYER, RMS) else kind, True)
    return None


def _vector(tensor: Stored) -> bool:
    return len(tensor.shape) == 1 and tensor.size > 1 and tensor.dtype in FLOATING


def without_statistics(norms: Iterable[StoredNorm]) -> dict[str, tuple[tuple[str, ...], str]]:
    """Path -> the statistics that are missing there, and what says that they should be in the file.

    A norm that holds one of the two, or a counter, lacks the rest; so does one that stands where another block of the
    same stack has statistics, or whose name says batch norm. A norm that merely could be one is left in peace.
    """
    norms = list(norms)
    having = {norm.place: norm.path for norm in norms if norm.has_statistics}
    found: dict[str, tuple[tuple[str, ...], str]] = {}
    for norm in norms:
        missing = tuple(role for role in ("running_mean", "running_var") if role not in norm.tensors)
        if not missing:
            continue
        if norm.has_statistics:
            found[norm.path] = missing, "it holds the other statistic"
        elif "num_batches_tracked" in norm.tensors:
            found[norm.path] = missing, "it holds their counter"
        elif norm.place in having:
            found[norm.path] = missing, f"{having[norm.place]}, of the same stack, has them"
        elif norm.kind == BATCH:
            found[norm.path] = missing, NAMED
    return found
