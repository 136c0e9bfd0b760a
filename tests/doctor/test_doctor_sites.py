"""Which sites a model has, under which names, in which modes; and watching them."""

from __future__ import annotations

import weakref
from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normscope.doctor.session import Session
from normscope.doctor.site import Event, Site
from normscope.doctor.sites import find_sites
from normscope.doctor.tracing.calls import NormCalls
from normscope.doctor.tracing.collapse import WrittenNorm
from normscope.doctor.tracing.graph import Graph
from normscope.doctor.tracing.paths import ModuleNames
from normscope.doctor.watching import watch


def sites_of(model: nn.Module, *args: object, **kwargs: object) -> dict[str, Site]:
    with Session(model) as session:
        return {site.name: site for site in find_sites(session, args, kwargs)}


def events_of(model: nn.Module, x: torch.Tensor, mode: str) -> list[Event]:
    events: list[Event] = []
    with Session(model) as session:
        sites = find_sites(session, (x,))
        session.forward((x,), mode=mode, watch=(watch(sites, mode, events.append),))
    return events


class ChannelsFirst(nn.Module):
    """ConvNeXt's layer norm: the parameters are its own, the normalization is a function."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],), self.weight, self.bias, 1e-6)
        return y.permute(0, 3, 1, 2)


class Functional(nn.Module):
    """A batch norm by function, its mode an argument."""

    def __init__(self, training: bool | None = None) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))
        self.fixed = training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        training = self.training if self.fixed is None else self.fixed
        return F.batch_norm(x, self.running_mean, self.running_var, training=training)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.tower(pair[0]) - self.tower(pair[1])


def test_without_data_the_modules_are_listed_in_the_order_of_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4))
    with Session(model) as session:
        sites = find_sites(session)
    assert [(s.name, s.kind, s.type_name, s.calls) for s in sites] == [
        ("1", "module", "torch.nn.BatchNorm2d", []),
        ("3", "module", "torch.nn.GroupNorm", []),
    ]


def test_a_call_has_shape_dtype_memory_format_and_order() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.InstanceNorm2d(3)).double()
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64).to(memory_format=torch.channels_last)
    first, second = sites_of(model, x).values()
    (call,) = first.calls
    assert (call.shape, call.dtype, call.device, call.memory_format, call.mode) == (
        (2, 3, 5, 7),
        "float64",
        "cpu",
        "channels_last",
        "running",
    )
    assert (first.calls[0].order, second.calls[0].order) == (0, 1)


def test_a_module_that_never_runs_is_a_site_without_calls() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.idle, self.used = nn.LayerNorm(4), nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    assert {name: len(s.calls) for name, s in sites_of(Unused(), torch.randn(2, 4)).items()} == {
        "used": 1,
        "idle": 0,
    }


def test_a_reused_module_is_one_site_with_a_call_for_each_use() -> None:
    x = torch.randn(2, 3, 6, 6)
    (site,) = sites_of(Siamese(), (x, x)).values()
    assert site.name == "tower.1"
    assert [(c.index, c.order) for c in site.calls] == [(0, 0), (1, 1)]


def test_a_module_under_two_names_is_one_site_with_an_alias() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm)})
    with Session(model) as session:
        (site,) = find_sites(session)
    assert (site.name, site.aliases) == ("a", ("b.0",))


def test_an_instance_norm_is_bound_to_the_rank_that_it_gets() -> None:
    (site,) = sites_of(nn.Sequential(nn.InstanceNorm1d(4)), torch.randn(4, 9)).values()
    assert site.spec is not None
    assert site.spec.stats == "c ... -> c"
    assert site.calls[0].spec == site.spec


def test_a_functional_norm_is_a_site_under_its_module_with_the_tensors_it_was_given() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), ChannelsFirst(4))
    (site,) = sites_of(model, torch.randn(2, 3, 6, 6)).values()
    assert (site.name, site.path, site.kind, site.type_name) == (
        "1:F.layer_norm",
        "1",
        "functional",
        "F.layer_norm",
    )
    assert site.tensors["weight"] is model[1].weight
    assert site.tensors["bias"] is model[1].bias
    assert site.calls[0].shape == (2, 4, 4, 4)
    assert site.spec is not None
    assert site.spec.eps == 1e-6


def test_calls_at_one_place_are_numbered_in_each_run_of_its_forward() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.normalize(F.layer_norm(F.layer_norm(x, (4,)), (4,)))

    twice = Twice()
    sites = sites_of(nn.Sequential(twice, twice), torch.randn(2, 4))
    assert {name: len(s.calls) for name, s in sites.items()} == {
        "0:F.layer_norm": 2,
        "0:F.layer_norm#2": 2,
        "0:F.normalize": 2,
    }


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.layer_norm(x, (4,)),
        lambda x: F.group_norm(x, 2),
        lambda x: F.instance_norm(x),
        lambda x: F.rms_norm(x, (4,)),
        lambda x: F.normalize(x, dim=1),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: torch.layer_norm(x, (4,)),
        lambda x: torch.native_layer_norm(x, (4,), None, None, 1e-5)[0],
        lambda x: torch.native_group_norm(x, None, None, 2, 4, 4, 2, 1e-5)[0],
    ],
)
def test_every_function_of_the_family_is_one_site(call: object) -> None:
    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(x)  # type: ignore[operator, no-any-return]

    (site,) = sites_of(Calls(), torch.randn(2, 4, 4)).values()
    assert site.kind == "functional"
    assert site.spec is not None


def test_what_a_norm_module_calls_inside_is_no_site_of_its_own() -> None:
    norms = [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm(5), nn.RMSNorm(5)]
    sites = sites_of(nn.Sequential(*norms), torch.randn(2, 4, 5, 5))
    assert [s.kind for s in sites.values()] == ["module"] * 5


def test_a_norm_module_whose_forward_is_called_directly_is_still_that_module() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm.forward(x)

    x = torch.randn(2, 4)
    (site,) = sites_of(Direct(), x).values()
    assert (site.name, site.kind, len(site.calls)) == ("norm", "module", 1)
    assert [event.site.name for event in events_of(Direct(), x, "eval")] == ["norm"]


def test_a_model_that_is_itself_a_norm_is_one_site() -> None:
    (site,) = sites_of(nn.LayerNorm(4), torch.randn(2, 4)).values()
    assert (site.name, site.path, site.kind) == ("", "", "module")
    assert [(n.kind, n.through) for n in site.calls[0].fed_by] == [("input", ())]
    assert [(n.kind, n.through) for n in site.calls[0].feeds] == [("output", ())]


def test_a_model_that_catches_the_error_of_a_norm_is_followed_on() -> None:
    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrong, self.right = nn.BatchNorm1d(5), nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.wrong(x)
            except RuntimeError:
                return F.layer_norm(self.right(x), (4,))

    sites = sites_of(Catches(), torch.randn(2, 4))
    assert {name: len(s.calls) for name, s in sites.items()} == {"right": 1, "F.layer_norm": 1, "wrong": 0}


def test_attention_softmax_and_losses_are_no_norms() -> None:
    class Innocent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, _ = self.attention(x, x, x)
            y = F.scaled_dot_product_attention(y, y, y).softmax(-1)
            return F.cosine_similarity(y, x, dim=-1).sum() + F.mse_loss(F.gelu(y), x)

    assert sites_of(Innocent(), torch.randn(2, 3, 4)) == {}


# -- modes ------------------------------------------------------------------------------------------------------


def test_modes_are_those_after_the_models_own_train_and_eval() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.free = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.kept.eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.free(self.kept(x))

    model = Frozen().eval()
    model.free.train()
    sites = sites_of(model, torch.randn(3, 4))
    assert [(s.mode_train, s.mode_eval, s.mode_now) for s in (sites["kept"], sites["free"])] == [
        ("running", "running", "running"),
        ("batch", "running", "batch"),
    ]


@pytest.mark.parametrize(
    ("fixed", "modes"),
    [
        (None, ("batch", "running", "running")),
        (True, ("batch", "batch", "batch")),
        (False, ("frozen", "frozen", "frozen")),
    ],
)
def test_the_mode_of_a_functional_batch_norm_is_seen_in_both_modes(
    fixed: bool | None, modes: tuple[str, str, str]
) -> None:
    (site,) = sites_of(Functional(fixed).eval(), torch.randn(3, 4)).values()
    assert (site.mode_train, site.mode_eval, site.mode_now) == modes


def test_eps_of_the_models_own_config_is_expected() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4), nn.BatchNorm1d(4))
    model.config = {"layer_norm_eps": 1e-12, "rms_norm_eps": 1e-6}
    with Session(model) as session:
        assert [site.expected_eps for site in find_sites(session)] == [1e-12, 1e-6, None]


# -- watching ---------------------------------------------------------------------------------------------------


def test_every_call_of_every_site_is_an_event_with_the_users_tensors() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), ChannelsFirst(4)).eval()
    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    batch, layer = events_of(model, x, "eval")
    assert [(e.site.name, e.mode, e.run, e.index) for e in (batch, layer)] == [
        ("0", "running", "eval", 0),
        ("1:F.layer_norm", "input", "eval", 0),
    ]
    assert batch.input.data_ptr() == x.data_ptr()
    assert batch.input.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(batch.output, model[0](x), rtol=0, atol=0)
    assert layer.tensors["weight"] is model[1].weight
    expected = F.layer_norm(layer.input, (4,), model[1].weight, model[1].bias, 1e-6)
    torch.testing.assert_close(layer.output, expected, rtol=0, atol=0)


def test_running_statistics_of_an_event_are_those_before_the_call() -> None:
    x = torch.randn(8, 4) + 3
    for model in (nn.Sequential(nn.BatchNorm1d(4)), Functional()):
        (event,) = events_of(model, x, "batch")
        assert event.mode == "batch"
        assert torch.equal(event.tensors["running_mean"], torch.zeros(4))
        assert torch.equal(event.tensors["running_var"], torch.ones(4))


def test_calls_of_a_reused_module_are_counted_in_each_run() -> None:
    x = torch.randn(2, 3, 6, 6)
    events: list[Event] = []
    with Session(Siamese()) as session:
        sites = find_sites(session, ((x, x),))
        for run in ("eval", "batch"):
            session.forward(((x, x),), mode=run, watch=(watch(sites, run, events.append),))
    assert [(e.run, e.index) for e in events] == [("eval", 0), ("eval", 1), ("batch", 0), ("batch", 1)]


def test_events_are_detached_unless_gradients_are_on() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    x = torch.randn(2, 4, requires_grad=True)
    assert not events_of(model, x, "eval")[0].input.requires_grad
    events: list[Event] = []
    with Session(model) as session:
        sites = find_sites(session, (x,))
        with session.gradient_run((x,), mode="eval", watch=(watch(sites, "gradient", events.append),)):
            assert events[0].input.requires_grad
            assert events[0].output.requires_grad


def test_what_the_callback_computes_is_not_followed() -> None:
    model = nn.Sequential(nn.LayerNorm(4), ChannelsFirst(4))
    seen: list[str] = []

    def callback(event: Event) -> None:
        seen.append(event.site.name)
        F.layer_norm(event.input, (event.input.shape[-1],))
        nn.LayerNorm(4)(event.input)

    x = torch.randn(2, 4, 4, 4)
    with Session(model) as session:
        sites = find_sites(session, (x,))
        session.forward((x,), mode="eval", watch=(watch(sites, "eval", callback),))
    assert seen == ["0", "1:F.layer_norm"]


def test_autocast_is_seen_by_the_model_and_not_by_the_callback() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.norm(self.linear(x))

    model, x = Half(), torch.randn(3, 4)
    inside: list[bool] = []
    with Session(model) as session:
        sites = find_sites(session, (x,))
        session.forward(
            (x,),
            mode="eval",
            watch=(watch(sites, "eval", lambda e: inside.append(torch.is_autocast_enabled("cpu"))),),
        )
    assert sites[0].calls[0].dtype == "bfloat16"
    assert inside == [False]


def test_calls_are_counted_in_the_forward_only_not_where_a_checkpoint_recomputes() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)

    model, x = Checkpointed(), torch.randn(3, 4)
    events: list[Event] = []
    with Session(model) as session:
        sites = find_sites(session, (x,))
        watching = watch(sites, "gradient", events.append)
        with session.gradient_run((x,), mode="eval", watch=(watching,)) as output:
            torch.autograd.grad(output.sum(), list(model.parameters()))
    assert [len(site.calls) for site in sites] == [1]
    assert len(events) == 1


# -- no trace ---------------------------------------------------------------------------------------------------


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fail = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(self.norm(x), (4,))
        if self.fail:
            raise RuntimeError("from the model")
        return x


def global_hooks() -> list[int]:
    module = nn.modules.module
    return [
        len(value)
        for name, value in vars(module).items()
        if name.startswith("_global_") and value is not None
    ]


def test_no_hook_remains_after_success_or_after_an_error_of_the_model_or_the_callback() -> None:
    before, fast = global_hooks(), torch.backends.mha.get_fastpath_enabled()
    model, x = Raises(), torch.randn(2, 4)
    with Session(model) as session, pytest.raises(RuntimeError, match="from the model"):
        find_sites(session, (x,))
    assert global_hooks() == before
    model.fail = False
    with Session(model) as session:
        sites = find_sites(session, (x,))

        def fails(event: Event) -> None:
            raise ValueError("from the callback")

        with pytest.raises(ValueError, match="from the callback"):
            session.forward((x,), mode="eval", watch=(watch(sites, "eval", fails),))
        assert [s.name for s in find_sites(session, (x,))] == ["norm", "F.layer_norm"]
    assert global_hooks() == before
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert torch.overrides._len_torch_function_stack() == 0


def test_following_a_forward_keeps_none_of_its_activations_alive() -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
            self.alive: list[bool] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            normed = self.norm(hidden)
            dropped = F.dropout(normed, training=False)
            root = dropped.norm(dim=-1, keepdim=True)
            written = dropped / root
            references = [weakref.ref(tensor) for tensor in (hidden, normed, dropped, root)]
            del hidden, normed, dropped, root
            out = self.second(written)
            self.alive = [reference() is not None for reference in references]
            return out

    model, x = Watched(), torch.randn(2, 4)
    names = ModuleNames(model)
    found: list[object] = []
    graph = Graph(names.held.values(), x, found.append)
    with torch.no_grad(), NormCalls(names, {id(model.norm)}, found.append, graph=graph):
        model(x)
    # what is told of a known norm holds its tensors, so only those of the one written by hand are counted
    del found[0]
    assert [type(item) for item in found] == [WrittenNorm]
    assert model.alive == [True, True, False, False]


def test_a_forward_that_finds_sites_holds_no_activation_at_its_end() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), ChannelsFirst(4), nn.ReLU())
    references: SimpleQueue[weakref.ref[torch.Tensor]] = (
        SimpleQueue()
    )  # a session puts lists back as they were
    for layer in model:
        layer.register_forward_hook(lambda _, args, out: references.put(weakref.ref(out)))
    with Session(model) as session:
        sites = find_sites(session, (torch.randn(2, 4, 4, 4),))
        assert len(sites) == 2
        assert [references.get_nowait()() for _ in model] == [None] * 4
