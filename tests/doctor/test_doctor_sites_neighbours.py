"""What feeds a site and what it feeds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.doctor.session import Session
from normscope.doctor.site import Call, Neighbour
from normscope.doctor.sites import find_sites


def calls_of(model: nn.Module, *args: object) -> dict[str, Call]:
    with Session(model) as session:
        return {site.name: site.calls[0] for site in find_sites(session, args)}


def seen(neighbours: tuple[Neighbour, ...]) -> list[tuple[object, ...]]:
    return [(n.kind, n.path, n.through, n.feature_axis, n.consumers) for n in neighbours]


class Residual(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.c2, self.b2 = nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.b1(self.c1(x)), inplace=True)
        y = self.b2(self.c2(y))
        y += x
        return y.relu_()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.act, self.pool = (
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.block, self.drop, self.head, self.ln = (
            Residual(8),
            nn.Dropout(0.3),
            nn.Linear(8, 5),
            nn.LayerNorm(5),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.pool(self.act(self.bn(self.stem(x)))))
        return self.ln(self.drop(self.head(x.mean((2, 3)))))


def test_a_residual_network() -> None:
    model = Classifier()
    calls = calls_of(model, torch.randn(2, 3, 12, 12))
    assert {name: (seen(c.fed_by), seen(c.feeds)) for name, c in calls.items()} == {
        "bn": ([("conv", "stem", (), 1, 1)], [("pool", "pool", ("relu",), 1, 2)]),
        "block.b1": ([("conv", "block.c1", (), 1, 1)], [("conv", "block.c2", ("relu",), 1, 1)]),
        "block.b2": ([("conv", "block.c2", (), 1, 1)], [("add", "block", (), 1, 1)]),
        "ln": ([("linear", "head", ("dropout",), 1, 1)], [("output", "", (), None, 1)]),
    }
    stem, c1 = calls["bn"].fed_by[0], calls["block.b1"].fed_by[0]
    assert stem.module is model.stem
    assert stem.weight is model.stem.weight
    assert stem.bias is model.stem.bias
    assert c1.bias is None
    assert calls["ln"].fed_by[0].dropout == 0.3
    assert calls["bn"].fed_by[0].dropout == 0.0


def test_an_encoder_and_decoder_with_a_skip() -> None:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c1, self.g = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
            self.down, self.up, self.b = (
                nn.Conv2d(4, 8, 2, 2),
                nn.ConvTranspose2d(8, 4, 2, 2),
                nn.BatchNorm2d(4),
            )
            self.i, self.c2 = nn.InstanceNorm2d(8), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            a = self.g(self.c1(x))
            return self.c2(self.i(torch.cat([self.b(self.up(self.down(a))), a], 1)))

    calls = calls_of(UNet(), torch.randn(2, 3, 8, 8))
    assert seen(calls["g"].feeds) == [("conv", "down", (), 1, 1), ("concat", "", (), 1, 1)]
    assert seen(calls["b"].fed_by) == [("conv", "up", (), 1, 1)]
    assert calls["b"].fed_by[0].transposed
    assert not calls["g"].fed_by[0].transposed
    assert seen(calls["i"].fed_by) == [("concat", "", (), 1, 1)]


class Block(nn.Module):
    """A pre-norm transformer block over tokens, and a batch norm over channels of the transposed tokens."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(11, d), nn.Parameter(torch.zeros(1, 5, d))
        self.n1, self.attention, self.n2 = (
            nn.LayerNorm(d),
            nn.MultiheadAttention(d, 2, batch_first=True),
            nn.LayerNorm(d),
        )
        self.mlp, self.bn = (
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)),
            nn.BatchNorm1d(d),
        )

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens) + self.position
        y = self.n1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.mlp(self.n2(x))
        return {"tokens": self.bn(x.transpose(1, 2)).transpose(1, 2)}


def test_a_pre_norm_transformer() -> None:
    calls = calls_of(Block(8), torch.randint(0, 11, (2, 5)))
    assert {name: (seen(c.fed_by), seen(c.feeds)) for name, c in calls.items()} == {
        "n1": ([("embedding", "embed", ("add",), 2, 1)], [("attention", "attention", (), 2, 1)]),
        "n2": ([("add", "", (), 2, 2)], [("linear", "mlp.0", (), 2, 1)]),
        "bn": ([("add", "", (), 1, 1)], [("output", "", (), None, 1)]),
    }


