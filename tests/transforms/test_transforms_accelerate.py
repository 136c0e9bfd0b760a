"""Accelerated models compute the same and are the same in everything else; what is left has a reason."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import normscope.nn as own
from normscope import functional
from normscope.doctor.refusals import Refused
from normscope.errors import BadInput, ModelError
from normscope.kernels import status
from normscope.transforms import Deviation, TransformReport, accelerate

torch.set_num_threads(1)

IMAGE, WORDS = (4, 6, 5, 3), (4, 5, 6)
NORMS: list[tuple[Any, tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = [
    (nn.BatchNorm1d, (6,), {}, (4, 6)),
    (nn.BatchNorm1d, (6,), {"eps": 1e-2, "momentum": None}, (4, 6, 5)),
    (nn.BatchNorm2d, (6,), {}, IMAGE),
    (nn.BatchNorm2d, (6,), {"affine": False}, IMAGE),
    (nn.BatchNorm2d, (6,), {"track_running_stats": False}, IMAGE),
    (nn.BatchNorm3d, (6,), {"momentum": 0.7}, (4, 6, 5, 3, 2)),
    (nn.InstanceNorm1d, (6,), {"affine": True}, (4, 6, 5)),
    (nn.InstanceNorm2d, (6,), {}, IMAGE),
    (nn.InstanceNorm2d, (6,), {"affine": True, "track_running_stats": True}, IMAGE),
    (nn.InstanceNorm3d, (6,), {}, (4, 6, 5, 3, 2)),
    (nn.LayerNorm, (6,), {}, WORDS),
    (nn.LayerNorm, ((5, 6),), {"elementwise_affine": False}, WORDS),
    (nn.LayerNorm, (6,), {"bias": False, "eps": 1e-12}, WORDS),
    (nn.GroupNorm, (3, 6), {}, IMAGE),
    (nn.GroupNorm, (6, 6), {"affine": False}, (4, 6, 7)),
    (nn.RMSNorm, (6,), {}, WORDS),
    (nn.RMSNorm, ((5, 6),), {"eps": 1e-3, "elementwise_affine": False}, WORDS),
]
CASES = [pytest.param(*case, id=f"{case[0].__name__}{case[1]}{case[2]}") for case in NORMS]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(norm: nn.Module) -> Any:
    """Parameters and running statistics that hide nothing."""
    with torch.no_grad():
        for seed, tensor in enumerate([*norm.parameters(), *norm.buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(seeded(*tensor.shape, seed=10 + seed).abs() + 0.5)
    return norm


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        filled(nn.BatchNorm2d(6)),
        nn.ReLU(),
        filled(nn.GroupNorm(2, 6)),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(6 * 9, 8),
        filled(nn.LayerNorm(8)),
    )


def ours(module: nn.Module) -> bool:
    return any(cls.__module__.startswith("normscope.nn.") for cls in type(module).__mro__)


X = seeded(4, 3, 5, 5)


def same_state(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


# -- what it computes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "args", "kwargs", "shape"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_norm_computes_the_same(
    cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    norm = filled(cls(*args, **kwargs)).to(dtype)
    x = (2 + seeded(*shape)).to(dtype)
    faster, report = accelerate(norm, x)
    assert type(faster) is getattr(own, cls.__name__)
    assert report.done[0].after == f"normscope.nn.{cls.__name__}"
    assert [one.mode for one in report.agreements] == ["eval", "train"]
    assert same_state(faster, norm)
    for mode in (True, False, True):
        # both round a dozen times: sums of at most 80 terms, three products; outputs are below 20
        tolerance = 20 * 16 * torch.finfo(dtype).eps
        assert torch.allclose(faster.train(mode)(x), norm.train(mode)(x), rtol=0, atol=tolerance)
    for key, value in norm.state_dict().items():
        # running statistics are of the size of mean and variance here, at most 10
        assert torch.allclose(faster.state_dict()[key].double(), value.double(), rtol=0, atol=10 * tolerance)
        assert faster.state_dict()[key].dtype == value.dtype


@pytest.mark.parametrize(("cls", "args", "kwargs", "shape"), CASES)
def test_gradients_are_the_same(
    cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
) -> None:
    norm = filled(cls(*args, **kwargs)).double()
    faster, _ = accelerate(norm)
    gradients = []
    for module in (norm, faster):
        x = (2 + seeded(*shape)).double().requires_grad_()
        (module(x) * seeded(*shape, seed=1)).sum().backward()
        gradients.append([x.grad, *(p.grad for p in module.parameters())])
    for one, other in zip(*gradients, strict=True):
        # float64, sums of at most 360 terms below 100
        torch.testing.assert_close(one, other, rtol=0, atol=360 * 100 * 2.0**-52)


def test_the_model_given_is_not_touched() -> None:
    model = net()
    before = {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    rng = torch.get_rng_state()
    faster, _ = accelerate(model, X)
    assert {name: (type(m), dict(vars(m))) for name, m in model.named_modules()} == before
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in (*faster.parameters(), *model.parameters()))
    assert {name for name, m in faster.named_modules() if ours(m)} == {"1", "3", "7"}
    assert not {p.data_ptr() for p in faster.parameters()} & {p.data_ptr() for p in model.parameters()}


def test_verification_leaves_the_result_as_copied() -> None:
    model = net().train()
    faster, _ = accelerate(model, X)
    assert same_state(faster, model)
    assert int(faster[1].num_batches_tracked) == int(model[1].num_batches_tracked)
    assert all(m.training for m in faster.modules())


# -- what stays --------------------------------------------------------------------------------------------------------


def test_inplace_keeps_every_object_and_the_optimizer_goes_on() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(X).square().mean().backward()
    optimizer.step()
    modules = [id(m) for m in model.modules()]
    tensors = [id(t) for t in (*model.parameters(), *model.buffers())]
    result, _ = accelerate(model, X, inplace=True)
    assert result is model
    assert [id(m) for m in model.modules()] == modules
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == tensors
    assert ours(model[1])
    before = model[7].weight.clone()
    optimizer.zero_grad()
    model(X).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model[7].weight, before)


@pytest.mark.parametrize("inplace", [True, False])
def test_hooks_of_every_kind_stay(inplace: bool) -> None:
    norm = nn.LayerNorm(6)
    seen: list[str] = []

    def note(word: str) -> Any:
        def hook(*args: Any, **kwargs: Any) -> None:
            seen.append(word)

        return hook

    norm.register_forward_pre_hook(note("pre"))
    norm.register_forward_pre_hook(note("pre with kwargs"), with_kwargs=True)
    handle = norm.register_forward_hook(note("forward"))
    norm.register_forward_hook(note("always"), always_call=True)
    norm.register_full_backward_pre_hook(note("backward pre"))
    norm.register_full_backward_hook(note("backward"))
    norm.register_state_dict_pre_hook(note("state dict pre"))
    norm.register_state_dict_post_hook(note("state dict"))
    norm.register_load_state_dict_pre_hook(note("load pre"))
    norm.register_load_state_dict_post_hook(note("load"))
    norm.weight.register_hook(note("weight"))
    model = nn.Sequential(nn.Linear(6, 6), norm)

    def exercise(model: nn.Module) -> list[str]:
        seen.clear()
        model(seeded(2, 6)).sum().backward()
        model.load_state_dict(model.state_dict())
        return list(seen)

    expected = exercise(model)
    assert len(expected) >= 11
    faster, _ = accelerate(model, seeded(2, 6), inplace=inplace)
    # copying a model drops hooks of its tensors, with and without this transform
    assert exercise(faster) == [word for word in expected if inplace or word != "weight"]
    if inplace:
        handle.remove()
        assert exercise(faster) == [word for word in expected if word != "forward"]


def test_flags_attributes_and_layouts_stay() -> None:
    model = net().to(memory_format=torch.channels_last).eval()
    model[3].train()
    model[7].weight.requires_grad_(False)
    model[1].label, model[1].history = "stem", [1, 2]
    model[1].momentum = 0.01
    model[3].register_buffer("extra", torch.ones(2), persistent=False)
    faster, _ = accelerate(model)
    assert [m.training for m in faster.modules()] == [m.training for m in model.modules()]
    assert [p.requires_grad for p in faster.parameters()] == [p.requires_grad for p in model.parameters()]
    assert [p.stride() for p in faster.parameters()] == [p.stride() for p in model.parameters()]
    assert (faster[1].label, faster[1].history, faster[1].momentum) == ("stem", [1, 2], 0.01)
    assert torch.equal(faster[3].extra, torch.ones(2))
    assert "3.extra" not in faster.state_dict()
    assert all(a.training == b.training for a, b in zip(model.modules(), faster.modules(), strict=True))


def test_half_statistics_stay_half_when_they_were() -> None:
    model = nn.Sequential(filled(nn.BatchNorm1d(6))).bfloat16()
    faster, _ = accelerate(model)
    assert faster[0].running_var.dtype == torch.bfloat16
    assert faster.half()[0].running_var.dtype == torch.float16
    kept, _ = accelerate(nn.BatchNorm1d(6))
    assert kept.half().running_var.dtype == torch.float32


def test_half_statistics_are_told_and_the_advice_holds() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.LayerNorm(6)).bfloat16()
    for sample in (None, seeded(4, 6).bfloat16()):
        faster, report = accelerate(model, sample)
        assert report.notes[-1] == (
            "2 sites keep running statistics in a half type, as the model had them, where updates may stall. To make "
            "them float32, set float32_statistics = True on each such layer and then call its "
            ".to(layer.running_mean.dtype); or accelerate the model before it is cast"
        )
    layer = faster[0]
    layer.float32_statistics = True
    layer.to(layer.running_mean.dtype)
    assert (layer.running_mean.dtype, layer.running_var.dtype) == (torch.float32, torch.float32)
    assert layer.weight.dtype == torch.bfloat16
    assert accelerate(model[0])[1].notes[-1].startswith("1 site keeps running statistics")
    assert "running" not in str(accelerate(nn.BatchNorm1d(6))[1])


def test_state_dicts_go_both_ways() -> None:
    model = net()
    faster, _ = accelerate(model)
    fresh = net()
    fresh.load_state_dict(faster.state_dict())
    faster.load_state_dict(model.state_dict(), strict=True)
    assert same_state(fresh, model)
    assert faster.state_dict()._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]


def test_a_shared_module_is_one_module_in_all_places() -> None:
    norm = filled(nn.LayerNorm(6))
    model = nn.ModuleDict({"a": nn.Sequential(norm), "b": nn.Sequential(nn.Linear(6, 6), norm)})
    faster, report = accelerate(model)
    assert faster["a"][0] is faster["b"][1]
    assert faster["a"][0] is not norm
    (site,) = report.sites
    assert (site.name, site.aliases) == ("a.0", ("b.1",))
    assert "a.0 = b.1" in str(report)


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6))
    model[1].weight = model[0].weight
    faster, _ = accelerate(model)
    assert faster[0].weight is faster[1].weight


def test_a_parametrized_weight_stays_parametrized() -> None:
    norm = filled(nn.LayerNorm(6))
    parametrize.register_parametrization(norm, "weight", nn.Softplus())
    x = seeded(*WORDS)
    faster, report = accelerate(norm, x)
    assert report.done
    assert list(faster.state_dict()) == list(norm.state_dict())
    assert isinstance(faster, own.LayerNorm)
    assert parametrize.is_parametrized(faster, "weight")
    torch.testing.assert_close(faster(x), norm(x), rtol=0, atol=1e-5)
    with torch.no_grad():
        faster.parametrizations.weight.original.add_(1)
    assert not torch.allclose(faster(x), norm(x))
    expected = faster(x)
    assert torch.equal(copy.deepcopy(faster)(x), expected)
    parametrize.remove_parametrizations(faster, "weight")
    assert type(faster) is own.LayerNorm
    assert torch.equal(faster(x), expected)
    assert parametrize.is_parametrized(norm, "weight")
    norm(x)


def test_weights_recomputed_by_a_hook_stay_so() -> None:
    norm = nn.utils.spectral_norm(nn.Linear(6, 6))
    model = nn.Sequential(norm, filled(nn.RMSNorm(6)))
    faster, report = accelerate(model, seeded(4, 6))
    assert [site.name for site in report.done] == ["1"]
    torch.testing.assert_close(faster.eval()(seeded(4, 6)), model.eval()(seeded(4, 6)), rtol=0, atol=1e-5)


# -- subclasses --------------------------------------------------------------------------------------------------------


class Sticky(nn.BatchNorm2d):
    """Stays in eval mode; computes nothing of its own."""

    def train(self, mode: bool = True) -> Sticky:
        return super().train(False)

    def share(self) -> float:
        return float(self.running_var.mean())


class Doubled(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Slotted(nn.LayerNorm):
    __slots__ = ("note",)


class Guarded(nn.LayerNorm):
    def __init_subclass__(cls) -> None:
        raise TypeError("no more subclasses")


def test_a_subclass_that_computes_the_same_keeps_its_methods() -> None:
    model = nn.Sequential(filled(Sticky(6)))
    faster, report = accelerate(model, seeded(*IMAGE))
    assert report.done[0].before.endswith("Sticky")
    norm = faster[0]
    assert isinstance(norm, Sticky)
    assert isinstance(norm, own.BatchNorm2d)
    assert type(norm).forward is own.BatchNorm2d.forward
    faster.train()
    assert not norm.training
    assert norm.share() == model[0].share()
    for again in (pickle.loads(pickle.dumps(faster)), copy.deepcopy(faster), saved(faster)):
        assert type(again[0]) is type(norm)
        assert torch.equal(again(seeded(*IMAGE)), faster(seeded(*IMAGE)))


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def left(model: nn.Module, sample: Any = None) -> str:
    before = {id(m): type(m) for m in model.modules()}
    _, report = accelerate(model, sample, inplace=True)
    assert {id(m): type(m) for m in model.modules()} == before
    assert not report.done
    (reason,) = {site.reason for site in report.left}
    return reason


def test_a_subclass_with_a_forward_of_its_own_is_left() -> None:
    assert left(nn.Sequential(Doubled(6)), seeded(*WORDS)) == (
        f"{__name__}.Doubled inherits from torch.nn.LayerNorm but overrides forward, so it may compute something else. "
        "normscope.check finds what it calls inside; or say what it computes with normscope.NormSpec(...)."
    )


def test_an_object_with_a_forward_of_its_own_is_left() -> None:
    norm = nn.LayerNorm(6)
    norm.forward = lambda x: x  # type: ignore[method-assign]
    assert "has a forward put on it" in left(norm)


def test_slots_stay() -> None:
    norm = Slotted(6)
    norm.note = "mine"
    faster, report = accelerate(norm, seeded(*WORDS), inplace=True)
    assert report.done
    assert faster is norm
    assert norm.note == "mine"
    assert isinstance(norm, own.LayerNorm)


def test_a_class_that_cannot_be_joined_is_left() -> None:
    assert left(Guarded(6)) == "its class cannot be joined with normscope.nn.LayerNorm (no more subclasses)"


# -- what is no module -------------------------------------------------------------------------------------------------


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Everywhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mine, self.twice = nn.LayerNorm(6), Written(), Doubled(6)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.layer_norm(self.mine(self.norm(x)), (6,))
        x = nn.functional.normalize(x, dim=-1)
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()
        x = functional.group_norm(x, 5)
        out: Tensor = self.twice(x)
        return out


HAND_WRITTEN = (
    "is written by hand, and only layers that can be read are changed: write a layer of torch.nn in its place; for "
    "fold, freeze and recalibrate a method __normscope__ that says what it computes is enough"
)
INLINED = (
    "is written by hand inside a larger forward, and only layers that can be read are changed: write a layer of "
    "torch.nn in its place"
)


def test_what_is_no_module_is_listed_as_left() -> None:
    model = Everywhere()
    _, report = accelerate(nn.Sequential(model), seeded(*WORDS))
    assert [(site.name, site.before, site.reason, site.already) for site in report.left[1:]] == [
        ("0.mine", f"{__name__}.Written", HAND_WRITTEN, False),
        (
            "0:F.layer_norm",
            "F.layer_norm",
            "a call of F.layer_norm, not a module: write normscope.functional.layer_norm, or a normscope.nn layer",
            False,
        ),
        (
            "0:F.normalize",
            "F.normalize",
            "a call of F.normalize, not a module: write normscope.functional.l2_norm, or a normscope.nn layer",
            False,
        ),
        ("0:hand-written", "arithmetic", INLINED, False),
        (
            "0:normscope.functional.group_norm",
            "normscope.functional.group_norm",
            "is a call of normscope.functional already",
            True,
        ),
    ]
    assert report.left[0].name == "0.twice"  # and the F.layer_norm inside is its own
    assert [site.name for site in report.done] == ["0.norm"]
    words = str(report)
    assert words.startswith("accelerate: 1 of 6 normalizations done, 1 more is normscope's already\n")
    assert f"  left  {__name__}.Written: 0.mine: {HAND_WRITTEN}" in words.splitlines()


def test_a_model_that_is_a_hand_written_norm() -> None:
    _, report = accelerate(Written(), seeded(*WORDS))
    assert str(report).splitlines()[:2] == [
        "accelerate: 0 of 1 normalizations done",
        f"  left  {__name__}.Written: the model itself: {HAND_WRITTEN}",
    ]
    _, report = accelerate(Written())
    assert report.sites == ()


def test_norms_in_exported_programs_are_left() -> None:
    program = torch.export.export(net().eval(), (X,)).module()
    assert left(program, X) == (
        "runs inside a scripted, traced or exported module: accelerate the model it was made from; torch.export keeps "
        "layers of normscope.nn, torch.jit runs torch's code in their place"
    )


def test_a_model_that_cannot_be_followed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*args: Any) -> Any:
        raise RuntimeError("lost")

    monkeypatch.setattr("normscope.transforms.elsewhere.find_sites", find)
    _, report = accelerate(net(), X)
    assert len(report.done) == 3
    assert report.notes == (
        "calls of functions and hand-written norms were not looked for: RuntimeError: lost",
    )


# -- what is no plain module -------------------------------------------------------------------------------------------


def test_sync_batch_norm_is_left() -> None:
    reason = left(nn.Sequential(nn.SyncBatchNorm(6)))
    assert reason == "takes its statistics over all ranks: convert(model, 'ours') makes it normscope.nn's"


def test_a_lazy_norm_is_left_until_it_has_seen_an_input() -> None:
    model = nn.Sequential(nn.LazyBatchNorm2d())
    assert "has not seen an input yet" in left(model)
    model(seeded(*IMAGE))
    faster, _ = accelerate(model, seeded(*IMAGE))
    assert type(faster[0]) is own.BatchNorm2d


def test_a_quantized_norm_is_left() -> None:
    from torch.ao.nn import quantized

    assert "overrides forward" in left(nn.Sequential(quantized.BatchNorm2d(6)))


def test_scripted_norms_are_left() -> None:
    model = torch.jit.script(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)))
    assert left(model) == SCRIPTED


SCRIPTED = (
    "is scripted or traced, and torch.jit runs torch's code in place of normscope.nn's: accelerate the model it was "
    "made from, and run that, or what torch.compile or torch.export makes of it"
)


def test_traced_norms_are_left_and_the_advice_holds() -> None:
    norm, x = filled(nn.LayerNorm(6)), seeded(*WORDS)
    assert left(nn.Sequential(torch.jit.trace(norm, x)), x) == SCRIPTED
    faster, _ = accelerate(norm, x)
    for made in (torch.jit.trace(faster, x), torch.jit.script(faster)):
        assert "aten::layer_norm" in str(made.inlined_graph)
        assert torch.equal(made(x), norm(x))
    assert ("ops.normscope." in str(torch.export.export(faster, (x,)))) == bool(status().isa)


def test_a_frozen_batch_norm_is_left() -> None:
    class FrozenBatchNorm2d(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eps = 1e-5
            for name in ("weight", "bias", "running_mean", "running_var"):
                self.register_buffer(name, torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return x

    assert left(FrozenBatchNorm2d()).startswith("normscope.nn has no counterpart of ")


def test_tensor_subclasses_are_left() -> None:
    class Special(Tensor):
        pass

    norm = nn.LayerNorm(6)
    norm.weight = nn.Parameter(torch.ones(6).as_subclass(Special))
    assert left(norm) == "its weight is a Special, which the kernels do not take apart"


def test_what_is_accelerated_already_is_left() -> None:
    faster, _ = accelerate(net())
    assert left(faster, X) == "is a layer of normscope.nn already"


def test_a_graph_module() -> None:
    model = torch.fx.symbolic_trace(net().eval())
    faster, report = accelerate(model, X)
    assert [site.name for site in report.done] == ["1", "3", "7"]
    assert isinstance(faster, torch.fx.GraphModule)
    torch.testing.assert_close(faster(X), model(X), rtol=0, atol=1e-5)


def test_a_data_parallel_model() -> None:
    model = nn.DataParallel(net().eval())
    faster, report = accelerate(model, X)
    assert isinstance(faster, nn.DataParallel)
    assert [site.name for site in report.done] == ["1", "3", "7"]
    torch.testing.assert_close(faster(X), model(X), rtol=0, atol=1e-5)
    assert list(faster.state_dict()) == list(model.state_dict())


DISTRIBUTED = """
import copy, sys, torch
from torch import nn
import normscope.nn as own
from normscope.transforms import accelerate

torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6)))
x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
plain = copy.deepcopy(model.module)
plain(x).square().sum().backward()
result, report = accelerate(model, x, inplace=True)
assert result is model and type(model.module[1]) is own.BatchNorm1d
model(x).square().sum().backward()
for one, other in zip(model.module.parameters(), plain.parameters()):
    torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-4)  # by 1 / sqrt(eps) where the loss is constant
print([site.name for site in report.done], list(model.state_dict())[0], flush=True)
import os; os._exit(0)  # taking gloo down may wait
"""


def test_a_distributed_model_keeps_its_wrapper(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DISTRIBUTED, str(tmp_path / "meeting")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip() == "['1'] module.0.weight", done.stderr


@pytest.mark.parametrize("inplace", [True, False])
def test_a_compiled_model(inplace: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(net().eval(), backend="eager", fullgraph=True)
    expected = compiled(X)
    faster, report = accelerate(compiled, X, inplace=inplace)
    assert [site.name for site in report.done] == ["1", "3", "7"]
    assert type(faster) is type(compiled)
    assert (faster is compiled) == inplace
    assert ours(faster._orig_mod[1])  # type: ignore[attr-defined]
    torch.testing.assert_close(faster(X), expected, rtol=0, atol=1e-5)
    torch.compiler.reset()


def test_a_compiled_part_has_the_name_that_the_user_wrote() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), net().eval())
    model[1] = torch.compile(model[1], backend="eager")
    _, report = accelerate(model, X)
    assert [site.name for site in report.done] == ["1.1", "1.3", "1.7"]


def test_a_model_without_norms() -> None:
    model = nn.Linear(3, 2)
    _, report = accelerate(model, seeded(4, 3))
    assert report.sites == ()
    assert str(report).splitlines()[0] == "accelerate: no normalization was found"


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = net()
    faster, report = accelerate(model)
    assert len(report.done) == 3
    assert faster[1].weight.is_meta
    with pytest.raises(Refused) as error:
        accelerate(model, X)
    assert str(error.value) == (
        "0.weight is on the meta device: it has a shape but no values, so no outputs can be compared. Load the weights "
        "(model.to_empty(device=...), then load_state_dict) and accelerate then, or leave the sample out"
    )


@pytest.mark.parametrize("sample", [None, X], ids=["no sample", "sample"])
def test_a_lazy_model_is_refused_where_it_must_be_copied(sample: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.LazyBatchNorm2d())
    with pytest.raises(Refused) as error:
        accelerate(model, sample)
    assert str(error.value) == (
        "1.weight is lazy: it gets its shape in the first forward pass, and torch cannot copy it before. Run the model "
        "once on a batch, then accelerate it"
    )
    model(X)
    assert len(accelerate(model, sample)[1].done) == 1


# -- verification ------------------------------------------------------------------------------------------------------


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = filled(nn.LayerNorm(6))

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Any]:
        out = self.norm(x if y is None else x + y)
        return {"sum": out, "best": out.argmax(-1), "all": [out, (out.mean(),)]}


@pytest.mark.parametrize(
    "sample",
    [seeded(*WORDS), (seeded(*WORDS), seeded(*WORDS)), {"x": seeded(*WORDS), "y": seeded(*WORDS)}],
    ids=["tensor", "tuple", "dict"],
)
def test_samples_of_every_kind(sample: Any) -> None:
    _, report = accelerate(Sum(), sample)
    assert [(one.mode, one.dtype) for one in report.agreements] == [("eval", "float32"), ("train", "float32")]
    for one in report.agreements:
        assert one.allowed == 1e-5
        assert one.error_before is not None
        assert one.error_after is not None
        assert 0 < one.error_after < 1e-6
        assert one.difference < 1e-6


def test_a_norm_at_a_large_mean_gets_better_and_passes() -> None:
    x = 1e4 + seeded(*IMAGE)
    _, report = accelerate(nn.Sequential(nn.GroupNorm(3, 6)), x)
    one = report.agreements[0]
    assert one.error_before is not None
    assert one.error_after is not None
    assert one.error_after < 1e-6 < one.error_before


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = own.GroupNorm.forward
    monkeypatch.setattr(own.GroupNorm, "forward", lambda self, x: forward(self, x) * 1.01)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("inplace", [True, False])
def test_a_deviation_names_the_first_site_and_changes_nothing(inplace: bool) -> None:
    model = net()
    state, types = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(Deviation) as error:
        accelerate(model, X, inplace=inplace)
    assert error.value.site == "3"
    words = str(error.value)
    assert words.startswith("3: the first module whose output deviates. In eval the outputs would be ")
    assert "of the largest away from a float64 copy of the model (" in words
    assert words.endswith(
        "e-07 before), and float32 allows 1.0e-05. Nothing was changed. Where the model amplifies roundings, compare "
        "it in float64; else please report this module, its settings and the scale of its input."
    )
    assert [type(m) for m in model.modules()] == types
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.usefixtures("broken")
def test_a_rehearsal_finds_a_deviation_too() -> None:
    with pytest.raises(Deviation):
        accelerate(net(), X, dry_run=True)


def test_a_rehearsal_changes_nothing() -> None:
    model = net()
    same, report = accelerate(model, X, dry_run=True, inplace=True)
    assert same is model
    assert not any(ours(m) for m in model.modules())
    assert len(report.done) == 3
    assert len(report.agreements) == 2
    assert str(report).splitlines()[0] == (
        "accelerate: 3 of 3 normalizations would be done (rehearsed, the model is as it was)"
    )
    same, report = accelerate(model, dry_run=True)
    assert same is model
    assert report.agreements == ()
    assert report.notes == (
        "outputs were not compared: no sample was given",
        "calls of functions and hand-written norms were not looked for: they show only where a sample is given",
    )


def test_a_single_sample_is_compared_in_eval_alone() -> None:
    _, report = accelerate(nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6)), seeded(1, 3))
    assert [one.mode for one in report.agreements] == ["eval"]
    (note,) = report.notes
    assert note.startswith(
        "train: the model does not run (ValueError: Expected more than 1 value per channel"
    )


def test_a_model_that_cannot_run_in_float64_is_compared_with_itself() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x).float())

    _, report = accelerate(Fixed(), seeded(*WORDS))
    assert [one.error_after for one in report.agreements] == [None, None]
    assert [one.deviation < 1e-6 for one in report.agreements] == [True, True]
    assert report.notes[0].startswith(
        "eval: no float64 reference, the copy in float64 does not run (RuntimeError"
    )


def test_an_output_without_numbers_is_told() -> None:
    class Classes(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(-1)

    _, report = accelerate(Classes(nn.LayerNorm(6)), seeded(*WORDS))
    assert report.agreements == ()
    assert report.notes[0] == "eval: the model returns no floating point tensor, so nothing was compared"


def test_a_sample_that_does_not_fit() -> None:
    with pytest.raises(ModelError, match="the model fails on the sample: RuntimeError: "):
        accelerate(net(), seeded(2, 5))
    with pytest.raises(BadInput, match="holds 1 NaN of 3 values"):
        accelerate(net(), torch.tensor([1.0, float("nan"), 2.0]))


def test_what_is_no_model() -> None:
    with pytest.raises(BadInput, match=r"model must be a torch.nn.Module, got int; pass the module itself"):
        accelerate(3)  # type: ignore[type-var]


def test_a_model_that_cannot_be_copied() -> None:
    model = net()
    model[0].result = model[0].weight * 2  # part of a graph
    words = (
        "Sequential cannot be copied (RuntimeError: Only Tensors created explicitly by the user (graph leaves) support "
        "the deepcopy protoc...); {} to change the model itself"
    )
    with pytest.raises(BadInput) as error:
        accelerate(model, X, inplace=True)
    assert str(error.value) == words.format(
        "leave the sample out, so that nothing is compared, and pass inplace=True"
    )
    with pytest.raises(BadInput) as error:
        accelerate(model)
    assert str(error.value) == words.format("pass inplace=True")
    assert not ours(model[1])
    assert accelerate(model, inplace=True)[0] is model
    assert ours(model[1])


class Viewed(nn.Module):
    """Relies on contiguous memory behind an instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.GroupNorm(3, 6), nn.InstanceNorm2d(6), nn.LayerNorm(90)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).view(4, -1))


