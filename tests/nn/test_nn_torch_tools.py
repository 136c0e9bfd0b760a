"""Tools of torch that know its norms know ours."""

from __future__ import annotations

import pytest
import torch
import torch.fx.experimental.optimization
from torch import nn
from torch.nn.utils import parametrize

import normscope.nn as own
from normscope.errors import BadInput


def test_convert_sync_batchnorm_takes_ours_along():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), own.BatchNorm2d(4))
    model[1].running_mean.fill_(2.0)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(synced[1]) is nn.SyncBatchNorm
    assert torch.equal(synced[1].running_mean, torch.full((4,), 2.0))


@pytest.mark.parametrize(
    "norm",
    [own.BatchRenorm2d(4), own.GhostBatchNorm2d(4, size=2), own.ThresholdBatchNorm2d(4)],
    ids=lambda norm: type(norm).__name__,
)
def test_convert_sync_batchnorm_makes_no_batch_norm_of_what_is_none(norm):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(norm))
    with pytest.raises(BadInput) as caught:
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert str(caught.value) == (
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm would put a plain batch norm, another function, in the place of "
        f"{norm!r}. Use normscope.nn.SyncBatchNorm.convert_sync_batchnorm, which leaves such layers as they are, and "
        "leave sync_batchnorm off in a trainer. (Norms before it in this model are converted by now.)"
    )
    assert own.SyncBatchNorm.convert_sync_batchnorm(model)[1][0] is norm
    assert model[1][0] is norm
    assert isinstance(
        norm, nn.modules.batchnorm._BatchNorm
    )  # what freezes, re-estimates and exempts batch norms
    assert (list(norm.named_children()), list(norm.modules())) == ([], [norm])


def test_fuse_conv_bn():
    conv, norm = nn.Conv2d(3, 4, 1).eval(), own.BatchNorm2d(4).eval()
    norm.running_mean.fill_(0.5)
    norm.running_var.fill_(2.0)
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(nn.utils.fuse_conv_bn_eval(conv, norm)(x), norm(conv(x)), rtol=1e-5, atol=1e-5)


def test_fuse_of_torch_fx_leaves_ours_where_it_is():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), own.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    ).eval()
    x = torch.randn(2, 3, 5, 5)
    fused = torch.fx.experimental.optimization.fuse(model)
    assert [node.target for node in fused.graph.nodes if node.op == "call_module"] == ["0", "1", "2"]
    torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-5)


def test_tracer_that_calls_everything_by_name():
    class Inside(torch.fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return False

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = own.RMSNorm(4)

        def forward(self, x):
            return self.norm(x=x) + 1

    (_, norm, _, _) = Inside().trace(Model()).nodes
    assert (norm.op, norm.target) == ("call_module", "norm")


def test_tracing_a_layer_alone_says_what_to_trace():
    with pytest.raises(BadInput) as caught:
        torch.fx.symbolic_trace(own.BatchNorm2d(4))
    assert str(caught.value) == (
        "torch.fx traces a model that has a BatchNorm2d in it, as one call; got the BatchNorm2d itself. "
        "Trace torch.nn.Sequential(layer)."
    )


@pytest.mark.parametrize("layer", [own.PixelNorm, own.L2Norm])
def test_arguments_that_look_like_a_number_of_features_go_by_name(layer):
    with pytest.raises(
        TypeError, match=rf"^{layer.__name__}\.__init__\(\) takes 1 positional argument but 2 were given$"
    ):
        layer(6)


def test_half_module_scripts_without_float32_statistics():
    norm = own.BatchNorm2d(4, float32_statistics=False).bfloat16()
    x = torch.randn(2, 4, 3, 3).bfloat16()
    wanted = nn.BatchNorm2d(4).bfloat16()(x)
    assert torch.equal(torch.jit.script(norm)(x), wanted)


def test_weight_decay_filters_by_class_find_every_parameter():
    norms = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    model = nn.Sequential(
        own.BatchNorm2d(4),
        own.LayerNorm(4),
        own.ChannelsFirstLayerNorm(4),
        own.GroupNorm(2, 4),
        own.RMSNorm(4),
    )
    assert all(isinstance(module, norms) for module in model)


def test_update_bn():
    model = nn.Sequential(own.BatchNorm1d(2))
    batches = [torch.randn(8, 2) + 3 for _ in range(4)]
    torch.optim.swa_utils.update_bn(batches, model)
    torch.testing.assert_close(model[0].running_mean, torch.stack([b.mean(0) for b in batches]).mean(0))
    assert model[0].num_batches_tracked == 4
    assert model[0].momentum == 0.1


def test_parametrized_weight():
    class Positive(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w.abs()

    norm = own.LayerNorm(4)
    with torch.no_grad():
        norm.weight.fill_(-2.0)
    x = torch.randn(3, 4)
    plain = norm(x)
    parametrize.register_parametrization(norm, "weight", Positive())
    torch.testing.assert_close(norm(x) - norm.bias, norm.bias - plain)


def test_functional_call():
    norm = own.LayerNorm(4)
    x = torch.randn(3, 4)
    y = torch.func.functional_call(norm, {"weight": torch.full((4,), 3.0), "bias": torch.zeros(4)}, (x,))
    torch.testing.assert_close(y, 3 * norm(x))


@pytest.mark.parametrize(
    "norm", [own.LayerNorm(6), own.RMSNorm(6), own.RMSNorm(6, convention="gemma")], ids=repr
)
def test_per_sample_gradients(norm):
    x = torch.randn(5, 6)
    parameters = dict(norm.named_parameters())

    def loss(p, row):
        return torch.func.functional_call(norm, p, (row[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(5):
        alone = torch.func.grad(loss)(parameters, x[i])
        for name in parameters:
            torch.testing.assert_close(found[name][i], alone[name])


def test_torch_nn_transformer_layer_takes_ours():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    x = torch.randn(2, 3, 8)
    wanted = layer(x)
    for name in ("norm1", "norm2"):
        ours = own.LayerNorm(8)
        ours.load_state_dict(getattr(layer, name).state_dict())
        setattr(layer, name, ours)
    torch.testing.assert_close(layer(x), wanted)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), wanted)


def test_convert_sync_batchnorm_of_torch_loses_no_correction():
    model = nn.Sequential(own.BatchNorm1d(4, running_correction=0))
    with pytest.raises(BadInput, match="convert_sync_batchnorm, which keeps running_correction=0, and leave"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert own.SyncBatchNorm.convert_sync_batchnorm(model)[0].running_correction == 0


def test_names_are_there_and_others_are_not():
    assert dir(own) == sorted(own.__all__)
    with pytest.raises(AttributeError, match=r"module 'normscope\.nn' has no attribute 'Norm'"):
        _ = own.Norm
