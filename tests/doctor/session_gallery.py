"""Models that leave traces, each in its own way, and a fingerprint of everything a session promises to leave alone."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint


def fingerprint(*roots: Any) -> Any:
    """Nested tuples that are equal exactly where contents are bit for bit equal and objects are the same objects."""
    seen: set[int] = set()

    def of(obj: Any) -> Any:
        if isinstance(
            obj, (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)
        ):
            return (type(obj), repr(obj))
        if id(obj) in seen:
            return id(obj)
        seen.add(id(obj))
        inside: Any = ()
        if isinstance(obj, torch.Tensor):
            return (id(obj), tensor(obj))
        if isinstance(obj, np.ndarray):
            inside = obj.tobytes()
        elif isinstance(obj, dict):
            inside = [(of(key), of(value)) for key, value in obj.items()]
        elif isinstance(obj, (list, tuple, deque)):
            inside = [of(item) for item in obj]
        elif isinstance(obj, (set, frozenset)):
            inside = sorted(map(repr, obj))
        elif isinstance(obj, bytearray):
            inside = bytes(obj)
        elif isinstance(obj, torch.Generator):
            inside = obj.get_state().numpy().tobytes()
        elif isinstance(obj, random.Random):
            inside = obj.getstate()
        elif isinstance(obj, np.random.Generator):
            inside = repr(obj.bit_generator.state)
        elif isinstance(obj, FunctionType):
            inside = [of(cell.cell_contents) for cell in obj.__closure__ or ()]
        elif isinstance(obj, MethodType):
            inside = of(obj.__self__)
        elif isinstance(obj, functools.partial):
            inside = (of(obj.args), of(obj.keywords))
        slots = [name for base in type(obj).__mro__ for name in getattr(base, "__slots__", ())]
        held = [of(getattr(obj, name, None)) for name in slots if not name.startswith("__")]
        attributes = getattr(obj, "__dict__", None)
        if isinstance(obj, torch.jit.ScriptModule):
            names = obj.__dict__["_concrete_type"].get_attributes()
            held += [
                of(getattr(obj, name)) if name in ("b", "t") else repr(getattr(obj, name)) for name in names
            ]
        if isinstance(obj, nn.Module) and type(obj).__module__ == __name__:
            held += [of(value) for name, value in vars(type(obj)).items() if not name.startswith("__")]
        return (id(obj), inside, held, None if attributes is None else of(attributes))

    def tensor(t: torch.Tensor) -> Any:
        storage = t.untyped_storage()
        inference = t.is_inference()
        return (
            t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), storage.data_ptr(), storage.nbytes(),
            bytes(storage), t.requires_grad, t.is_leaf, None if inference else t._version,
            of(t.grad) if t.is_leaf else None, of(t._backward_hooks), of(t._post_accumulate_grad_hooks), of(t.__dict__),
        )  # fmt: skip

    return [of(root) for root in roots]


def world() -> Any:
    """Random states and global switches."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    autocast = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    ]
    return (
        random.getstate(), (kind, keys.tobytes(), rest), torch.get_rng_state().numpy().tobytes(),
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(), torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )  # fmt: skip


GALLERY: dict[str, Callable[[], nn.Module]] = {}
"""name -> factory of a model that takes a (4, 6) float tensor"""