FAILS = (
    "the accelerated model fails where the original runs: RuntimeError: {}. Nothing was changed. Instance norm of "
    "normscope.nn keeps the memory format of its input, where torch's returns contiguous memory: a .view behind it may "
    "need to be .reshape"
)


@pytest.mark.parametrize("inplace", [True, False])
def test_a_model_that_fails_afterwards_names_the_first_suspect(inplace: bool) -> None:
    model, x = Viewed(), seeded(*IMAGE).to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError) as original:
        model.last(model.first(x).view(4, -1))
    with pytest.raises(Deviation) as error:
        accelerate(model, x, inplace=inplace)
    said = FAILS.format(str(original.value).rstrip("."))
    assert str(error.value) == f"norm: the first suspect. In eval {said}"
    assert error.value.site == "norm"
    assert isinstance(error.value.__cause__, RuntimeError)
    assert not any(ours(m) for m in model.modules())
    assert accelerate(model, x.contiguous())[1].done


def test_a_norm_that_fails_itself_is_the_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: nn.Module, x: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("no kernel")
        return x

    model = nn.Sequential(nn.LayerNorm(6), nn.Sequential(nn.BatchNorm1d(6)))
    monkeypatch.setattr(own.BatchNorm1d, "forward", broken)
    with pytest.raises(Deviation) as error:
        accelerate(model, seeded(4, 6))
    # untrained statistics: the identity but for eps, half of 1e-5, so eval passes
    assert str(error.value) == f"1.0: the first suspect. In train {FAILS.format('no kernel')}"


