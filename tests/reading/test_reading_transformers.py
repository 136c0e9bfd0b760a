"""Hand-written norms of transformers: what they compute decides, on a probe, and never their name."""

import copy
import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn

from normscope import reference, spec_of
from normscope.reading import UnknownNormalization, read
from normscope.reading.transformers_norms import identified
from normscope.spec import Cast, families

pytest.importorskip("transformers")
torch.set_num_threads(1)

SIZE = 16
KNOWN = {
    "llama": [
        "llama.LlamaRMSNorm",
        "mistral.MistralRMSNorm",
        "qwen2.Qwen2RMSNorm",
        "qwen3.Qwen3RMSNorm",
        "phi3.Phi3RMSNorm",
        "mamba.MambaRMSNorm",
        "llama4.Llama4TextRMSNorm",
    ],
    "t5": ["t5.T5LayerNorm", "mt5.MT5LayerNorm", "pix2struct.Pix2StructLayerNorm", "idefics.IdeficsRMSNorm"],
    "gemma": [
        "gemma.GemmaRMSNorm",
        "gemma2.Gemma2RMSNorm",
        "gemma3.Gemma3RMSNorm",
        "qwen3_next.Qwen3NextRMSNorm",
    ],
    "before": ["olmo2.Olmo2RMSNorm", "gpt_oss.GptOssRMSNorm", "moshi.MoshiRMSNorm", "gemma3n.Gemma3nRMSNorm"],
}
SPECS = {
    "llama": families.llama_rms_norm,
    "t5": families.t5_layer_norm,
    "gemma": families.gemma_rms_norm,
    "before": lambda eps: families.rms_norm(eps=eps, cast=Cast(compute="float32")),
    "plain": lambda eps: families.rms_norm(eps=eps, weight=False, cast=Cast(compute="float32")),
}


def cls_of(path):
    model, name = path.split(".")
    try:
        module = import_module(f"transformers.models.{model}.modeling_{model}")
    except ImportError:
        pytest.skip(f"this transformers has no {model}")
    return getattr(module, name, None) or pytest.skip(f"this transformers has no {path}")


def made(path, **kwargs):
    norm = cls_of(path)(SIZE, **kwargs)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(SIZE, generator=torch.Generator().manual_seed(1)))
    return norm


CASES = [pytest.param(name, path, id=path) for name, paths in KNOWN.items() for path in paths]


@pytest.mark.parametrize(("convention", "path"), CASES)
def test_each_is_read_as_what_it_computes(convention, path):
    norm = made(path, eps=1e-3)
    reading = read(norm)
    assert reading.spec == SPECS[convention](eps=1e-3)
    assert identified(norm).convention.name == convention
    assert list(reading.tensors) == ["weight"]
    assert reading.tensors["weight"] is norm.weight
    assert (reading.mode_now, reading.mode_train, reading.mode_eval) == ("input", "input", "input")
    assert reading.type_name.endswith(path.partition(".")[2])
    # the float64 reference on float32 numbers: the norm itself rounds sums of 16 squares and three products, at most
    # ten roundings of 6e-8 on values below 4 * max|w|
    x = torch.randn(3, 5, SIZE, generator=torch.Generator().manual_seed(2)) * torch.tensor(
        [[1e-2], [1], [3], [9], [1]]
    )
    expected = reference.forward(x.numpy(), reading.spec, norm.weight.detach().numpy())
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=0, atol=10 * 6e-8 * 4 * 3)


@pytest.mark.parametrize(("convention", "path"), CASES)
def test_reading_changes_nothing(convention, path):
    norm = made(path).to(torch.bfloat16).train()
    norm.weight.grad = torch.ones_like(norm.weight)
    calls = []
    norm.register_forward_hook(lambda *args: calls.append(args))
    before, version, state = dict(vars(norm)), norm.weight._version, torch.get_rng_state()
    values = copy.deepcopy(norm.state_dict())
    read(norm)
    assert vars(norm) == before
    assert norm.weight._version == version
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, values[key]) for key, value in norm.state_dict().items())
    assert norm.training
    assert not calls


def test_without_a_weight():
    norm = cls_of("gemma3n.Gemma3nRMSNorm")(SIZE, with_scale=False)
    assert spec_of(norm) == SPECS["plain"](eps=1e-6)
    assert read(norm).tensors == {}


