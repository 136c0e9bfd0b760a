"""A site: one place in a model where a normalization runs, with what it is, what it holds and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from normscope.doctor.tracing.paths import ModuleNames
    from normscope.identify.result import Identification
    from normscope.spec import NormSpec

STATE_NAMES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


@dataclass(eq=False)
class Neighbour:
    """An operation that feeds a site, or that a site feeds, through views and elementwise operations only."""

    kind: str
    """conv | linear | embedding | norm | attention | pool | add | concat | input | output | other"""
    op: str
    """the operation as written, such as ``conv2d``"""
    path: str
    """path of the innermost module it ran in"""
    module: torch.nn.Module | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    through: tuple[str, ...] = ()
    """operations between it and the site, nearest to the site first: ``("relu", "dropout")``"""
    dropout: float = 0.0
    """largest drop probability on the way"""
    feature_axis: int | None = None
    """axis of the tensor *at the site* that holds this operation's features; None where it cannot be told"""
    consumers: int = 1
    """how many operations read this neighbour's output"""
    site: str | None = None
    """name of the neighbouring site where the neighbour is itself a normalization"""
    transposed: bool = False
    """the weight has its input features first: a transposed convolution, or a matrix that was multiplied as it is"""
    places: tuple[int | None, ...] = ()
    """axis of the tensor at the site -> axis of this neighbour's own tensor; None where views between mixed it"""
    weight_uses: int = 0
    """how often the weight was read in the forward"""
    rewritable: bool = False
    """a node of a graph, whose weight can be written anew: no module has to be changed"""
    padded: bool = False
    """the operation fills in zeros: at a border, or (a transposed convolution) between the elements"""


@dataclass(eq=False)
class Join:
    """A residual sum of a norm's input with what was made of its output: the end of a pre-norm block."""

    path: str
    """path of the module that adds"""
    feeds: tuple[Neighbour, ...]
    """what reads the sum"""
    readers: int
    """how many operations read the sum"""
    ends: tuple[str, ...]
    """kinds of what reads the sum, through pooling too: ``linear`` where a head begins"""
    normalized_later: bool
    """some normalization depends on the sum"""


@dataclass(eq=False)
class Call:
    """One call of a site in the forward pass that found it."""

    index: int
    order: int
    """position among all site calls of the forward"""
    shape: tuple[int, ...]
    dtype: str
    """``float32``, ``bfloat16``, ..."""
    device: str
    memory_format: str
    """contiguous | channels_last | channels_last_3d | other"""
    spec: NormSpec | None = None
    """the spec bound to this call's rank (an instance norm reads (C, L) and (N, C, L) differently)"""
    mode: str = "input"
    """batch | running | frozen | input, as it was in this forward"""
    fed_by: tuple[Neighbour, ...] = ()
    feeds: tuple[Neighbour, ...] = ()
    join: Join | None = None
    """where the site begins the branch of a pre-norm residual block: its end"""
    reason: str = ""
    """why ``spec`` is None though the site has one"""


@dataclass(eq=False)
class Site:
    """One normalization of a model."""

    name: str
    """unique: the module path, or ``path:F.layer_norm`` (``#2`` for the second there) for a call in a forward"""
    path: str
    """path of the (enclosing) module; "" is the model itself"""
    kind: str
    """module | functional | hand-written (own module) | inlined (hand-written inside a larger forward)
    | hidden (scripted, traced, exported) | node (of a graph that another runtime runs)
    | stored (tensors of a checkpoint)"""
    type_name: str
    """class or function name for people: ``torch.nn.BatchNorm2d``, ``F.layer_norm``"""
    module: torch.nn.Module | None = None
    aliases: tuple[str, ...] = ()
    """other paths under which the same module is registered"""
    spec: NormSpec | None = None
    reason: str = ""
    """why ``spec`` is None"""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """the site's own state by the names in STATE_NAMES, as references: read only"""
    mode_train: str = "input"
    """mode after ``model.train()``"""
    mode_eval: str = "input"
    """mode after ``model.eval()``"""
    mode_now: str = "input"
    """mode as the user handed the model over"""
    calls: list[Call] = field(default_factory=list)
    fused: bool = False
    """in deployment this site runs inside a fused kernel (the transformer fast path)"""
    unknown: frozenset[str] = frozenset()
    """fields of ``spec`` that a checkpoint does not tell, and that nobody stated: their values say nothing"""
    expected_eps: float | None = None
    """eps that the model's own config names, or that of its weights, where there is one"""
    expected_by_weights: bool = False
    """the config that came with the weights names it, and the model's own does not"""
    identified: Identification | None = None
    """how a hand-written norm came to its specification"""
    _arrays: dict[str, NDArray[np.float64]] = field(default_factory=dict, repr=False)
    _names: ModuleNames | None = field(default=None, repr=False)
    """module paths of the model that the site was found in"""

    def array(self, name: str) -> NDArray[np.float64] | None:
        """The state tensor ``name`` as float64, or None where the site has none."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if name not in self._arrays:
            value = tensor.detach()
            self._arrays[name] = value.double().cpu().numpy().copy()
        return self._arrays[name]

    def dtype(self, name: str) -> str | None:
        """dtype of the state tensor ``name`` without the ``torch.`` prefix."""
        tensor = self.tensors.get(name)
        return None if tensor is None else str(tensor.dtype).removeprefix("torch.")

    def requires_grad(self, name: str) -> bool | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else bool(tensor.requires_grad)

    @property
    def has_running_state(self) -> bool:
        return "running_mean" in self.tensors or "running_var" in self.tensors


@dataclass(eq=False)
class Event:
    """What a probe sees at one call of one site in one run. Tensors are the user's own: never write to them."""

    run: str
    site: Site
    index: int
    """how many-th call of this site in this run"""
    spec: NormSpec
    mode: str
    """batch | running | frozen | input in this run"""
    input: torch.Tensor
    output: torch.Tensor
    tensors: dict[str, torch.Tensor]
    """weight, bias, running_mean, running_var as passed to this call (running_* as before the call)"""
    extra: dict[str, Any] = field(default_factory=dict)
