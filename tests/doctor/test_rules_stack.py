"""Rules on norms in a row and around residual sums: repeated norms, and stacks without a final norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import normscope
from normscope.doctor.report import Finding
from normscope.doctor.session import Session
from normscope.doctor.sites import find_sites

torch.set_num_threads(1)


def found(model: nn.Module, code: str, inputs: object) -> tuple[Finding, ...]:
    report = normscope.check(model, inputs, select=[code])
    assert not report.not_run, report.not_run
    return report.findings


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "group 1": lambda: nn.GroupNorm(1, 8),
    "group 2": lambda: nn.GroupNorm(2, 8),
    "group 4": lambda: nn.GroupNorm(4, 8),
    "layer w": lambda: nn.LayerNorm(6),
    "layer hw": lambda: nn.LayerNorm((6, 6)),
    "layer chw": lambda: nn.LayerNorm((8, 6, 6)),
    "rms w": lambda: nn.RMSNorm(6, eps=1e-5),
    "rms hw": lambda: nn.RMSNorm((6, 6), eps=1e-5),
}


def uneven() -> torch.Tensor:
    """(16, 8, 6, 6) whose mean and scale differ along every axis, so that no two norms agree by chance."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    scale = torch.exp(0.5 * (normal(16, 8, 1, 1) + normal(1, 1, 6, 1) + normal(1, 1, 1, 6)))
    return scale * normal(16, 8, 6, 6) + normal(16, 8, 1, 1) + normal(1, 8, 6, 1) + normal(16, 1, 1, 6)


