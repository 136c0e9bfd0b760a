"""Readers that no graph of operations shows keep a norm where it is: a mild sample would not show the difference."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.transforms import fold

torch.set_num_threads(1)
X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """``look`` is given what the norm returns, or (``behind``) what the convolution before it returns."""

    def __init__(self, look: Callable[[Any, Tensor], Any], *, behind: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.look, self.behind = look, behind
        self.conv, self.bn, self.out = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
        nn.init.uniform_(self.bn.bias, 0.5, 1.0)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.behind:
            gate = self.look(self, y)
            z = torch.relu(self.bn(y))
        else:
            z = self.bn(torch.relu(y))
            gate = self.look(self, z)
        return self.out(z) * (0.0 if gate is True else 1.0)


def foreach(_: Net, z: Tensor) -> None:
    for part in z.unbind(1):
        part.clamp_(max=50)


def out_of(_: Net, z: Tensor) -> None:
    view = z.detach()[:, :2]
    torch.clamp(view, max=50, out=view)


def through_numpy(_: Net, z: Tensor) -> None:
    held = z.detach().numpy()
    held.clip(max=50, out=held)


def assigned(_: Net, z: Tensor) -> None:
    z.data = z.clamp(max=50)


def keep(model: Any, z: Tensor) -> None:
    model.kept = z


def keep_in_a_list(model: Any, z: Tensor) -> None:
    model.kept = [None, z.clone()]


def keep_elsewhere(_: Net, z: Tensor) -> None:
    ELSEWHERE[:] = [(z,)]


ELSEWHERE: list[Any] = []
WRITES = {
    "slice": (lambda m, z: z[:, :2].clamp_(-50, 50), "clamp_"),
    "function": (lambda m, z: nn.functional.hardtanh(z[:, 2:], -50, 50, inplace=True), "hardtanh_"),
    "chunk": (lambda m, z: z.chunk(2, 1)[0].clamp_(-50, 50), "clamp_"),
    "unbind": (foreach, "clamp_"),
    "view": (lambda m, z: z.view(-1).clamp_(max=50), "clamp_"),
    "data": (lambda m, z: z.data.clamp_(max=50), "clamp_"),
    "out=": (out_of, "clamp"),
}
EXITS = {
    "numpy": (through_numpy, "numpy takes {} out of sight"),
    "array": (lambda m, z: bool(np.asarray(z).max() > 50), "__array__ takes {} out of sight"),
    "list": (lambda m, z: max(z.flatten().tolist()) > 50, "tolist takes {} out of sight"),
    "dlpack": (lambda m, z: bool(np.from_dlpack(z).max() > 50), "__dlpack__ takes {} out of sight"),
    "pickle": (
        lambda m, z: bool(pickle.loads(pickle.dumps(z)).max() > 50),
        "untyped_storage takes {} out of sight",
    ),
    "number": (lambda m, z: z.flatten()[0].item() > 50, "Python reads values of {} (local_scalar_dense)"),
    "equal": (lambda m, z: not torch.equal(z.clamp(max=50), z), "Python reads values of {} (equal)"),
    "kept": (keep, "the model keeps {} as kept after the forward"),
    "in a list": (keep_in_a_list, "the model keeps {} as kept after the forward"),
    "kept elsewhere": (keep_elsewhere, "something keeps {} after the forward"),
}
UNSEEN = EXITS.keys() - {"equal", "number", "in a list"}
"""the others count as readers of a layer's output in the graph already"""
STANDS = "not backwards: relu stands between conv (conv2d) and it; not forwards: "


def reason(model: nn.Module) -> str:
    """Why the one norm is left; the model is then the one that was given."""
    same, report = fold(model, X)
    assert same is model
    (left,) = report.left
    return left.reason


@pytest.mark.parametrize("name", WRITES)
def test_a_write_through_a_view_of_the_norms_output(name: str) -> None:
    look, op = WRITES[name]
    assert reason(Net(look)) == f"{STANDS}{op} writes into its output in place"


def test_a_tensor_that_is_given_other_values() -> None:
    assert reason(Net(assigned)) == f"{STANDS}assigning .data takes its output out of sight"


@pytest.mark.parametrize(
    ("name", "behind"),
    [*((name, False) for name in EXITS), *((name, True) for name in EXITS if name in UNSEEN)],
)
def test_values_that_leave(name: str, behind: bool) -> None:
    look, text = EXITS[name]
    found = reason(Net(look, behind=behind))
    if behind:
        told = text.format("the output of conv (conv2d)")
        assert found.startswith(f"not backwards: {told}; not forwards: "), found
    else:
        assert found == STANDS + text.format("its output")


def test_hooks_on_a_block_that_begins_or_ends_there() -> None:
    def net(*parts: nn.Module) -> nn.Sequential:
        model = nn.Sequential(*parts).eval()
        model[-2].register_forward_hook(lambda *_: None)
        return model

    bn = nn.BatchNorm2d(4)
    ahead = net(nn.ReLU(), nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), bn), nn.Conv2d(4, 2, 1))
    assert reason(ahead) == (
        "not backwards: relu stands between 1.0 (conv2d) and it; not forwards: the forward hooks of 1 see its output"
    )
    behind = net(nn.Conv2d(3, 4, 1), nn.Sequential(bn, nn.ReLU()), nn.Conv2d(4, 2, 1))
    assert reason(behind).startswith(
        "not backwards: the forward hooks of 1 see the output of 0 (conv2d); not forwards: "
    )