def exhibit(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    GALLERY[factory.__name__] = factory
    return factory


class Net(nn.Module):
    """Linear, batch norm, dropout, and whatever a subclass does before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.leave_a_trace(x)
        return self.dropout(self.norm(self.linear(x)))

    def leave_a_trace(self, x: torch.Tensor) -> None:
        """What a subclass does besides."""


exhibit(Net)


@exhibit
class WritesParametersInPlace(Net):
    def leave_a_trace(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
            torch._foreach_mul_([self.linear.bias, self.norm.weight], 0.5)
            torch.mul(self.norm.bias, 2.0, out=self.norm.bias).add_(1.0)


@exhibit
class WritesThroughData(Net):
    def leave_a_trace(self, x: torch.Tensor) -> None:
        self.linear.weight.data.mul_(0.9)
        self.linear.bias.data[0] = 3.0


@exhibit
class RebindsData(Net):
    def leave_a_trace(self, x: torch.Tensor) -> None:
        self.linear.weight.data = self.linear.weight.data.clamp(-0.1, 0.1)
        self.linear.weight.data.add_(1.0)


@exhibit
def spectral_norm_by_hook() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6))


@exhibit
def spectral_norm_by_parametrization() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6))


@exhibit
class MovingAverage(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("hidden", torch.zeros(6), persistent=False)

    def leave_a_trace(self, x: torch.Tensor) -> None:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.hidden = self.hidden + 1
        self._buffers["average"].add_(self.hidden)


@exhibit
class WritesThroughNumpy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3, 2))
        self.view = self.table.numpy()
        self.weights = self.linear.weight.detach().numpy()

    def leave_a_trace(self, x: torch.Tensor) -> None:
        self.view[0] = 7
        self.weights *= 2
        self.norm.weight.detach().numpy()[1] = 5
        np.asarray(self.norm.bias.data)[2] += 1


@exhibit
class Remembers(Net):
    """A cached activation (no leaf in grad mode), a counter, lists, sets, a deque, a defaultdict, new attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.history: list[Any] = [[1], torch.zeros(2)]
        self.shapes: set[tuple[int, ...]] = set()
        self.recent: deque[float] = deque([1.0], maxlen=2)
        self.counts: defaultdict[str, list[int]] = defaultdict(list, a=[1])
        self.order = OrderedDict(a=1, b=2)
        self.log = bytearray(b"start")
        self.cached: torch.Tensor | None = None

    def leave_a_trace(self, x: torch.Tensor) -> None:
        self.calls += 1
        self.history[0].append(self.calls)
        self.history[1].add_(1)
        self.history.append(x)
        self.shapes.add(tuple(x.shape))
        self.recent.extend([2.0, 3.0])
        self.counts["a"].append(2)
        self.counts["b"].append(3)
        self.order.move_to_end("a")
        self.log += b"more"
        self.cached = self.linear(x)
        self.new_attribute = "new"
        del self.__dict__["new_attribute"]
        self.another = {}


@dataclass
class Cache:
    keys: list[torch.Tensor] = field(default_factory=list)
    length: int = 0


class Slotted:
    __slots__ = ("count", "items")

    def __init__(self) -> None:
        self.count = 0
        self.items: list[int] = []


@exhibit
class HoldsObjects(Net):
    """State in plain objects, an unregistered module, plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache([torch.zeros(2)])
        self.slotted = Slotted()
        self.unregistered = [nn.BatchNorm1d(6)]
        self.plain = {"tensor": torch.zeros(3)}

    def leave_a_trace(self, x: torch.Tensor) -> None:
        self.cache.length += 1
        self.cache.keys[0].add_(1)
        self.cache.keys.append(x)
        self.slotted.count += 1
        self.slotted.items.append(1)
        self.unregistered[0](x)
        self.plain["tensor"].fill_(2)


@exhibit
class OverridesTrain(Net):
    def __init__(self) -> None:
        super().__init__()
        self.switches: list[bool] = []

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.switches.append(mode)
        self.norm.training = False
        self.linear.weight.data.mul_(1.5)
        self.linear.bias.requires_grad_(not mode)
        return self


@exhibit
class ChangesItself(Net):
    """Switches a child, replaces a module, sets requires_grad and the gradient, adds a parameter and hooks."""

    def leave_a_trace(self, x: torch.Tensor) -> None:
        self.norm.eval()
        self.dropout = nn.Identity()
        self.linear.weight.requires_grad_(False)
        self.linear.bias.grad = torch.ones(6)
        self.extra = nn.Parameter(torch.ones(1))
        self.norm.register_forward_hook(lambda module, args, output: output * 2)
        self.norm.weight.register_hook(lambda gradient: gradient * 2)
        self.norm.weight.note = "touched"


@exhibit
def hooks_that_add_hooks() -> nn.Module:
    net = Net()
    seen: list[Any] = []
    count = 0

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal count
        count += 1
        seen.append(output.detach())
        module.register_forward_hook(lambda *_: None)
        net.register_forward_pre_hook(lambda *_: None)

    net.norm.register_forward_hook(hook)
    net.linear.weight.register_hook(lambda gradient: seen.append(gradient))
    net.linear.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    return net


@exhibit
def half_precision_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).to(torch.bfloat16)


@exhibit
def tied_weights() -> nn.Module:
    class Tied(WritesParametersInPlace):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.Linear(6, 6, bias=False)
            self.decoder.weight = self.linear.weight
            self.register_buffer("row", self.linear.weight.data[2:4])

    return Tied()


@exhibit
class TrainsItself(Net):
    """Holds its optimizer, and steps in its forward: backward, gradient accumulation, momentum buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adam(self.linear.parameters(), lr=0.1)
        self.linear(torch.ones(2, 6)).sum().backward()
        self.optimizer.step()

    def leave_a_trace(self, x: torch.Tensor) -> None:
        with torch.enable_grad():
            self.linear(x.detach()).square().sum().backward()
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] *= 0.5


