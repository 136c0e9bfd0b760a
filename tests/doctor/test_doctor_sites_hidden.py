"""What scripting, tracing, exporting, compiling and fusing hide."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.doctor.session import Session
from normscope.doctor.site import Event, Site
from normscope.doctor.sites import find_sites
from normscope.doctor.watching import watch


def sites_of(model: nn.Module, *args: object, **kwargs: object) -> list[Site]:
    with Session(model) as session:
        return find_sites(session, args, kwargs)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.ln = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-3), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(self.ln(torch.relu(self.bn(self.conv(x)))), 2)


X = torch.randn(2, 3, 8, 8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("hide", "modes"),
    [(torch.jit.script, ("batch", "running")), (lambda m: torch.jit.trace(m, X), ("frozen", "frozen"))],
)
def test_norms_of_a_scripted_or_traced_part_are_hidden_sites_named_by_what_holds_their_tensors(
    hide: object, modes: tuple[str, str]
) -> None:
    part = hide(Inner().eval())  # type: ignore[operator]
    sites = sites_of(nn.Sequential(part, nn.BatchNorm2d(4)), X)
    assert [(s.name, s.kind) for s in sites] == [
        ("0.bn", "hidden"),
        ("0.ln", "hidden"),
        ("0:aten.native_group_norm", "hidden"),
        ("1", "module"),
    ]
    bn = sites[0]
    assert bn.spec is not None
    assert (bn.spec.eps, bn.calls[0].shape, bn.mode_train, bn.mode_eval) == (1e-3, (2, 4, 6, 6), *modes)
    assert set(bn.tensors) == {"weight", "bias", "running_mean", "running_var"}
    assert [(n.kind, n.feature_axis) for n in bn.calls[0].fed_by] == [("conv", 1)]
    assert bn.calls[0].fed_by[0].weight is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_that_is_itself_scripted_is_followed_and_watched() -> None:
    model = torch.jit.script(Inner())
    events: list[Event] = []
    with Session(model) as session:
        sites = find_sites(session, (X,))
        session.forward((X,), mode="batch", watch=(watch(sites, "batch", events.append),))
    assert [(s.name, s.mode_train, s.mode_eval) for s in sites] == [
        ("bn", "batch", "running"),
        ("ln", "input", "input"),
        ("aten.native_group_norm", "input", "input"),
    ]
    assert [e.site.name for e in events] == ["bn", "ln", "aten.native_group_norm"]
    assert events[0].mode == "batch"
    assert torch.equal(events[0].tensors["running_mean"], torch.zeros(4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_hidden_instance_norm_is_not_taken_for_a_batch_norm() -> None:
    (site,) = sites_of(nn.Sequential(torch.jit.script(nn.InstanceNorm2d(3, affine=True))), X)
    assert site.spec is None
    assert site.reason == "a batch norm of one sample, or an instance norm: its operator does not say which"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_norm_by_hand_in_a_script_is_found() -> None:
    class Rms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    (site,) = sites_of(nn.Sequential(nn.Linear(4, 4), torch.jit.script(Rms())), torch.randn(3, 4))
    assert (site.name, site.kind, site.type_name) == ("1", "hand-written", "Rms")


def test_norms_of_an_exported_program_are_hidden_sites() -> None:
    model = torch.export.export(Inner().eval(), (X,)).module()
    sites = sites_of(model, X)
    assert [(s.name, s.kind) for s in sites] == [
        ("bn", "hidden"),
        ("ln", "hidden"),
        ("aten.group_norm", "hidden"),
    ]
    assert sites[0].spec is not None
    assert sites[0].spec.eps == 1e-3


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_part_runs_as_written_under_its_own_names(fullgraph: bool) -> None:
    model = nn.Sequential(torch.compile(Inner(), fullgraph=fullgraph), nn.BatchNorm2d(4))
    sites = sites_of(model, X)
    assert [(s.name, s.kind) for s in sites] == [
        ("0.bn", "module"),
        ("0.ln", "module"),
        ("0:F.group_norm", "functional"),
        ("1", "module"),
    ]


# -- the fused transformer layer ----------------------------------------------------------------------------------


def fast_path_taken(layer: nn.TransformerEncoderLayer, x: Tensor) -> bool:
    """Whether PyTorch itself runs the layer by its fused operator."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    with torch.no_grad(), Record():
        layer(x)
    return any("_transformer_encoder_layer_fwd" in name for name in seen)


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_first": True},
        {"batch_first": True, "norm_first": True},
        {"batch_first": True, "activation": "gelu"},
        {"batch_first": False},
        {"batch_first": True, "activation": torch.tanh},
        {"batch_first": True, "bias": False},
        {"batch_first": True, "nhead": 1},
    ],
)
def test_norms_are_fused_where_pytorch_takes_its_fast_path_and_are_sites_all_the_same(
    settings: dict[str, object],
) -> None:
    layer = nn.TransformerEncoderLayer(**{"d_model": 8, "nhead": 2, "dim_feedforward": 16, **settings}).eval()
    x = torch.randn(2, 5, 8)
    sites = {site.name: site for site in sites_of(layer, x)}
    assert {name: (site.fused, len(site.calls)) for name, site in sites.items()} == dict.fromkeys(
        ("norm1", "norm2"), (fast_path_taken(layer, x), 1)
    )


def test_unequal_eps_and_hooks_keep_a_layer_from_being_fused() -> None:
    unequal = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    unequal.norm1.eps = 1e-3
    hooked = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    hooked.norm1.register_forward_hook(lambda *_: None)
    for layer in (unequal, hooked):
        x = torch.randn(2, 5, 8)
        assert not fast_path_taken(layer.eval(), x)
        assert not any(site.fused for site in sites_of(layer, x))


def test_norms_of_a_fused_layer_are_watched_with_padding_too() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8))
    x, mask = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    names: list[str] = []
    with Session(model) as session:
        sites = find_sites(session, (x,), {"src_key_padding_mask": mask})
        watching = watch(sites, "eval", lambda event: names.append(event.site.name))
        session.forward((x,), {"src_key_padding_mask": mask}, mode="eval", watch=(watching,))
    assert names == ["layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.1.norm2", "norm"]
    assert [site.name for site in sites] == names
    assert [site.calls[0].shape for site in sites] == [(2, 5, 8)] * 5
