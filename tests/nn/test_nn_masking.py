"""Layers under masks, lengths and packed sequences: held to the reference, whatever stands at what does not count."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence

import normscope as ns
import normscope.nn as own
from normscope import reference
from normscope.errors import BadInput
from normscope.kernels import library
from normscope.reading import read

MAKERS = {
    "BatchNorm1d": ((3, 4, 5), lambda s: own.BatchNorm1d(s[1], 1e-3, 0.3)),
    "BatchNorm2d": ((3, 2, 4, 3), lambda s: own.BatchNorm2d(s[1])),
    "BatchNorm2d cumulative": ((2, 3, 2, 4), lambda s: own.BatchNorm2d(s[1], momentum=None)),
    "BatchNorm2d biased": ((2, 3, 2, 4), lambda s: own.BatchNorm2d(s[1], running_correction=0)),
    "BatchNorm1d untracked": ((4, 3), lambda s: own.BatchNorm1d(s[1], track_running_stats=False)),
    "LayerNorm": ((2, 3, 4), lambda s: own.LayerNorm(s[-1])),
    "LayerNorm two axes": ((2, 3, 4), lambda s: own.LayerNorm(s[1:], bias=False)),
    "ChannelsFirstLayerNorm": ((2, 4, 3), lambda s: own.ChannelsFirstLayerNorm(s[1])),
    "GroupNorm": ((2, 4, 5), lambda s: own.GroupNorm(2, s[1])),
    "InstanceNorm1d": ((2, 3, 5), lambda s: own.InstanceNorm1d(s[1], affine=True)),
    "InstanceNorm2d tracked": ((2, 3, 4, 2), lambda s: own.InstanceNorm2d(s[1], 1e-3, 0.3, True, True)),
    "RMSNorm": ((2, 3, 4), lambda s: own.RMSNorm(s[-1])),
    "RMSNorm gemma": ((2, 3, 4), lambda s: own.RMSNorm(s[-1], convention="gemma")),
    "ScaleNorm": ((2, 3, 4), lambda s: own.ScaleNorm(s[-1])),
    "PixelNorm": ((2, 4, 3), lambda s: own.PixelNorm()),
    "L2Norm": ((2, 4, 3), lambda s: own.L2Norm(dim=1)),
    "FrozenBatchNorm": ((3, 4, 5), lambda s: own.FrozenBatchNorm(s[1])),
}
FLOAT32 = {"RMSNorm gemma"}


def filled(layer, seed=7):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_(0.5 + noise.abs() if name == "running_var" else 0.5 + noise)
    return layer


def close(got, wanted, bound):
    got = got.detach().double().numpy()
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max(initial=0) <= bound * max(1.0, np.abs(wanted).max(initial=0))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(MAKERS)),
    st.booleans(),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.3, 0.7, 0.95]),
    st.sampled_from([math.nan, math.inf, 1e30]),
)
def test_masked_layer_is_the_reference_of_what_counts(name, training, seed, share, poison):
    shape, make = MAKERS[name]
    rng = np.random.default_rng(seed)
    layer = filled(make(shape).double()).train(training)
    thin = [n if rng.random() < 0.6 else 1 for n in shape]
    mask = rng.random(thin) < share
    whole = np.broadcast_to(mask, shape).copy()
    clean = rng.normal(size=shape) * 2 + 1
    x = torch.from_numpy(np.where(whole, clean, poison)).requires_grad_()
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    reading = read(layer, input_ndim=len(shape))
    given_ = {key: before[key].numpy() if key in before else None for key in ("weight", "bias")}
    by_batch = reading.mode_now in ("batch", "input")
    running = None
    if "running_mean" in before:
        running = reference.RunningState(before["running_mean"].numpy(), before["running_var"].numpy())
    given_ |= {"training": by_batch, "running": running, "mask": mask}

    moves = by_batch and running is not None
    try:
        after = reference.update_running(running, clean, reading.spec, mask) if moves else running
    except ValueError:  # a set of one element has no variance to store
        with pytest.raises(BadInput, match="so every set needs M > 1 elements"):
            layer(x, mask=torch.from_numpy(mask))
        return
    y = layer(x, mask=torch.from_numpy(mask))
    bound = (
        2.0**-20 if name in FLOAT32 else 2.0**-53 * 2000
    )  # about 100 terms, 16 operations, conditions of 10
    close(y, reference.forward(clean, reading.spec, **given_), bound)
    assert (y[~torch.from_numpy(whole)] == 0).all()

    grad = rng.normal(size=shape)
    y.backward(torch.from_numpy(np.where(whole, grad, poison)))  # what stands there reaches nothing either
    dx, dweight, dbias = reference.vjp(grad, clean, reading.spec, **given_)
    close(x.grad, dx, 8 * bound)
    assert (x.grad[~torch.from_numpy(whole)] == 0).all()
    for parameter, wanted in (
        (getattr(layer, "weight", None), dweight),
        (getattr(layer, "bias", None), dbias),
    ):
        if isinstance(parameter, torch.nn.Parameter):
            close(parameter.grad, wanted, 8 * bound)
    if running is not None:
        close(layer.running_mean, after.mean, bound)
        close(layer.running_var, after.var, bound)
    if getattr(layer, "num_batches_tracked", None) is not None and "Instance" not in name:
        assert int(layer.num_batches_tracked) == int(training and bool(whole.any()))


def test_poison_is_no_mask_of_one_axis_only():
    """Without the mask the same input is NaN: the test above cannot pass by luck."""
    assert own.BatchNorm1d(3)(torch.full((2, 3, 4), math.nan)).isnan().all()


# Lengths, and what padding changes ------------------------------------------------------------------------------


CHANNELS, LAST = "channels", "last"
ALONG = {
    "BatchNorm1d": (lambda: own.BatchNorm1d(4), CHANNELS),
    "BatchNorm1d eval": (lambda: own.BatchNorm1d(4).eval(), CHANNELS),
    "GroupNorm": (lambda: own.GroupNorm(2, 4), CHANNELS),
    "InstanceNorm1d": (lambda: own.InstanceNorm1d(4, affine=True), CHANNELS),
    "ChannelsFirstLayerNorm": (lambda: own.ChannelsFirstLayerNorm(4), CHANNELS),
    "FrozenBatchNorm": (lambda: own.FrozenBatchNorm(4), CHANNELS),
    "LayerNorm": (lambda: own.LayerNorm(4), LAST),
    "RMSNorm": (lambda: own.RMSNorm(4), LAST),
    "ScaleNorm": (lambda: own.ScaleNorm(4), LAST),
}
LENGTHS = [5, 1, 8, 3]


def sequences(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=generator) + 3).to(dtype) for n in LENGTHS]


def padded(items, length, layout, value=math.nan):
    x = torch.stack([torch.nn.functional.pad(s, (0, 0, 0, length - len(s)), value=value) for s in items])
    return x.movedim(1, -1) if layout == CHANNELS else x


@pytest.mark.parametrize("name", ALONG)
def test_how_far_the_batch_was_padded_changes_nothing(name):
    """Bit for bit; group and instance norm by native kernels alone: in plain PyTorch they sum over the padded axis in
    float64, whose last bit may differ."""
    make, layout = ALONG[name]
    outputs = []
    for length in (8, 37):
        layer = filled(make())
        y = layer(padded(sequences(), length, layout), lengths=torch.tensor(LENGTHS))
        y = y.movedim(-1, 1) if layout == CHANNELS else y
        assert all((row[n:] == 0).all() for row, n in zip(y, LENGTHS, strict=True))
        held = [layer.running_mean, layer.running_var] if hasattr(layer, "running_mean") else []
        outputs.append(
            [*(row[:n] for row, n in zip(y, LENGTHS, strict=True)), *(t for t in held if t is not None)]
        )
    exact = name not in ("GroupNorm", "InstanceNorm1d") or library.LIBRARY is not None
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=0 if exact else 2**-22, atol=0 if exact else 2**-22)


@pytest.mark.parametrize("name", ALONG)
def test_packed_sequence_is_the_padded_batch_with_lengths(name):
    make, layout = ALONG[name]
    packed = pack_sequence(sequences(), enforce_sorted=False)
    got = filled(make())(packed)
    y, lengths = pad_packed_sequence(got, batch_first=True)
    wanted = filled(make())(padded(sequences(), 8, layout), lengths=lengths)
    torch.testing.assert_close(
        y, wanted.movedim(-1, 1) if layout == CHANNELS else wanted, rtol=1e-6, atol=1e-6
    )
    assert torch.equal(got.sorted_indices, packed.sorted_indices)


def test_batch_statistics_are_those_of_the_frames_without_padding():
    """float32: the last bits of mean and deviation, and an operation or two on a value of some units."""
    whole, masked = filled(own.BatchNorm1d(4)), filled(own.BatchNorm1d(4))
    frames = whole(torch.cat(sequences()))
    y = masked(padded(sequences(), 11, CHANNELS), lengths=torch.tensor(LENGTHS)).movedim(-1, 1)
    kept = torch.cat([row[:n] for row, n in zip(y, LENGTHS, strict=True)])
    torch.testing.assert_close(kept, frames, rtol=2**-20, atol=2**-20)
    torch.testing.assert_close(masked.state_dict(), whole.state_dict(), rtol=2**-21, atol=0)


def test_a_batch_without_a_valid_element_moves_nothing():
    for layer in (
        own.BatchNorm1d(4),
        own.BatchNorm1d(4, momentum=None),
        own.InstanceNorm1d(4, 1e-5, 0.1, True, True),
    ):
        before = {name: tensor.clone() for name, tensor in filled(layer).state_dict().items()}
        x = torch.full((2, 4, 3), math.nan, requires_grad=True)
        y = layer(x, lengths=torch.tensor([0, 0]))
        y.sum().backward()
        assert y.count_nonzero() == x.grad.count_nonzero() == layer.weight.grad.count_nonzero() == 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize("name", ALONG)
def test_bias_stands_at_what_does_not_count_on_request(name):
    make, layout = ALONG[name]
    layer = filled(make())
    x, lengths = padded(sequences(), 8, layout), torch.tensor(LENGTHS)
    zero, bias = layer(x, lengths=lengths), layer(x, lengths=lengths, fill="bias")
    outside = (torch.arange(8) >= lengths[:, None]).unsqueeze(1 if layout == CHANNELS else 2).expand(x.shape)
    held = getattr(layer, "bias", None)
    shaped = torch.zeros(()) if held is None else held.view(4, 1) if layout == CHANNELS else held
    wanted = shaped.expand(x.shape)[outside]
    assert torch.equal(bias[outside], wanted)
    if (
        "eval" not in name and "BatchNorm1d" not in name
    ):  # training moved what is stored in between: no part of y
        assert torch.equal(bias[~outside], zero[~outside])


def test_mask_and_lengths_together_count_where_both_say_so():
    x, mask = torch.randn(4, 4, 8), torch.rand(4, 1, 8) < 0.6
    lengths = torch.tensor(LENGTHS)
    both = mask & (torch.arange(8) < lengths[:, None])[:, None]
    norm = own.InstanceNorm1d(4)
    assert torch.equal(norm(x, mask=mask, lengths=lengths), norm(x, mask=both))
    assert torch.equal(norm(x[0], mask=both[0]), norm(x, mask=both)[0])  # one sample without its axis


def test_llama_weight_of_another_dtype_under_a_mask():
    norm = filled(own.RMSNorm(4, convention="llama"))
    x, mask = torch.randn(3, 4).bfloat16(), torch.tensor([[True], [False], [True]])
    y = norm(x, mask=mask)
    assert y.dtype == torch.float32
    assert torch.equal(y[mask[:, 0]], norm(x)[mask[:, 0]])
    assert (y[1] == 0).all()


# A net for sequences of many lengths ----------------------------------------------------------------------------


class Speech(torch.nn.Module):
    """Two convolutions over time, each followed by a batch norm of the frames that are there; logits of the mean."""

    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            [torch.nn.Conv1d(6, 8, 3, padding=1), torch.nn.Conv1d(8, 8, 5, padding=2)]
        )
        self.norms = torch.nn.ModuleList([own.BatchNorm1d(8), own.BatchNorm1d(8)])
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x, lengths):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x), lengths=lengths).relu()
        return self.head(x.sum(-1) / lengths[:, None])


def test_padded_batch_and_single_samples_of_a_trained_net_give_the_same():
    torch.manual_seed(0)
    lengths = [40, 7, 23, 12, 31, 5]
    items = [
        torch.randn(n, 6) + torch.sin(torch.arange(n) / (2 + i % 3))[:, None] for i, n in enumerate(lengths)
    ]
    x = pad_sequence(items, batch_first=True).movedim(1, 2)
    labels = torch.arange(6) % 3
    model, plain = Speech(), Speech()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(25):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x, torch.tensor(lengths)), labels)
        loss.backward()
        optimizer.step()
    assert loss < 0.5  # it learns

    model.eval()
    batch = model(x, torch.tensor(lengths))
    single = torch.cat([model(s.T[None], torch.tensor([len(s)])) for s in items])
    torch.testing.assert_close(batch, single, rtol=1e-5, atol=1e-5)
    assert torch.equal(batch.argmax(1), labels)

    # the same without lengths: what was padded enters the statistics, and samples differ from those of a batch
    plain.load_state_dict(model.state_dict())
    for norm in plain.norms:
        norm.forward = lambda x, lengths, norm=norm: type(norm).forward(norm, x)
    apart = torch.cat([plain.eval()(s.T[None], torch.tensor([len(s)])) for s in items])
    assert (plain(x, torch.tensor(lengths)) - apart).abs().max() > 1e-2

    # training: statistics of the first norm are those of the frames, computed sample by sample
    first = own.BatchNorm1d(8)
    frames = torch.cat([model.convs[0](s.T[None])[0].T for s in items])
    first(model.convs[0](x), lengths=torch.tensor(lengths))
    torch.testing.assert_close(first.running_mean, 0.1 * frames.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first.running_var, 0.9 + 0.1 * frames.var(0), rtol=1e-5, atol=1e-6)


# Tools --------------------------------------------------------------------------------------------------------------


def test_torch_fx_keeps_masks_and_lengths():
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = own.LayerNorm(4)

        def forward(self, x, lengths):
            return self.norm(x, lengths=lengths)

    model, x = Masked(), torch.randn(2, 3, 4)
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x, torch.tensor([1, 3])), model(x, torch.tensor([1, 3])))


def test_compiled_norm_under_a_mask():
    norm, x, mask = filled(own.BatchNorm1d(4)).eval(), torch.randn(3, 4, 5), torch.rand(3, 1, 5) < 0.5
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, mask=mask), norm(x, mask=mask))


COMPILED = {
    "BatchNorm1d": lambda: own.BatchNorm1d(4),
    "BatchNorm1d cumulative": lambda: own.BatchNorm1d(4, momentum=None),
    "BatchNorm1d eval": lambda: own.BatchNorm1d(4).eval(),
    "BatchRenorm1d": lambda: own.BatchRenorm1d(4),
    "ChannelsFirstLayerNorm": lambda: own.ChannelsFirstLayerNorm(4),
    "GroupNorm": lambda: own.GroupNorm(2, 4),
    "InstanceNorm1d tracked": lambda: own.InstanceNorm1d(4, 1e-5, 0.1, True, True),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_for_all_sizes_at_once(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, layer = filled(COMPILED[name]()), filled(COMPILED[name]())
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for samples, length in ((4, 9), (6, 13), (3, 40)):
        lengths = torch.randint(2, length + 1, (samples,))
        x = torch.randn(samples, 4, length).masked_fill(
            torch.arange(length) >= lengths[:, None, None], math.nan
        )
        given = [x.clone().requires_grad_() for _ in range(2)]
        results = [norm(v, lengths=lengths) for norm, v in zip((eager, compiled), given, strict=True)]
        for y in results:
            y.sin().sum().backward()
        # two orders of float32 sums
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(eager.state_dict(), layer.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["BatchNorm1d", "BatchNorm1d eval", "GroupNorm"])
def test_exported_for_all_sizes_at_once(name):
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = filled(COMPILED[name]())

        def forward(self, x, lengths):
            return self.norm(x, lengths=lengths)

    model, (samples, length) = Masked(), torch.export.dims("samples", "length", min=2)
    model.train(model.norm.training)
    dynamic = {"x": {0: samples, 2: length}, "lengths": {0: samples}}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    given = torch.randn(4, 4, 9), torch.tensor([9, 3, 5, 2])
    program = torch.export.export(model, given, dynamic_shapes=dynamic).module()
    program.load_state_dict(before)
    x, lengths = torch.randn(6, 4, 13), torch.tensor([2, 13, 4, 9, 7, 5])
    torch.testing.assert_close(program(x, lengths), model(x, lengths), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(program.state_dict()), dict(model.state_dict()), rtol=1e-5, atol=1e-6)


def test_a_compiled_norm_says_that_a_set_is_too_small_for_its_variance():
    torch._dynamo.reset()
    norm = torch.compile(own.BatchNorm1d(4), fullgraph=True, backend="aot_eager")
    with pytest.raises(
        RuntimeError, match="a stored variance divides by M - 1, so every set needs M > 1 elements"
    ):
        norm(torch.randn(3, 4, 5), lengths=torch.tensor([1, 0, 0]))


ERRORS = {
    "packed beside lengths": (
        lambda: own.GroupNorm(1, 3)(pack_sequence([torch.zeros(2, 3)]), lengths=[2]),
        "GroupNorm takes a packed sequence alone, which says its lengths; got lengths beside it. Leave that out, or "
        "unpack the sequence (pad_packed_sequence).",
    ),
    "packed where there are time steps": (
        lambda: own.ThresholdLayerNorm(3)(pack_sequence([torch.zeros(2, 3)])),
        "ThresholdLayerNorm takes a tensor; got a packed sequence. Unpack it (pad_packed_sequence), and pass lengths=, "
        "where the layer has positions or time steps.",
    ),
    "packed along its steps": (
        lambda: own.L2Norm(dim=1)(pack_sequence([torch.zeros(2, 3)])),
        "L2Norm takes a packed sequence along an axis of its features, counted from the end; got dim=1 and elements "
        "of shape (3,). Unpack it (pad_packed_sequence), and pass lengths=.",
    ),
    "lengths beyond the end": (
        lambda: own.BatchNorm1d(3)(torch.zeros(2, 3, 5), lengths=[5, 6]),
        "BatchNorm1d takes lengths from 0 to the 5 positions that an input (2, 3, 5) has along axis -1; got 6. Count "
        "the positions of that axis.",
    ),
    "lengths below 0": (
        lambda: own.ThresholdLayerNorm(3)(torch.zeros(4, 2, 3), lengths=[1, -1]),
        "ThresholdLayerNorm takes lengths from 0 to the 4 positions that an input (4, 2, 3) has along axis 0; got -1. "
        "Count the positions of that axis.",
    ),
    "lengths of nothing": (
        lambda: own.LayerNorm(3)(torch.zeros(1, 2, 3), lengths=[None]),
        "LayerNorm takes lengths as whole numbers, one for each of the 1 samples; got [None]. Pass a list or a tensor "
        "of integers.",
    ),
    "mask elsewhere": (
        lambda: own.LayerNorm(3)(torch.zeros(2, 3), mask=torch.ones(2, 1, dtype=torch.bool, device="meta")),
        "LayerNorm takes a mask on the device of its input, cpu; got one on meta. Use mask.to(x.device).",
    ),
    "fewer axes": (
        lambda: own.BatchNorm1d(3)(torch.zeros(3, 3, 5), mask=torch.ones(3, 5, dtype=torch.bool)),
        "BatchNorm1d takes a boolean mask, True where an element counts, with the axes of the input (3, 3, 5), each of "
        "its size or 1; got torch.bool of shape (3, 5). Add axes of size 1, as in mask[:, None].",
    ),
    "numbers": (
        lambda: own.LayerNorm(3)(torch.zeros(2, 3), mask=torch.ones(2, 1)),
        "LayerNorm takes a boolean mask, True where an element counts, with the axes of the input (2, 3), each of its "
        "size or 1; got torch.float32 of shape (2, 1). Add axes of size 1, as in mask[:, None].",
    ),
    "lengths of another batch": (
        lambda: own.GroupNorm(1, 3)(torch.zeros(2, 3, 5), lengths=torch.tensor([1, 2, 3])),
        "GroupNorm takes lengths as whole numbers, one for each of the samples on axis 0 of an input (2, 3, 5); got "
        "torch.int64 of shape (3,). Positions run along axis -1; where they do not, pass mask=.",
    ),
    "lengths of one axis": (
        lambda: own.RMSNorm(3)(torch.zeros(3), lengths=torch.tensor([1, 2, 3])),
        "RMSNorm takes lengths of an input with an axis of positions, 3 axes or more; got one of shape (3,), whose "
        "axes are samples and features. Leave lengths out, or pass mask=.",
    ),
    "fill": (
        lambda: own.LayerNorm(3)(torch.zeros(2, 2, 3), lengths=torch.tensor([1, 2]), fill="mean"),
        "fill says what stands where the mask is False, 'zero' or 'bias'; got 'mean'.",
    ),
    "one element": (
        lambda: own.BatchNorm1d(3)(torch.zeros(2, 3, 2), lengths=torch.tensor([1, 0])),
        "a stored variance divides by M - 1, so every set needs M > 1 elements; got M = 1 under 'b c ... -> c' in an "
        "input of shape (2, 3, 2). Take larger batches, or Running(correction=0)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, text = ERRORS[case]
    with pytest.raises(BadInput) as caught:
        call()
    assert str(caught.value) == text


def test_check_compares_no_masked_call_with_statistics_of_everything():
    torch.manual_seed(0)
    lengths = torch.randint(5, 41, (48,))
    x = pad_sequence([torch.randn(int(n), 6) * 2 + 1 for n in lengths], batch_first=True).movedim(1, 2)
    model = Speech()
    for _ in range(60):
        model(x, lengths)
    report = ns.check(model.eval(), (x, lengths))
    assert [f.code for f in report.findings if f.severity != "info"] == []
    assert {f.code for f in report.findings}.isdisjoint({"NS304", "NS405"})
    assert report.notes == (
        "norms.0, norms.1 were not measured: the call has a mask, lengths or a packed sequence, and which elements "
        "count is no part of a specification, so that outputs and statistics were compared with none",
    )
    refused = ns.transforms.fold(model, (x, lengths))[1]
    assert not refused.done


def test_a_call_with_a_packed_sequence_is_a_call():
    class Packed(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(pack_sequence(list(x))).data

    report = ns.check(Packed(own.BatchNorm1d(6)).eval(), torch.randn(4, 3, 6))
    assert report.notes == (
        "0 was not measured: the call has a mask, lengths or a packed sequence, and which elements count is no part of "
        "a specification, so that outputs and statistics were compared with none",
    )


NO_POSITIONS = {
    "BatchNorm1d": lambda: own.BatchNorm1d(6),
    "SyncBatchNorm": lambda: own.SyncBatchNorm(6),
    "BatchWhitening": lambda: own.BatchWhitening(6, 2),
    "GroupNorm": lambda: own.GroupNorm(2, 6),
    "PixelNorm": own.PixelNorm,
    "LayerNorm": lambda: own.LayerNorm(6),
    "RMSNorm llama": lambda: own.RMSNorm(6, convention="llama"),
    "LayerNorm two axes": lambda: own.LayerNorm((1, 6)),
    "AdaptiveLayerNorm": lambda: own.AdaptiveLayerNorm(6),
}


@pytest.mark.parametrize("name", NO_POSITIONS)
def test_lengths_count_positions_never_channels(name):
    x = torch.randn(4, 1, 6) if name == "LayerNorm two axes" else torch.randn(4, 6)
    beside = {"scale": x, "shift": x} if name.startswith("Adaptive") else {}
    with pytest.raises(BadInput, match="takes lengths of an input with an axis of positions"):
        NO_POSITIONS[name]()(x, lengths=[1, 1, 1, 1], **beside)


@pytest.mark.parametrize("name", [*NO_POSITIONS, "ThresholdBatchNorm1d", "FilterResponseNorm1d"])
@pytest.mark.parametrize("masked", [False, True])
def test_an_unknown_fill_is_said_before_anything_moves(name, masked):
    norm = NO_POSITIONS[name]() if name in NO_POSITIONS else getattr(own, name)(6)
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    x = torch.randn(4, 6, 6)
    mask = {"mask": torch.ones(4, 1, 1, dtype=torch.bool)} if masked else {}
    with pytest.raises(BadInput, match="fill says what stands where the mask is False"):
        norm(x, fill="nonsense", **mask)
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())


@pytest.mark.parametrize(
    "norm", [own.L2Norm(), own.DynamicTanh(6), own.TLU(6)], ids=lambda n: type(n).__name__
)
def test_norms_and_maps_of_elements_take_packed_sequences(norm):
    packed = pack_sequence([torch.randn(5, 6), torch.randn(3, 6)])
    assert torch.equal(norm(packed).data, norm(packed.data))


@pytest.mark.parametrize(
    "norm", [own.ConditionalBatchNorm1d(4, classes=1, momentum=None), own.BatchWhitening(4, 2, momentum=None)]
)
def test_a_batch_without_elements_is_none_to_the_average(norm):
    for x in (torch.zeros(0, 4), torch.tensor([[7.0], [9.0]]).expand(2, 4)):
        norm(x, torch.zeros(len(x), dtype=torch.long)) if hasattr(norm, "modulation") else norm(x)
    assert int(norm.num_batches_tracked) == 1
    assert norm.running_mean.tolist() == [8.0] * 4