@exhibit
class DrawsNumbers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.python = random.Random(3)
        self.numpy = np.random.default_rng(3)
        self.noise = np.zeros(4)

    def leave_a_trace(self, x: torch.Tensor) -> None:
        torch.rand(3, generator=self.generator)
        torch.rand(3)
        self.python.random()
        random.random()
        self.noise += self.numpy.random(4) + np.random.rand(4)  # noqa: NPY002


@exhibit
class FlipsSwitches(Net):
    def leave_a_trace(self, x: torch.Tensor) -> None:
        torch.set_grad_enabled(not torch.is_grad_enabled())
        torch.set_default_dtype(torch.float64)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # what remains of the forward runs as it would have
        torch.set_default_dtype(torch.float32)
        torch.set_autocast_enabled("cpu", False)
        torch.set_default_dtype(torch.float64)


@exhibit
class WritesItsInput(Net):
    def leave_a_trace(self, x: torch.Tensor) -> None:
        x.data.mul_(2)
        F.relu_(x.data)


@exhibit
class RenormalizesEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6, max_norm=0.1)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embedding(x[:, 0].abs().long() % 5))


@exhibit
class MovesMemory(Net):
    """Metadata changes in place: transposes, shrinks, points a tensor at other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.arange(6.0).reshape(2, 3))
        self.register_buffer("b", torch.arange(6.0))
        self.register_buffer("c", torch.arange(4.0))

    def leave_a_trace(self, x: torch.Tensor) -> None:
        self.a.t_()
        self.a.add_(1)
        self.b.resize_(2)
        self.b.fill_(3)
        self.c.set_(torch.zeros(9))


@exhibit
class JoinsGraph(Net):
    """A buffer written in place from a parameter is no leaf any more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))

    def leave_a_trace(self, x: torch.Tensor) -> None:
        self.scale.mul_(self.norm.weight)


@exhibit
def scripted() -> nn.Module:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Sequential(nn.BatchNorm1d(6))
            self.calls = 0
            self.history = [1]
            self.t = torch.zeros(2)
            self.register_buffer("b", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.history.append(self.calls)
            self.t = self.t + 1
            self.b = self.b + 1
            return F.dropout(self.norm(x), 0.5, self.training)

    return torch.jit.script(Scripted())


CALLS = 0
FEATURES: dict[str, Any] = {}


@exhibit
class SharesState(Net):
    """A class attribute, global variables, a function's default argument and a function's own attribute."""

    total = 0
    table: ClassVar[dict[int, int]] = {}

    def leave_a_trace(self, x: torch.Tensor, seen: list[int] = []) -> None:  # noqa: B006
        global CALLS
        CALLS += 1
        FEATURES["x"] = x
        SharesState.total += 1
        self.table[len(self.table)] = 1
        seen.append(1)


@exhibit
class Checkpoints(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: self.dropout(self.norm(y)), self.linear(x), use_reentrant=False)


@exhibit
def functional_norm() -> nn.Module:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.running_mean = nn.Buffer(torch.zeros(6))
            self.running_var = nn.Buffer(torch.ones(6))
            self.stored = nn.Parameter(torch.zeros(6), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.batch_norm(x, self.running_mean, self.running_var, training=self.training)
            return F.dropout(F.batch_norm(x, self.stored, torch.ones(6), training=True), 0.5, self.training)

    return Functional()


class Interrupting(nn.Module):
    """Runs a model, then raises."""

    def __init__(self, inner: nn.Module, error: type[BaseException]) -> None:
        super().__init__()
        self.inner = inner
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner(x)
        raise self.error("stop")