def test_a_failure_of_no_known_place() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            if ours(self.unused):
                raise RuntimeError("not this one")
            return x

    with pytest.raises(Deviation) as error:
        accelerate(Picky(), seeded(*WORDS))
    assert str(error.value) == f"In eval {FAILS.format('not this one')}"
    assert error.value.site is None


class Then(nn.Module):
    def __init__(self, then: Any) -> None:
        super().__init__()
        self.norm, self.then = nn.LayerNorm(6), then

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.then(self.norm(x))
        return out


def test_a_comparison_that_cannot_tell_says_so() -> None:
    x = 1 + 3 * seeded(64, 6)
    _, report = accelerate(Then(lambda t: (1e6 * t).sin()), x)  # all digits of the angle are lost
    for one, note in zip(report.agreements, report.notes, strict=True):
        assert one.error_before is not None
        assert one.allowed == 2 * one.error_before > 1e-2
        assert note == (
            f"{one.mode}: cannot tell, the original itself is {one.error_before:.1e} of the largest output away from "
            f"float64, so anything within {one.allowed:.1e} passes; compare the model in float64, or on a sample of "
            "another scale"
        )
        assert f"  {note}" in str(report).splitlines()
    _, report = accelerate(Then(lambda t: t), x)
    assert report.notes == ()