class TestRepeatedNorm:
    @pytest.mark.parametrize(
        "first", [n if n in ("batch", "rms w") else pytest.param(n, marks=pytest.mark.slow) for n in NORMS]
    )
    @torch.no_grad()
    def test_what_is_told_is_what_changes_nothing(self, first: str) -> None:
        """Law: a norm is told exactly where the pair without it computes the same (gains 1, biases 0, training)."""
        x = uneven()
        for second in NORMS:
            one, two = NORMS[first]().double(), NORMS[second]().double()
            findings = found(nn.Sequential(one, two), "NS108", x)
            assert len(findings) < 2, (first, second)
            y = two(one(x))
            without = {"1": float((y - one(x)).abs().max()), "0": float((y - two(x)).abs().max())}
            told = findings[0].site if findings else None
            # A set of variance v comes out with v / (v + eps); the smallest here is about 0.01, so eps changes up to
            # 1e-3 / 2 of values below 10. What is not redundant changes values of order one.
            small = {site for site, change in without.items() if change < 1e-2}
            if told is None:
                assert not small, (first, second, without)
                assert min(without.values()) > 0.1, (first, second, without)
            else:
                assert told in small, (first, second, without)

    def test_batch_norm_twice(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8))
        nn.init.uniform_(model[1].weight, 0.5, 2)
        nn.init.normal_(model[1].bias)
        (finding,) = found(model, "NS108", torch.randn(16, 3, 8, 8))
        assert (finding.site, finding.severity) == ("2", "warning")
        assert finding.evidence["redundant"] == "2"
        assert finding.evidence["while_gain_is_uniform"] is False
        assert finding.evidence["left_to_do"] < 1e-3

    def test_layer_norm_twice_is_redundant_until_the_gain_between_is_trained(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.LayerNorm(8))
        x = torch.randn(16, 4)
        (finding,) = found(model, "NS108", x)
        assert (finding.site, finding.severity) == ("2", "info")
        assert "as long as the gain and bias between them are the same" in finding.message
        nn.init.uniform_(model[1].weight, 0.9, 1.1)
        assert not found(model, "NS108", x)

    @pytest.mark.parametrize(
        "model",
        [
            nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8)),
            nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)),
            nn.Sequential(nn.BatchNorm2d(8), nn.Dropout(0.5), nn.BatchNorm2d(8)),
            nn.Sequential(nn.InstanceNorm2d(8), nn.GroupNorm(2, 8), nn.ReLU())[1:],
        ],
        ids=["activation", "convolution", "dropout", "alone"],
    )
    def test_innocent(self, model: nn.Module) -> None:
        assert not found(model, "NS108", torch.randn(16, 8, 6, 6))

    def test_the_first_is_needed_where_something_else_reads_it(self) -> None:
        class Fork(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.two = nn.BatchNorm2d(8), nn.InstanceNorm2d(8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.one(x)
                return self.two(y) + y

        assert not found(Fork(), "NS108", torch.randn(16, 8, 6, 6))

    def test_the_second_of_a_forked_stream_is_info(self) -> None:
        """Normalized embeddings are the residual stream, and the first block begins as all do."""

        class Stream(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = nn.functional.rms_norm(x, (8,))
                return x + self.linear(nn.functional.rms_norm(x, (8,)))

        (finding,) = found(Stream(), "NS108", torch.randn(16, 8))
        assert (finding.site, finding.severity) == ("F.rms_norm#2", "info")

    def test_views_between_are_followed(self) -> None:
        class Turned(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.two = nn.InstanceNorm1d(6), nn.LayerNorm(6)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.two(self.one(x).transpose(1, 2))

        # the sizes are equal, and the second norm takes the axis that the first one kept
        assert not found(Turned(), "NS108", torch.randn(16, 6, 6))

    def test_the_second_makes_up_for_what_eps_took(self) -> None:
        model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
        assert found(model, "NS108", torch.randn(16, 3, 8, 8))
        assert not found(model, "NS108", 1e-3 * torch.randn(16, 3, 8, 8))


class Block(nn.Module):
    """One pre-norm branch."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(self.norm(x))


class Post(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.body(x))


class Sandwich(Block):
    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.after = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(self.body(self.norm(x)))


class Both(Sandwich):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(super(Sandwich, self).forward(x))


def tokens() -> torch.Tensor:
    return torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(0))


class TestJoins:
    """What ends a pre-norm branch, as the rule reads it."""

    @staticmethod
    def joins(model: nn.Module, x: torch.Tensor) -> dict[str, tuple[str, bool] | None]:
        with Session(model) as session:
            sites = find_sites(session, (x,))
        found = ((site.name, call.join) for site in sites for call in site.calls)
        return {name: None if j is None else (j.path, j.normalized_later) for name, j in found}

    def test_of_a_stack(self) -> None:
        model = nn.Sequential(nn.Linear(16, 16), Block(), Block(), nn.LayerNorm(16), nn.Linear(16, 2))
        joins = self.joins(model, tokens())
        assert joins == {"1.norm": ("1", True), "2.norm": ("2", True), "3": None}
        assert self.joins(model[:3], tokens()) == {"1.norm": ("1", True), "2.norm": ("2", False)}

    def test_not_of_post_norm_or_behind_another_layer(self) -> None:
        class Behind(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.norm(self.body(x))

        assert self.joins(Post(), tokens()) == {"norm": None}
        assert self.joins(Behind(), tokens()) == {"norm": None}

    def test_through_scales_views_and_in_place_sums(self) -> None:
        class Odd(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.body(self.norm(x).flatten(0, 1)).view_as(x)
                x = 0.5 * x
                x += 2 * y
                return x

        assert self.joins(Odd(), tokens()) == {"norm": ("", False)}

    def test_a_shape_taken_from_the_stream_is_no_sum(self) -> None:
        """As in GPT-NeoX-Japanese, whose bias is expanded as the stream."""

        class Expanded(Block):
            def __init__(self) -> None:
                super().__init__()
                self.bias = nn.Parameter(torch.ones(16))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + torch.relu(self.body(self.norm(x)) + self.bias.expand_as(x))

        joins = self.joins(nn.Sequential(Expanded(), nn.LayerNorm(16)), tokens())
        assert joins == {"0.norm": ("0", True), "1": None}
        with Session(Expanded()) as session:
            (site,) = find_sites(session, (tokens(),))
        assert site.calls[0].join is not None
        assert site.calls[0].join.ends == ("output",)

    def test_branches_side_by_side_end_in_one_sum(self) -> None:
        """As in Cohere's models: x + attention(norm(x)) + perceptron(norm(x))."""

        class Parallel(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.norm(x)
                return x + self.body(y) + torch.tanh(y)

        model = nn.Sequential(Parallel(), Parallel(), nn.Linear(16, 4))
        assert self.joins(model, tokens()) == {"0.norm": ("0", True), "1.norm": ("1", False)}
        (finding,) = found(model, "NS602", tokens())
        assert finding.evidence["branches"] == 2

    def test_a_part_of_the_input_is_not_the_input(self) -> None:
        class Part(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x[:, :1] + self.body(self.norm(x))

        assert self.joins(Part(), tokens()) == {"norm": None}


class TestFinalNormMissing:
    def test_into_a_linear_head(self) -> None:
        model = nn.Sequential(nn.Linear(16, 16), Block(), Block(), Block(), nn.Linear(16, 4))
        (finding,) = found(model, "NS602", tokens())
        assert (finding.site, finding.severity) == ("3.norm", "warning")
        assert "goes into a linear layer (4) without a norm" in finding.message
        assert finding.evidence["branches"] == 3
        stream = model[:3](tokens()).detach().double()
        size = stream.var(-1, correction=0).quantile(0.5).sqrt().item()
        # the same numbers, summed in another order in float32
        assert finding.evidence["size_at_last"] == pytest.approx(size, rel=1e-4)

    def test_through_pooling_and_activations(self) -> None:
        class Pooled(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.relu(x).mean(1)

        (finding,) = found(nn.Sequential(Block(), Block(), Pooled(), nn.Linear(16, 4)), "NS602", tokens())
        assert finding.severity == "warning"

    @pytest.mark.parametrize("end", [nn.Identity(), nn.Conv1d(5, 5, 3)], ids=["returned", "convolution"])
    def test_other_ends_are_info(self, end: nn.Module) -> None:
        (finding,) = found(nn.Sequential(Block(), Block(), end), "NS602", tokens())
        assert finding.severity == "info"

    @pytest.mark.parametrize(
        "model",
        [
            nn.Sequential(Block(), Block(), nn.LayerNorm(16), nn.Linear(16, 4)),
            nn.Sequential(Block(), Block(), nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 4)),
            nn.Sequential(Post(), Post(), nn.Linear(16, 4)),
            nn.Sequential(Sandwich(), Sandwich(), nn.LayerNorm(16), nn.Linear(16, 4)),
            nn.Sequential(Block(), nn.Linear(16, 4)),
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)),
        ],
        ids=["final norm", "norm in the head", "post-norm", "sandwich", "one block", "no residuals"],
    )
    def test_innocent(self, model: nn.Module) -> None:
        assert not found(model, "NS602", tokens())

    def test_silent_where_a_norm_by_hand_stands_behind_a_mean(self) -> None:
        class Pool(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.mean(1)

        class Norm(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)

        stack = [Block(), Block(), Block(), Pool()]
        assert found(nn.Sequential(*stack, Norm(), nn.Linear(16, 4)), "NS602", tokens()) == ()
        (finding,) = found(nn.Sequential(*stack, nn.Linear(16, 4)), "NS602", tokens())
        assert finding.severity == "warning"

    def test_a_sum_that_nothing_reads(self) -> None:
        class Dropped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stack = nn.Sequential(Block(), Block())

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.stack(x)
                return 2 * x

        assert not found(Dropped(), "NS602", tokens())

    @pytest.mark.parametrize("final", [True, False])
    def test_torch_encoder(self, final: bool) -> None:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        norm = nn.LayerNorm(16) if final else None
        encoder = nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=False)
        findings = found(nn.Sequential(encoder, nn.Linear(16, 4)), "NS602", tokens())
        assert [(f.site, f.severity) for f in findings] == [("0.layers.1.norm2", "warning")] * (not final)

    def test_twice_around_the_sum_is_info(self) -> None:
        (finding,) = found(nn.Sequential(Both(), Both(), Both(), nn.Linear(16, 4)), "NS602", tokens())
        assert (finding.site, finding.severity, len(finding.also)) == ("1.norm", "info", 1)
        assert finding.evidence["norm_of_the_sum"] == "0.after"

    def test_convolutional_networks_are_silent(self) -> None:
        class Residual(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(
                    nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
                    nn.BatchNorm2d(8),
                )  # fmt: skip

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.relu(x + self.body(x))

        model = nn.Sequential(Residual(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
        assert not found(model, "NS602", torch.randn(4, 8, 8, 8))


TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**TEXT, "intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
REAL = {
    "Llama": ("LlamaForCausalLM", WIDE, "model.norm"),
    "Gemma2": ("Gemma2ForCausalLM", {**WIDE, "head_dim": 8}, "model.norm"),
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4}, "transformer.ln_f"),
    "GPTNeoX": ("GPTNeoXForCausalLM", {**TEXT, "intermediate_size": 48}, "gpt_neox.final_layer_norm"),
    "ViT": ("ViTForImageClassification", {**VISION, "image_size": 32, "patch_size": 8}, "vit.layernorm"),
    "Bert": ("BertForSequenceClassification", {**TEXT, "intermediate_size": 48}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_models_of_transformers(name: str) -> None:
    """Silent as they are; without their final norm they are told, each at the last block."""
    transformers = pytest.importorskip("transformers")
    kind, settings, final = REAL[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**settings)).eval()
    images = {"pixel_values": torch.randn(4, 3, 32, 32)}
    inputs = images if name == "ViT" else {"input_ids": torch.randint(1, 99, (4, 12))}
    report = normscope.check(model, inputs, select=["NS107", "NS108", "NS602"])
    assert report.findings == ()
    if not final:
        return
    holder, _, last = final.rpartition(".")
    setattr(model.get_submodule(holder), last, nn.Identity())
    (finding,) = normscope.check(model, inputs, select=["NS602"]).findings
    assert finding.severity == "warning"
    assert finding.evidence["reached"] == ["linear"]