def test_an_input_that_is_overwritten_while_the_output_is_read() -> None:
    """An identity would hand on the very tensor that is overwritten."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.out = nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(x)
            z = self.bn(x)
            x.clamp_(max=50)
            return self.out(z) + x.mean()

    assert reason(Late().eval()).endswith(
        "not forwards: its input is overwritten by clamp_ while its output is still read"
    )


def in_a_thread(_: Any, z: Tensor) -> Any:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(z.sum()))
    thread.start()
    thread.join()
    return found[0]


def without_functions(_: Any, z: Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        return z.sum()


class ClampedConvolutions(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.clamp(max=50) if "convolution" in str(func) else made


OUTPUT, WEIGHT, BIAS = (
    "the output of conv (conv2d)",
    "the weight of conv (conv2d)",
    "the bias of conv (conv2d)",
)
ELSEWHERE_READ: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "vmap": (lambda m, z: torch.vmap(torch.sum)(z).sum(), f"sum reads {OUTPUT}"),
    "grad": (lambda m, z: torch.func.grad(lambda t: (t**2).sum())(z).sum(), f"pow reads {OUTPUT}"),
    "vjp": (lambda m, z: torch.func.vjp(lambda t: (t**2).sum(), z)[0], f"pow reads {OUTPUT}"),
    "jacrev": (
        lambda m, z: torch.func.jacrev(lambda t: (t[0, 0] ** 2).sum())(z).sum(),
        f"pow reads {OUTPUT}",
    ),
    "functionalize": (lambda m, z: torch.func.functionalize(torch.sum)(z), f"sum reads {OUTPUT}"),
    "thread": (in_a_thread, f"sum reads {OUTPUT}"),
    "no functions": (without_functions, f"sum reads {OUTPUT}"),
    "to_dlpack": (
        lambda m, z: torch.from_dlpack(torch.utils.dlpack.to_dlpack(z)).sum(),
        f"to_dlpack takes {OUTPUT} out of sight",
    ),
    "_to_dlpack": (
        lambda m, z: torch.from_dlpack(torch._C._to_dlpack(z)).sum(),
        f"to_dlpack takes {OUTPUT} out of sight",
    ),
    "bias": (lambda m, z: m.conv.bias.sum(), f"sum reads {BIAS} too"),
    "bias as a number": (lambda m, z: float(m.conv.bias.sum()), f"sum reads {BIAS} too"),
    "bias as a list": (lambda m, z: sum(m.conv.bias.tolist()), f"tolist takes {BIAS} out of sight"),
    "weight as a list": (
        lambda m, z: m.conv.weight.flatten().tolist()[0],
        f"tolist takes {WEIGHT} out of sight",
    ),
    "weight in numpy": (
        lambda m, z: float(m.conv.weight.detach().numpy().sum()),
        f"numpy takes {WEIGHT} out of sight",
    ),
    "copied weight": (lambda m, z: copy.deepcopy(m.conv.weight).sum(), f"sum reads {WEIGHT} too"),
    "copied layer": (lambda m, z: copy.deepcopy(m.conv)(X).sum(), f"{WEIGHT} is used 2 times in a forward"),
}


@pytest.mark.parametrize("name", ELSEWHERE_READ)
def test_what_is_read_where_functions_are_not_followed(name: str) -> None:
    """The sample and small multiples of it take the other branch: that all is right on them is no proof."""
    look, told = ELSEWHERE_READ[name]

    class Far(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            z = self.conv(x)
            y = self.bn(z)
            return torch.where(y.abs() > 1e6, look(self, z) * 50, y)

    found = reason(Far().eval())
    assert found.startswith(f"not backwards: {told}; not forwards: "), found


def test_a_mode_of_the_model_that_changes_what_layers_return() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            with ClampedConvolutions():
                z = self.conv(x)
            return self.bn(z)

    assert reason(Clamped().eval()).startswith("not backwards: clamp reads the output of conv (conv2d);")


def test_a_norm_that_writes_into_its_input() -> None:
    class Clamping(nn.BatchNorm2d):
        def _check_input_dim(self, input: Tensor) -> None:
            input.data.clamp_(max=50)

    behind = nn.Sequential(nn.Conv2d(3, 4, 3), Clamping(4)).eval()
    assert reason(behind).startswith("not backwards: clamp_ writes into the output of 0 (conv2d) in place;")
    ahead = nn.Sequential(nn.ReLU(), Clamping(3), nn.Conv2d(3, 4, 3)).eval()
    assert reason(ahead).endswith("not forwards: clamp_ inside it writes into what it is given")


def test_a_transposed_input_of_a_linear_layer_is_no_reader() -> None:
    """Its product and its bias are then two operators."""

    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bn = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.linear(x.flatten(2).transpose(1, 2)).transpose(1, 2))

    _, report = fold(Channels().eval(), X)
    assert report.folds[0].where == "before", report


@pytest.mark.parametrize(
    "alias", [lambda c: c.bias.data, lambda c: [c.weight.data[0]], lambda c: c.weight.detach().numpy()]
)
def test_an_attribute_that_lies_in_the_same_memory(alias: Any) -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    model.flat = alias(model[0])
    assert "of 0 (conv2d) shares its memory with another tensor of the model;" in reason(model)


@pytest.mark.parametrize(
    "look",
    [
        lambda m, z: setattr(m, "kept", z.shape),
        lambda m, z: setattr(m, "kept", m.other(z)),
        lambda m, z: torch.nn.functional.dropout(z, 0.5, training=False, inplace=True),
        lambda m, z: m.other(z).detach().numpy(),
    ],
    ids=["its shape", "what a layer made of it", "inert dropout", "numpy of a layer's"],
)
def test_what_sees_no_value_of_it_does_not_count(look: Any) -> None:
    model: Any = Net(look)
    model.other = nn.Conv2d(4, 2, 1)
    _, report = fold(model, X)
    assert report.folds[0].where == "after", report