def test_outputs_that_agree_where_the_original_is_inexact_are_told_apart() -> None:
    def rough(t: Tensor) -> Tensor:
        """Far from what float64 gives, and the same whatever comes in."""
        return torch.full_like(t, 1.0 if t.dtype == torch.float32 else 1.1)

    _, report = accelerate(Then(rough), seeded(*WORDS))
    assert report.agreements[0].allowed > 1e-2
    assert report.agreements[0].difference == 0
    assert report.notes == ()


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (lambda t: 0 * t, "zero"),
        (lambda t: t / 0, "not finite"),
        (lambda t: torch.where(t > 0, t / 0, 0 * t), "zero or not finite"),
        (lambda t: t[:0], "empty"),
    ],
)
def test_outputs_that_say_nothing_are_told(then: Any, words: str) -> None:
    _, report = accelerate(Then(then), seeded(*WORDS))
    assert report.notes == tuple(
        f"{mode}: cannot tell, every output of the original is {words}; give a sample and weights that come to "
        "something"
        for mode in ("eval", "train")
    )


def test_outputs_that_are_partly_infinite_are_counted() -> None:
    _, report = accelerate(Then(lambda t: torch.where(torch.arange(6) == 2, t / 0, t)), seeded(*WORDS))
    assert report.notes[0] == "eval: 20 of 120 output values are not finite and say little"


