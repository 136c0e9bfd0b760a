"""States carried between names: what is carried, what is left and why, what is refused. Needs no other framework."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import normscope as ns
from normscope.errors import BadInput
from normscope.reading import UnknownNormalization
from normscope.reading.base import qualified_name

KERAS = ("gamma", "beta", "moving_mean", "moving_variance")


def vectors(names, size=3, path=""):
    return {f"{path}{name}": np.full(size, float(i + 1)) for i, name in enumerate(names)}


def torch_state():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.GroupNorm(2, 4))
    model(torch.randn(2, 3, 5, 5))
    return model.state_dict()


@pytest.mark.parametrize("other", ["keras", "flax", "linen"])
def test_there_and_back_is_the_same_to_the_bit(other):
    state = torch_state()
    there, report = ns.port(state, source="torch", target=other)
    assert [site.name for site in report.left] == ["0"]
    back, _ = ns.port(there, source=other)
    norms = {name: tensor for name, tensor in state.items() if not name.startswith("0.")}
    norms["1.num_batches_tracked"] = torch.tensor(0)
    assert back.keys() == norms.keys()
    for name, tensor in norms.items():
        assert torch.equal(back[name], tensor), name
        assert back[name].data_ptr() != tensor.data_ptr()


def test_names_of_every_framework():
    state = {f"1.{name}": t for name, t in torch.nn.BatchNorm1d(2).state_dict().items()}
    assert list(ns.port(state, source="torch", target="keras")[0]) == [f"1/{name}" for name in KERAS]
    nnx, _ = ns.port(state, source="torch", target="flax")
    assert nnx.keys() == {"1"}
    assert nnx["1"].keys() == {"scale", "bias", "mean", "var"}
    linen, _ = ns.port(state, source="torch", target="linen")
    assert {c: set(held["1"]) for c, held in linen.items()} == {
        "params": {"scale", "bias"},
        "batch_stats": {"mean", "var"},
    }


def test_keras_paths_with_suffixes_and_nesting():
    state, report = ns.port({"net": {"bn": vectors([f"{name}:0" for name in KERAS])}}, source="keras")
    assert list(state) == [f"net.bn.{n}" for n in torch.nn.BatchNorm1d(3).state_dict()]
    assert [state[f"net.bn.{n}"][0].item() for n in ("weight", "bias", "running_mean", "running_var")] == [
        1,
        2,
        3,
        4,
    ]
    assert str(report) == (
        "port: 1 of 1 normalizations done\n"
        "  done  keras: gamma, beta, moving_mean, moving_variance -> torch: net.bn (weight, bias, running_mean, "
        "running_var): net/bn\n"
        "  a state holds neither eps nor momentum: set them in the target as the source has them\n"
        "  running variances are carried as they are; keras stores the variance of a batch, and torch.nn goes on with "
        "M / (M - 1) times it for M elements a channel; normscope.nn's batch norms do not with running_correction=0. "
        "num_batches_tracked starts at 0"
    )


def test_numbered_weight_files():
    state, report = ns.port(
        {
            **vectors("0123", path="layers/batch_normalization_1/vars/"),
            **vectors("012", path="layers/batch_normalization/vars/"),
            **vectors("0", path="layers/layer_normalization/vars/"),
            **vectors("01", path="layers/dense/vars/"),
            **vectors("0", path="layers/rms_normalization/vars/"),
        },
        source="keras",
    )
    assert state["layers.batch_normalization_1.running_var"].tolist() == [4.0, 4.0, 4.0]
    assert "layers.rms_normalization.weight" in state
    ambiguous = (
        "numbered arrays of a {} normalization can be read in more than one way. Name them: "
        "{{v.path: v for v in model.variables}}"
    )
    assert [(site.name, site.reason) for site in report.left] == [
        ("layers/batch_normalization", "3 " + ambiguous.format("batch")),
        ("layers/layer_normalization", "1 " + ambiguous.format("layer")),
        ("layers/dense", "no normalization's by its name"),
    ]


def test_what_is_no_normalization_is_left():
    for source, state, reason in [
        ("keras", {"d/kernel": np.ones((2, 2)), "d/bias": np.ones(2)}, "no normalization's"),
        (
            "keras",
            {"own/gamma": np.ones(2), "own/kernel": np.ones(2)},
            "beside gamma it holds kernel, as no normalization of Keras does",
        ),
        (
            "keras",
            vectors([*KERAS, "renorm_mean", "renorm_stddev", "moving_stddev"], path="bn/"),
            "batch renormalization keeps a second pair of statistics, which no other layer has",
        ),
        ("flax", {"d": {"kernel": np.ones((2, 2)), "bias": np.ones(2)}}, "no normalization's"),
        (
            "flax",
            {"ln": {"bias": np.ones(2)}},
            "a bias alone may be anybody's, and a normalization without scale has no other parameter",
        ),
        ("linen", {"batch_stats": {"s": {"u": np.ones(2), "sigma": np.ones(2)}}}, "no normalization's"),
        (
            "linen",
            {"batch_stats": {"bn": {"mean": np.ones((2, 3)), "var": np.ones((2, 3))}}},
            "its statistics have 2 axes, and a batch norm of torch stores one",
        ),
    ]:
        ported, report = ns.port(state, source=source)
        assert ported == {}
        assert [site.reason for site in report.left] == [reason]
    ported, report = ns.port(
        {"l.weight": torch.ones(3, 2), "l.bias": torch.ones(3)}, source="torch", target="keras"
    )
    assert ported == {}
    assert report.left[0].reason == "its weight has 2 axes, as other layers' have. Port the layer itself"


def test_one_plus_weight_and_new_paths():
    state, report = ns.port(
        {"params": {"norm": {"scale": np.zeros(3, np.float32)}}},
        source="linen",
        weight_offset=1.0,
        rename={"norm": "model.norm"},
    )
    assert state["model.norm.weight"].tolist() == [1.0, 1.0, 1.0]
    assert "weights: 1 was added, which the source adds itself" in report.notes


def test_dtypes_stay():
    state, _ = ns.port(
        {"ln/gamma": np.ones(2, np.float16), "ln/beta": np.ones(2, np.float16)}, source="keras"
    )
    assert {t.dtype for t in state.values()} == {torch.float16}
    arrays, report = ns.port(torch.nn.LayerNorm(2, dtype=torch.bfloat16), target="keras")
    assert arrays["gamma"].dtype == np.float32
    assert "bfloat16 arrays, which NumPy lacks, were written as float32 of the same values" in report.notes


STATES = [
    ({}, {"source": "keras"}, "the state is empty: there is nothing to port."),
    (
        {"bn/moving_mean": np.ones(3)},
        {"source": "keras"},
        "bn has moving_mean and no running_var. Stored statistics are a mean and a variance: pass both, or neither.",
    ),
    (
        {"ln/gamma": np.ones(3), "ln/beta": np.ones(4)},
        {"source": "keras"},
        "the arrays of one normalization have one shape; ln has gamma (3,), beta (4,).",
    ),
    (
        {"bn/moving_mean": np.ones(3), "bn/moving_variance": -np.ones(3)},
        {"source": "keras"},
        "bn: moving_variance has negative entries, and a variance has none.",
    ),
    (
        {"ln/gamma": np.array([1, "a", None], dtype=object)},
        {"source": "keras"},
        "ln/gamma holds Python objects; parameters and statistics are float16, bfloat16, float32 or float64. Convert "
        "it first.",
    ),
    (
        {"ln/gamma": np.ones(3, np.int64)},
        {"source": "keras"},
        "ln/gamma holds int64; parameters and statistics are float16, bfloat16, float32 or float64. Convert it first.",
    ),
    (
        {"ln.weight": torch.ones(3, device="meta")},
        {"source": "torch", "target": "keras"},
        "ln.weight is a meta tensor, which has a shape and no values. Load its values first.",
    ),
    (
        {"ln/gamma": [[1.0], [1.0, 2.0]]},
        {"source": "keras"},
        "ln/gamma is a list and no array of numbers. Pass an array.",
    ),
    (
        {"ln/gamma": np.ones(3)},
        {},
        "a state does not say where it comes from. Pass source=, one of torch, keras, flax, linen.",
    ),
    (
        {"ln/gamma": np.ones(3)},
        {"source": "tensorflow"},
        "source is one of torch, keras, flax, linen; got 'tensorflow'. Of nnx say 'flax'.",
    ),
    (
        {"ln/gamma": np.ones(3)},
        {"source": "keras", "target": "nnx"},
        "target is one of torch, keras, flax, linen; got 'nnx'. Of nnx say 'flax'.",
    ),
    (
        {"ln/gamma": np.ones(3)},
        {"source": "keras", "target": "keras"},
        "source and target are both keras: there is nothing to port.",
    ),
    (
        {"ln/gamma": np.ones(3)},
        {"source": "keras", "rename": {"bn": "x"}},
        "rename names bn, and the normalizations are ln.",
    ),
    (
        [np.ones(3), np.ones(3)],
        {"source": "keras"},
        "port takes a layer of Keras, Flax or PyTorch, or a state, a mapping of names to arrays; got a list. Of Keras "
        "weights pass {v.path: v for v in model.variables}.",
    ),
    (
        torch.nn.LayerNorm(3),
        {"target": "torch"},
        "source and target are both torch: there is nothing to port.",
    ),
    (
        torch.nn.LayerNorm(3),
        {"target": "keras", "weight_offset": 1.0},
        "weight_offset and rename are for a state: a layer says itself what it computes.",
    ),
    (
        torch.nn.LayerNorm(3, device="meta"),
        {"target": "keras"},
        "torch.nn.LayerNorm: weight is a meta tensor, which has a shape and no values. Load its values first.",
    ),
    (
        torch.nn.BatchNorm1d(3, momentum=None),
        {"target": "flax"},
        "momentum=None averages all batches alike, and Keras and Flax only forget by a decay. Set a momentum first.",
    ),
    (
        torch.nn.LayerNorm(3),
        {"target": "keras", "layers": "ours"},
        "layers is 'normscope' or 'torch'; got 'ours'.",
    ),
]


@pytest.mark.parametrize(("obj", "settings", "text"), STATES)
def test_refused(obj, settings, text):
    with pytest.raises(BadInput) as caught:
        ns.port(obj, **settings)
    assert str(caught.value) == text


def test_the_layer_is_left_as_it_was():
    layer = torch.nn.BatchNorm1d(3)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    arrays, report = ns.port(layer, target="keras")
    arrays["gamma"][:] = 7
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    assert report.settings == {
        "class": "BatchNormalization",
        "epsilon": 1e-5,
        "momentum": 0.9,
        "trainable": True,
        "axis": 1,
        "center": True,
        "scale": True,
    }


def flag_flipped():
    layer = torch.nn.BatchNorm2d(4)
    layer.track_running_stats = False
    return layer


BEYOND = [
    (
        ns.nn.BatchRenorm2d(4),
        "batch renormalization bends the statistics of a batch towards the stored ones (r and d), so training would "
        "compute another function",
    ),
    (ns.nn.ConditionalBatchNorm2d(4, classes=3), "its gain and bias are computed from an input"),
    (torch.nn.BatchNorm2d(4, track_running_stats=False), "it normalizes by the batch in evaluation too"),
    (flag_flipped(), "it normalizes by the batch in training and moves no stored statistics"),
]


@pytest.mark.parametrize("target", ["keras", "flax", "linen"])
@pytest.mark.parametrize(("module", "why"), BEYOND)
def test_what_a_target_cannot_be_told_is_refused(module, why, target):
    with pytest.raises(UnknownNormalization) as caught:
        ns.port(module, target=target)
    assert str(caught.value) == (
        f"{'Keras' if target == 'keras' else 'Flax'} has no layer like {qualified_name(type(module))}: {why}. Where "
        "that may go, port the state, which says nothing of it."
    )


@pytest.mark.parametrize(
    "module",
    [
        ns.nn.GhostBatchNorm2d(4, size=2),
        ns.nn.ThresholdBatchNorm2d(4),
        ns.nn.BatchNormThroughTime2d(3, 4),
        ns.nn.TemporalEffectiveBatchNorm2d(3, 4),
        ns.nn.IterNorm(4, 2),
        ns.nn.FilterResponseNorm2d(4),
        ns.nn.ScaleNorm(4),
        ns.nn.WeightStandardization((4, 3, 3, 3)),
        torch.nn.InstanceNorm2d(4, track_running_stats=True),
    ],
)
def test_what_a_target_has_no_layer_for_is_refused(module):
    for target in ("keras", "flax"):
        with pytest.raises(UnknownNormalization) as caught:
            ns.port(module, target=target)
        assert str(caught.value) == (
            f"{target.capitalize()} has no layer for {ns.spec_of(module)}. Say which layer it shall be, and port the "
            "state."
        )


def test_synchronized_statistics_are_told():
    said = {
        target: ns.port(torch.nn.SyncBatchNorm(4), target=target)[1].notes for target in ("keras", "flax")
    }
    text = "the source takes statistics over all processes: "
    assert f"{text}keras does with synchronized=True, on its TensorFlow backend" in said["keras"]
    assert f"{text}flax does with axis_name=" in said["flax"]


def test_hooks_that_arrays_cannot_hold_are_told():
    norm = torch.nn.LayerNorm(3)
    assert (
        "its forward hooks were not carried: arrays hold none" not in ns.port(norm, target="keras")[1].notes
    )
    norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    assert "its forward hooks were not carried: arrays hold none" in ns.port(norm, target="keras")[1].notes
