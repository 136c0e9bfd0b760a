"""Every torch.nn normalization, in train and in eval: what is read computes what the module computes."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import normscope.nn
from normscope import reference
from normscope.reading import UnknownNormalization, read, spec_of
from normscope.spec import NormSpec, RunningState

torch.set_num_threads(1)

# Sums of at most 300 float64 terms about their mean: 300 ulp, times |y| <= sqrt(300), on either side.
TOLERANCE = 300 * 2.0**-52 * 300**0.5 * 2


def make(cls, *args, **kwargs):
    return pytest.param(cls, args, kwargs, id=f"{cls.__name__}{args}{kwargs}")


BATCH = [
    (nn.BatchNorm1d, (6, 3)),
    (nn.BatchNorm1d, (4, 3, 5)),
    (nn.BatchNorm2d, (4, 3, 5, 2)),
    (nn.BatchNorm3d, (2, 3, 5, 2, 3)),
    (nn.SyncBatchNorm, (4, 3, 5, 2)),
    (nn.LazyBatchNorm2d, (4, 3, 5, 2)),
]
INSTANCE = [
    (nn.InstanceNorm1d, (4, 3, 5)),
    (nn.InstanceNorm1d, (3, 5)),
    (nn.InstanceNorm2d, (4, 3, 5, 2)),
    (nn.InstanceNorm2d, (3, 5, 2)),
    (nn.InstanceNorm3d, (2, 3, 5, 2, 3)),
    (nn.InstanceNorm3d, (3, 5, 2, 3)),
    (nn.LazyInstanceNorm2d, (4, 3, 5, 2)),
]
STATEFUL = [
    {},
    {"affine": False},
    {"affine": True},
    {"affine": True, "bias": False},
    {"eps": 0.3, "momentum": 0.7, "affine": True, "track_running_stats": True},
    {"momentum": None, "track_running_stats": True},
    {"momentum": 0.0, "track_running_stats": True},
    {"momentum": 1.0, "track_running_stats": True},
    {"track_running_stats": False},
    {"track_running_stats": False, "momentum": None},
]
FLAGS = {
    "as built": lambda m: None,
    "flag off, buffers there": lambda m: setattr(m, "track_running_stats", False),
    "flag on, no buffers": lambda m: [setattr(m, name, None) for name in ("running_mean", "running_var")],
    "no counter": lambda m: setattr(m, "num_batches_tracked", None),
    "cumulative without counter": lambda m: [
        setattr(m, "num_batches_tracked", None),
        setattr(m, "momentum", None),
    ],
}
PLAIN = [
    (nn.LayerNorm(6), (6,)),
    (nn.LayerNorm(6, eps=0.2), (4, 6)),
    (nn.LayerNorm(6, bias=False), (2, 4, 6)),
    (nn.LayerNorm((5, 6), elementwise_affine=False), (2, 5, 6)),
    (nn.LayerNorm((3, 5, 6)), (2, 3, 5, 6)),
    (nn.LayerNorm((2, 3, 5, 6), eps=0.0), (2, 3, 5, 6)),
    (nn.GroupNorm(2, 6), (4, 6)),
    (nn.GroupNorm(1, 6, eps=0.1), (4, 6, 5)),
    (nn.GroupNorm(6, 6, affine=False), (4, 6, 5, 2)),
    (nn.GroupNorm(3, 6), (2, 6, 5, 2, 2)),
    (nn.RMSNorm(6), (4, 6)),
    (nn.RMSNorm(6, eps=0.1), (6,)),
    (nn.RMSNorm((5, 6), elementwise_affine=False, eps=1e-6), (2, 5, 6)),
]


def input_of(shape, seed=0):
    return 2 + 3 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def randomized(module):
    """In float64, with parameters and buffers that are all different."""
    generator = torch.Generator().manual_seed(1)
    module = module.double()
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5)
            else:
                tensor.fill_(3)
    return module


def array(reading, name):
    tensor = reading.tensors.get(name)
    return None if tensor is None else tensor.detach().numpy().copy()


def state_of(reading):
    mean = array(reading, "running_mean")
    counter = array(reading, "num_batches_tracked")
    return None if mean is None else RunningState(mean, array(reading, "running_var"), int(counter or 0))


def assert_read_right(module, shape, *, train):
    """Output, and stored statistics after the forward, against the reference of what was read."""
    module.train(train)
    x = input_of(shape)
    reading = read(module, input_ndim=x.dim())
    assert reading.mode_now == (reading.mode_train if train else reading.mode_eval)
    stored = state_of(reading)
    expected = reference.forward(
        x.numpy(),
        reading.spec,
        array(reading, "weight"),
        array(reading, "bias"),
        running=stored,
        training=reading.mode_now in ("batch", "input"),
    )
    output = module(x)
    np.testing.assert_allclose(output.detach().numpy(), expected, rtol=0, atol=TOLERANCE)
    after = state_of(read(module, input_ndim=x.dim()))
    moves = ("train" if train else "eval") in reading.updates
    assert stored is not None or not moves
    if stored is not None:
        moved = reference.update_running(stored, x.numpy(), reading.spec) if moves else stored
        np.testing.assert_allclose(after.mean, moved.mean, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(after.var, moved.var, rtol=0, atol=TOLERANCE)
    bound = reading.spec.bind(shape)
    for name, wanted in (
        ("weight", bound.weight_shape),
        ("bias", bound.bias_shape),
        ("running_mean", bound.running_shape),
    ):
        tensor = reading.tensors.get(name)
        assert (None if tensor is None else tuple(tensor.shape)) == wanted


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kwargs", STATEFUL, ids=str)
@pytest.mark.parametrize(("cls", "shape"), [*BATCH, *INSTANCE], ids=lambda v: getattr(v, "__name__", str(v)))
def test_module_with_state_computes_what_is_read(cls, shape, kwargs, flags, train):
    module = cls(**kwargs) if cls.__name__.startswith("Lazy") else cls(3, **kwargs)
    if cls.__name__.startswith("Lazy"):
        module(torch.zeros(shape).normal_())
    randomized(module)
    FLAGS[flags](module)
    instance = isinstance(module, nn.modules.instancenorm._InstanceNorm)
    if instance and module.track_running_stats and module.running_mean is None:
        with pytest.raises(UnknownNormalization) as error:
            read(module)
        assert str(error.value) == (
            f"torch.nn.{type(module).__name__} has track_running_stats=True but no running_mean, and raises in eval "
            f"mode. Set the flag to False."
        )
        with pytest.raises(RuntimeError, match="running_mean"):
            module.eval()(input_of(shape))
        return
    if (
        isinstance(module, nn.SyncBatchNorm)
        and module.track_running_stats
        and module.num_batches_tracked is None
        and train
    ):
        with pytest.raises(AssertionError):
            module.train()(input_of(shape))
        return
    assert_read_right(module, shape, train=train)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("module", "shape"), PLAIN, ids=str)
def test_module_without_state_computes_what_is_read(module, shape, train):
    module = randomized(copy.deepcopy(module))
    assert_read_right(module, shape, train=train)
    reading = read(module)
    assert (reading.mode_now, reading.mode_train, reading.mode_eval, reading.updates) == ("input",) * 3 + (
        (),
    )


def test_modes_of_batch_norm_case_by_case():
    def modes(**changes):
        module = nn.BatchNorm2d(3)
        for name, value in changes.items():
            setattr(module, name, value)
        reading = read(module)
        return reading.mode_train, reading.mode_eval, reading.updates

    none = {"running_mean": None, "running_var": None}
    assert modes() == ("batch", "running", ("train",))
    assert modes(track_running_stats=False) == ("batch", "running", ())
    assert modes(**none) == ("batch", "batch", ())
    assert modes(track_running_stats=False, **none) == ("batch", "batch", ())


def test_instance_norm_without_the_flag_moves_its_buffers_in_eval_too():
    module = nn.InstanceNorm2d(3, track_running_stats=True)
    module.track_running_stats = False
    reading = read(module)
    assert (reading.mode_train, reading.mode_eval, reading.updates) == ("batch", "batch", ("train", "eval"))


def test_reading_changes_nothing_and_copies_nothing():
    module = nn.BatchNorm2d(3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    reading = read(module)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert module.training
    assert all(reading.tensors[name] is getattr(module, name) for name in before)


def test_rank_is_part_of_what_is_read():
    assert spec_of(nn.BatchNorm1d(3)).ndim == (2, 3)
    assert spec_of(nn.BatchNorm2d(3)).ndim == (4, 4)
    assert spec_of(nn.InstanceNorm1d(3)).ndim == (3, 3)
    assert spec_of(nn.InstanceNorm1d(3), input_ndim=2).ndim == (2, 2)
    with pytest.raises(ValueError) as error:
        spec_of(nn.BatchNorm2d(3), input_ndim=3)
    assert str(error.value) == "torch.nn.BatchNorm2d takes an input of 4 axes, input_ndim is 3."
    with pytest.raises(ValueError) as error:
        spec_of(nn.LayerNorm((4, 5)), input_ndim=1)
    assert str(error.value) == "torch.nn.LayerNorm takes an input of at least 2 axes, input_ndim is 1."


def test_synchronization_is_read():
    assert read(nn.SyncBatchNorm(3)).synchronized
    assert not read(nn.BatchNorm2d(3)).synchronized


def test_subclass_that_computes_the_same_is_read():
    class Renamed(nn.BatchNorm2d):
        def _check_input_dim(self, input):
            pass

    class AnyRank(nn.modules.batchnorm._BatchNorm):
        def _check_input_dim(self, input):
            pass

    assert spec_of(Renamed(3)) == spec_of(nn.BatchNorm2d(3))
    assert read(Renamed(3)).type_name.endswith("Renamed")
    assert spec_of(AnyRank(3)) == spec_of(nn.SyncBatchNorm(3))


def test_parametrized_weight_is_read():
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    module = nn.LayerNorm(6)
    nn.utils.parametrize.register_parametrization(module, "weight", Twice())
    assert_read_right(module.double(), (4, 6), train=True)


def test_subclass_that_overrides_forward_is_unknown():
    class ChannelsFirst(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)

    with pytest.raises(UnknownNormalization) as error:
        spec_of(ChannelsFirst(3))
    name = f"{__name__}.{ChannelsFirst.__qualname__}"
    assert str(error.value) == (
        f"{name} inherits from torch.nn.LayerNorm but overrides forward, so it may compute something else. "
        f"normscope.check finds what it calls inside; or say what it computes with normscope.NormSpec(...)."
    )


@pytest.mark.parametrize(
    ("module", "method"),
    [
        (nn.RMSNorm(3), "forward"),
        (nn.LayerNorm(3), "_call_impl"),
        (nn.InstanceNorm1d(3), "_apply_instance_norm"),
        (normscope.nn.GhostBatchNorm1d(3, size=2), "_by_batch"),
    ],
)
def test_a_method_put_on_the_object_is_unknown(module, method):
    name = f"{'torch' if 'torch' in type(module).__module__ else 'normscope'}.nn.{type(module).__name__}"
    setattr(module, method, lambda *given: given[0])
    with pytest.raises(UnknownNormalization) as error:
        read(module)
    assert str(error.value) == (
        f"{name} has a {method} put on it that is not its class's, so it may compute something else. normscope.check "
        "finds what it calls inside; or say what it computes with normscope.NormSpec(...)."
    )


def test_a_call_put_on_the_object_is_not_what_python_calls():
    module, x = nn.LayerNorm(3), torch.randn(2, 3)
    module.__call__ = lambda x: 2 * x
    assert torch.equal(module(x), nn.LayerNorm(3)(x))
    assert spec_of(module) == spec_of(nn.LayerNorm(3))


def test_a_weight_norm_with_a_forward_put_on_it_is_unknown():
    module = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    assert spec_of(module, parameter="weight").scale == "l2"
    module.parametrizations.weight[0].forward = lambda g, v: v
    with pytest.raises(
        UnknownNormalization, match="is made by a _WeightNorm that has a forward put on it that is"
    ):
        spec_of(module, parameter="weight")


@pytest.mark.parametrize("cls", [nn.LocalResponseNorm, nn.CrossMapLRN2d])
def test_local_response_norm_is_excluded(cls):
    with pytest.raises(UnknownNormalization) as error:
        spec_of(cls(2))
    assert str(error.value) == (
        f"torch.nn.{cls.__name__} divides by a sum over a window of neighbouring channels, so no two elements share "
        f"one scale: it has no statistic sets and is outside the family. Leave it out, or treat it as an activation."
    )


def test_lazy_module_is_refused_until_it_has_seen_an_input():
    with pytest.raises(UnknownNormalization) as error:
        spec_of(nn.LazyBatchNorm1d())
    assert str(error.value) == (
        "torch.nn.LazyBatchNorm1d has not seen an input yet, so its parameters do not exist. Run one forward on a real "
        "batch first."
    )
    nothing_missing = nn.LazyBatchNorm2d(affine=False, track_running_stats=False)
    assert spec_of(nothing_missing) == spec_of(nn.BatchNorm2d(3, affine=False, track_running_stats=False))


def test_half_of_the_buffers_is_refused():
    module = nn.BatchNorm2d(3)
    module.running_var = None
    with pytest.raises(UnknownNormalization) as error:
        spec_of(module)
    assert str(error.value) == (
        "torch.nn.BatchNorm2d has running_mean but no running_var, and its forward raises. Set both, or both to None."
    )
    with pytest.raises(ValueError, match="both be None"):
        module(torch.zeros(2, 3, 4, 4))


def test_number_that_no_specification_can_hold_is_refused():
    with pytest.raises(UnknownNormalization) as error:
        spec_of(nn.BatchNorm2d(3, momentum=float("nan")))
    assert str(error.value).startswith(
        "torch.nn.BatchNorm2d has no valid specification: momentum is a finite number"
    )


class BatchNormNet(nn.Sequential):
    """A whole network whose name says "norm"."""


@pytest.mark.parametrize(
    ("obj", "fix"),
    [
        (
            BatchNormNet(nn.BatchNorm1d(2)),
            "It holds other modules: normscope.check(model) finds the normalizations",
        ),
        (nn.BatchNorm2d, "This is a class: make an object of it first."),
        (nn.Linear(2, 2), "If it normalizes, say what it computes with normscope.NormSpec(...)."),
        (3, "builtins.int is not a normalization that can be read."),
    ],
    ids=["network", "class", "linear", "int"],
)
def test_anything_else_is_unknown(obj, fix):
    with pytest.raises(UnknownNormalization) as error:
        spec_of(obj)
    assert fix in str(error.value)
    assert "torch.nn.GroupNorm, torch.nn.RMSNorm, " in str(error.value)


def test_a_spec_is_not_a_normalization():
    with pytest.raises(UnknownNormalization):
        spec_of(NormSpec("b c -> c"))