def test_bfloat16_models_are_allowed_four_units() -> None:
    _, report = accelerate(net().bfloat16(), X.bfloat16())
    for one in report.agreements:
        assert one.dtype == "bfloat16"
        assert one.allowed >= 4 * 2.0**-7
        assert one.deviation <= one.allowed


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_report_in_words_and_in_json() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.SyncBatchNorm(3), nn.GroupNorm(1, 3))
    _, report = accelerate(model.eval(), X)
    lines = str(report).splitlines()
    assert lines[:4] == [
        "accelerate: 3 of 4 normalizations done",
        "  done  torch.nn.BatchNorm2d -> normscope.nn.BatchNorm2d: 0, 1",
        "  done  torch.nn.GroupNorm -> normscope.nn.GroupNorm: 3",
        "  left  torch.nn.SyncBatchNorm: 2: takes its statistics over all ranks: convert(model, 'ours') makes it "
        "normscope.nn's",
    ]
    assert lines[4].startswith("  eval  float32: outputs moved by ")
    assert lines[4].endswith("; allowed 1.0e-05")
    document = json.loads(report.to_json())
    assert document["transform"] == "accelerate"
    assert [(s["name"], s["done"]) for s in document["sites"]] == [
        ("0", True),
        ("1", True),
        ("2", False),
        ("3", True),
    ]
    assert document["agreements"][0]["mode"] == "eval"
    assert isinstance(report, TransformReport)