REFUSED = {
    "hy_v4.HYV4UnweightedRMSNorm": ((), r"from plain it differs in float32: it returns shape \(2, 16, 1\)"),
    "deepseek_v4.DeepseekV4UnweightedRMSNorm": (
        (),
        r"from plain it differs in bfloat16: in \d+% of the values",
    ),
    "cohere.CohereLayerNorm": ((SIZE,), r"from llama it differs in float32: by \S+ at outputs up to \S+"),
    "imagegpt.ImageGPTLayerNorm": (((SIZE,),), r"from llama it differs in bfloat16: in \d+% of the values"),
    "mamba2.MambaRMSNormGated": ((SIZE, 8), r"takes gate beside its input, so it is more than a norm"),
    "qwen3_next.Qwen3NextRMSNormGated": ((SIZE,), r"takes gate beside its input, so it is more than a norm"),
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_only_sounds_like_one_is_refused_with_the_difference(path):
    arguments, reason = REFUSED[path]
    with pytest.raises(UnknownNormalization, match=reason) as error:
        read(cls_of(path)(*arguments))
    assert "Say what it computes with normscope.NormSpec(...)." in str(error.value)


def test_the_whole_refusal():
    with pytest.raises(UnknownNormalization) as error:
        read(cls_of("mamba2.MambaRMSNormGated")(SIZE, SIZE))
    assert str(error.value) == (
        "transformers.models.mamba2.modeling_mamba2.MambaRMSNormGated takes gate beside its input, so it is more than "
        "a norm. Say what it computes with normscope.NormSpec(...)."
    )


def test_a_patched_class_is_probed_anew(monkeypatch):
    llama = cls_of("llama.LlamaRMSNorm")
    norm = made("llama.LlamaRMSNorm")
    assert identified(norm).convention.name == "llama"

    def doubled(self, hidden_states):
        return 2 * self.weight * hidden_states

    monkeypatch.setattr(llama, "forward", doubled)
    with pytest.raises(UnknownNormalization, match="none of the known conventions"):
        read(norm)


def test_an_instance_with_a_forward_of_its_own_is_refused():
    for name, method in (("llama.LlamaRMSNorm", "forward"), ("gemma.GemmaRMSNorm", "_norm")):
        norm = made(name)
        setattr(norm, method, lambda x: x)
        with pytest.raises(
            UnknownNormalization, match=f"with another {method}, so it may compute something else"
        ):
            read(norm)


def test_a_forward_that_depends_on_the_training_flag_is_refused(monkeypatch):
    llama = cls_of("llama.LlamaRMSNorm")
    forward = llama.forward
    monkeypatch.setattr(llama, "forward", lambda self, x: forward(self, x) if self.training else x)
    for flag in (True, False):
        with pytest.raises(UnknownNormalization, match="from llama it differs in float32"):
            read(made("llama.LlamaRMSNorm").train(flag))


def test_eps_is_read_where_it_stands_and_as_it_is_now():
    norm = made("llama.LlamaRMSNorm")
    norm.variance_epsilon = 0.25
    assert spec_of(norm).eps == 0.25


def test_an_eps_that_the_forward_does_not_use_is_refused(monkeypatch):
    llama = cls_of("llama.LlamaRMSNorm")
    monkeypatch.setattr(
        llama, "forward", lambda self, x: self.weight * x * (x.pow(2).mean(-1, keepdim=True) + 1e-2).rsqrt()
    )
    with pytest.raises(UnknownNormalization, match="none of the known conventions"):
        read(made("llama.LlamaRMSNorm"))


def test_a_class_that_pretends_to_live_in_transformers_is_not_taken():
    class LlamaRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(SIZE)), 1e-6

        def forward(self, x):
            return self.weight * x

    LlamaRMSNorm.__module__ = cls_of("llama.LlamaRMSNorm").__module__
    LlamaRMSNorm.__qualname__ = "LlamaRMSNorm"
    assert identified(LlamaRMSNorm()) is None
    with pytest.raises(UnknownNormalization, match="is not a normalization that can be read"):
        read(LlamaRMSNorm())


def test_subclasses():
    llama = cls_of("llama.LlamaRMSNorm")

    class Same(llama):
        def extra_repr(self):
            return "mine"

    class Other(llama):
        def forward(self, x):
            return super().forward(x) + 1

    assert identified(Other) is None
    with pytest.raises(UnknownNormalization, match="with another forward"):
        read(Other(SIZE))
    with pytest.raises(UnknownNormalization, match="with another extra_repr"):
        read(Same(SIZE))


def test_parametrized_and_meta_weights():
    norm = made("llama.LlamaRMSNorm")
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    assert spec_of(norm) == SPECS["llama"](eps=1e-6)
    with torch.device("meta"):
        assert spec_of(cls_of("llama.LlamaRMSNorm")(SIZE)) == SPECS["llama"](eps=1e-6)


@pytest.mark.parametrize(
    "around",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
    ],
    ids=["inference", "no_grad", "autocast", "meta"],
)
def test_under_any_mode_of_torch(around):
    from normscope.reading import transformers_norms

    norm = made("gemma2.Gemma2RMSNorm")
    transformers_norms._probed.cache_clear()
    with around():
        assert identified(norm).convention.name == "gemma"


def test_one_of_size_one_and_input_ranks():
    assert spec_of(cls_of("llama.LlamaRMSNorm")(1)).eps == 1e-6
    with pytest.raises(ValueError, match="takes an input of at least 1 axis, input_ndim is 0"):
        spec_of(made("llama.LlamaRMSNorm"), input_ndim=0)


def test_other_objects_are_left_to_other_readers():
    for other in (
        None,
        3,
        "LlamaRMSNorm",
        sys,
        cls_of("llama.LlamaRMSNorm"),
        nn.LayerNorm(3),
        nn.Linear(2, 2),
    ):
        assert identified(other) is None