@pytest.mark.parametrize(
    ("through", "axis"),
    [
        (lambda x: x, 1),
        (lambda x: x.permute(0, 2, 3, 1), 3),
        (lambda x: x.flatten(2), 1),
        (lambda x: x.flatten(2).transpose(1, 2), 2),
        (lambda x: x.flatten(1), None),
        (lambda x: x.flatten(1).view(2, 8, 4, 4), None),
        (lambda x: x.movedim(1, -1).contiguous().float(), 3),
        (lambda x: x.unsqueeze(1), 2),
        (lambda x: x[:, :, 0], 1),
        (lambda x: x[..., None, 0], 1),
        (lambda x: x[:, :4], None),
        (lambda x: F.gelu(x.mT), 1),
        (lambda x: x.reshape(2, 8, 16).permute(2, 0, 1) * 2 + 1, 2),
        (lambda x: torch.chunk(x, 2, dim=2)[0].relu(), 1),
    ],
)
def test_the_feature_axis_is_carried_through_views_in_both_directions(
    through: object, axis: int | None
) -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = through(self.conv(x))  # type: ignore[operator]
            return F.layer_norm(y, y.shape[-1:])

    class Down(nn.Module):
        """The same views between the norm and a convolution, so that they are followed backwards."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2))

    (call,) = calls_of(Up(), torch.randn(2, 3, 4, 4)).values()
    assert [(n.kind, n.feature_axis) for n in call.fed_by] == [("conv", axis)]
    (call,) = calls_of(Down(), torch.randn(2, 8, 4, 4)).values()
    assert [(n.kind, n.feature_axis) for n in call.feeds] == [("conv", 3)]


def test_a_path_around_a_dropout_does_not_go_through_it() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
            self.with_drop, self.without = nn.LayerNorm(4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return self.with_drop(self.drop(y)) + self.without(y)

    calls = calls_of(Around(), torch.randn(2, 4))
    assert [(n.through, n.dropout, n.consumers) for n in calls["with_drop"].fed_by] == [
        (("dropout",), 0.5, 2)
    ]
    assert [(n.through, n.dropout, n.consumers) for n in calls["without"].fed_by] == [((), 0.0, 2)]


def test_operations_between_are_named_from_the_site_outwards() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(
                torch.tanh(F.relu(self.norm(F.dropout(F.gelu(self.first(x)), 0.1, self.training))))
            )

    call = calls_of(Chain(), torch.randn(2, 4))["norm"]
    assert call.fed_by[0].through == ("dropout", "gelu")
    assert call.feeds[0].through == ("relu", "tanh")


def test_a_norm_fed_by_a_norm_names_the_other_site() -> None:
    calls = calls_of(nn.Sequential(nn.LayerNorm(4), nn.ReLU(), nn.LayerNorm(4)), torch.randn(2, 4))
    assert [(n.kind, n.site) for n in calls["2"].fed_by] == [("norm", "0")]
    assert [(n.kind, n.site) for n in calls["0"].feeds] == [("norm", "2")]
    assert seen(calls["0"].fed_by) == [("input", "", (), None, 1)]


def test_weights_of_functional_layers_and_of_matrix_products_are_known_where_they_are_parameters() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel, self.shift = nn.Parameter(torch.randn(4, 3, 1, 1)), nn.Parameter(torch.zeros(4))
            self.matrix = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            y = F.group_norm(F.conv2d(x, self.kernel, self.shift), 2)
            y = F.group_norm(F.conv2d(y, torch.ones(4, 4, 1, 1)), 2)
            return F.layer_norm(y.mean((2, 3)) @ self.matrix, (6,))

    model = Functional()
    first, second, third = calls_of(model, torch.randn(2, 3, 4, 4)).values()
    assert first.fed_by[0].weight is model.kernel
    assert first.fed_by[0].bias is model.shift
    assert second.fed_by[0].kind == "conv"
    assert second.fed_by[0].weight is None
    assert (third.fed_by[0].kind, third.fed_by[0].weight is model.matrix) == ("linear", True)
    assert third.fed_by[0].transposed


def test_a_gate_of_another_shape_is_not_what_feeds() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gate, self.bn = nn.Conv2d(3, 4, 1), nn.Linear(4, 4), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.bn(y * torch.sigmoid(self.gate(y.mean((2, 3))))[:, :, None, None])

    call = calls_of(Gated(), torch.randn(2, 3, 5, 5))["bn"]
    assert [(n.path, n.through, n.consumers) for n in call.fed_by] == [("conv", ("mul",), 2)]


def test_gpt_style_layers_that_add_and_multiply_in_one_operator() -> None:
    class Projection(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias, self.norm = (
                nn.Parameter(torch.randn(4, 6)),
                nn.Parameter(torch.zeros(6)),
                nn.LayerNorm(6),
            )

        def forward(self, x: Tensor) -> Tensor:
            y = torch.addmm(self.bias, x.view(-1, 4), self.weight).view(2, 3, 6)
            return self.norm(y)

    model = Projection()
    (neighbour,) = calls_of(model, torch.randn(2, 3, 4))["norm"].fed_by
    assert (neighbour.kind, neighbour.op, neighbour.feature_axis, neighbour.transposed) == (
        "linear",
        "addmm",
        2,
        True,
    )
    assert neighbour.weight is model.weight
    assert neighbour.bias is model.bias