def test_long_lists_are_counted_but_not_in_a_plan() -> None:
    model = nn.Sequential(*(nn.LayerNorm(3) for _ in range(7)), Doubled(3))
    _, report = accelerate(model)
    assert (
        "  done  torch.nn.LayerNorm -> normscope.nn.LayerNorm: 0, 1, 2, 3 and 3 more"
        in str(report).splitlines()
    )
    _, plan = accelerate(model, dry_run=True)
    lines = str(plan).splitlines()
    assert lines[:2] == [
        "accelerate: 7 of 8 normalizations would be done (rehearsed, the model is as it was)",
        "  would be done  torch.nn.LayerNorm -> normscope.nn.LayerNorm: 0, 1, 2, 3, 4, 5, 6",
    ]
    assert lines[2].startswith(f"  would be left  {__name__}.Doubled: 7: ")


def test_what_is_accelerated_already_is_no_failure() -> None:
    faster, _ = accelerate(nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6)))
    _, report = accelerate(faster)
    assert str(report).splitlines()[:2] == [
        "accelerate: nothing to do, all 2 normalizations are normscope's already",
        "  left  normscope.nn.LayerNorm: 0, 1: is a layer of normscope.nn already",
    ]
    _, report = accelerate(faster[0])
    assert str(report).startswith("accelerate: nothing to do, the one normalization is normscope's already\n")
    _, report = accelerate(nn.Sequential(faster, nn.GroupNorm(2, 6), nn.SyncBatchNorm(6)))
    assert str(report).startswith("accelerate: 1 of 2 normalizations done, 2 more are normscope's already\n")
    assert [site["already"] for site in json.loads(report.to_json())["sites"]] == [True, True, False, False]


