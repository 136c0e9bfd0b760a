"""What nothing shows differs on another sample: the sample scaled, negated and set to zero is compared too."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.transforms import fold

torch.set_num_threads(1)
X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()


class Net(nn.Module):
    """What the norm returns, or (``far``) where it is large what ``look`` makes of the convolution's output."""

    def __init__(self, look: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.look, self.conv, self.bn = look, nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        nn.init.constant_(self.bn.running_mean, 0.5)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        y = self.bn(z)
        return torch.where(y.abs() > 25, self.look(self, z) * y.sign(), y)


class ClampedNorms(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return (made[0].clamp(max=25), *made[1:]) if "batch_norm" in str(func) else made


class UnderAMode(Net):
    def forward(self, x: Tensor) -> Tensor:
        with ClampedNorms():
            return self.bn(self.conv(x))


def hidden_numpy(m: Any, z: Tensor) -> float:
    with torch._C.DisableTorchFunction():
        return float(z.detach().numpy().sum())


UNSEEN: dict[str, Net] = {
    "a thread that was there": Net(lambda m, z: POOL.submit(z.sum).result()),
    "numpy without functions": Net(hidden_numpy),
    "the type of the norm": Net(lambda m, z: 1.0 + isinstance(m.bn, nn.BatchNorm2d)),
    "whether there is a bias": Net(lambda m, z: 1.0 + (m.conv.bias is None)),
    "a mode of the model": UnderAMode(lambda m, z: 1.0),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_nothing_shows_differs_on_another_sample(name: str) -> None:
    model = UNSEEN[name]
    same, report = fold(model, X)
    assert same is model
    (left,) = report.left
    told = (
        "undone, the function would change: in eval it differs on the sample scaled by 100: outputs would be "
    )
    assert left.reason.startswith(told), left.reason
    assert left.reason.endswith(" of the largest away from those before, and 1.0e-10 is allowed")


def test_the_one_norm_that_differs_is_undone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), UNSEEN["the type of the norm"]).eval()
    _, report = fold(model, X)
    assert [one.name for one in report.done] == ["1"]
    assert [one.name for one in report.left] == ["2.bn"]


@pytest.mark.parametrize(
    ("look", "left_out"),
    [
        (lambda y: y.exp().exp(), "scaled by 10, scaled by 100"),
        (lambda y: y.log(), "scaled by 10, scaled by 100, negated, set to zero"),
        (lambda y: y.tanh(), ""),
        (lambda y: (y >= 0.0).double(), ""),
    ],
    ids=["overflows", "not a number", "saturates", "steps"],
)
def test_a_sound_fold_stays_where_the_original_is_extreme(look: Any, left_out: str) -> None:
    class Extreme(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return look(self.bn(self.conv(x)))  # type: ignore[no-any-return]

    model = Extreme().eval()
    _, report = fold(model, X * 1.0)
    assert len(report.done) == 1, report
    told = [note for note in report.notes if note.startswith("not compared on the sample ")]
    notes = (
        [f"not compared on the sample {left_out}: the model fails or is not finite there"] if left_out else []
    )
    assert told == notes


def test_a_threshold_that_roundings_cross_is_no_difference() -> None:
    """On zeros the norm returns its bias less what the mean takes, and that is put exactly at the threshold."""

    class Spikes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.bn = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32)
            nn.init.uniform_(self.bn.weight, 0.5, 1.5)
            nn.init.uniform_(self.bn.running_var, 0.5, 1.5)
            nn.init.uniform_(self.bn.running_mean)
            self.at = nn.Buffer(torch.zeros(32, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            y = self.bn(self.conv(x))
            return y + (y >= self.at.view(-1, 1, 1)).to(y)

    model = Spikes().eval().double()
    with torch.no_grad():
        model.at.copy_(model.bn(model.conv(torch.zeros(1, 3, 3, 3, dtype=torch.float64))).flatten())
    _, report = fold(model, X.double())
    assert len(report.done) == 1, report