# -- transformers ------------------------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
}
TOKENS = {"input_ids": torch.arange(16).view(2, 8)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "convention", "norms"),
    [("Llama", "llama", 5), ("Qwen3", "llama", 9), ("Gemma2", "gemma", 9), ("Olmo2", "torch", 9)],
)
def test_language_models(family: str, convention: str, norms: int, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            filled(module)
    faster, report = accelerate(model, TOKENS)
    assert {site.after for site in report.sites} == {f"normscope.nn.RMSNorm({convention})"}
    assert len(report.done) == norms
    assert same_state(faster, model)
    assert all(one.error_after is not None for one in report.agreements)
    norm = next(m for m in faster.modules() if isinstance(m, own.RMSNorm))
    eps = getattr(norm, "variance_epsilon", norm.eps)  # what the user's code reads is still there
    assert norm.eps == eps == config.rms_norm_eps


def test_t5() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=50)
    model = transformers.T5EncoderModel(config)
    faster, report = accelerate(model, TOKENS)
    assert {site.after for site in report.sites} == {"normscope.nn.RMSNorm(t5)"}
    assert len(report.done) == 5
    assert same_state(faster, model)


@pytest.mark.parametrize("convention", ["llama", "t5", "gemma", "before"])
def test_replacements_round_as_the_originals_do(convention: str) -> None:
    """In every mixture of dtypes: the same dtype, and half types bit for bit but for one value in a hundred."""
    pytest.importorskip("transformers")
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    cls = {"llama": LlamaRMSNorm, "t5": T5LayerNorm, "gemma": GemmaRMSNorm, "before": Olmo2RMSNorm}[
        convention
    ]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for x_dtype in dtypes:
        for w_dtype in dtypes:
            norm = filled(cls(48)).to(w_dtype)
            faster, _ = accelerate(norm)
            x = seeded(16, 48).to(x_dtype)
            one, other = norm(x), faster(x)
            assert one.dtype == other.dtype, (x_dtype, w_dtype)
            unit = torch.finfo(one.dtype).eps
            torch.testing.assert_close(other, one, rtol=8 * unit if unit < 1e-6 else 2 * unit, atol=0)
            if one.dtype != torch.float32:
                assert float((one != other).double().mean()) <= 0.01


def test_written_norms_that_cannot_be_done_are_left() -> None:
    pytest.importorskip("transformers")
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    class Mine(LlamaRMSNorm):
        pass

    assert left(Gemma3nRMSNorm(6, with_scale=False)) == (
        "has no weight, so it does not know the size that normscope.nn.RMSNorm is made for"
    )
    assert "takes gate beside its input" in left(MambaRMSNormGated(6, 3))
    assert left(Mine(6)) == (
        "is a subclass of transformers.models.llama.modeling_llama.LlamaRMSNorm, whose forward comes before that of "
        "normscope.nn"
    )
    odd = LlamaRMSNorm(6)
    odd.eps = 0.5
    assert left(odd) == "has an attribute eps of its own, which normscope.nn.RMSNorm would read otherwise"
    assert left(LlamaRMSNorm(6, eps=0.0)).startswith("RMSNorm needs an eps above 0")
