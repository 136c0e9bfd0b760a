"""``normscope.check`` finds in a model with our layers what it finds with torch's, and ``verify`` passes on each."""

from __future__ import annotations

import copy
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import normscope as ns
import normscope.nn as own
from normscope import demo, verify

CHANNELS, FEATURES = 8, 12


def with_ours(model: nn.Module) -> nn.Module:
    """A copy in which each norm of torch is ours with the same arguments, tensors and flags."""
    twin = copy.deepcopy(model)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            cls = getattr(own, type(child).__name__, None)
            if cls is not None and type(child).__module__.startswith("torch.nn"):
                ours = cls.__new__(cls)
                ours.__dict__ = child.__dict__
                setattr(parent, name, ours)
    return twin


def said(report: ns.Report):
    """All that a report says, but for where a class lives and how rounding came out, such as how far a gradient is
    from the 0 that it would be."""

    def rounded(text):
        return re.sub(r"\d(\.\d+)?e-0[6-9]", "about 0", text)

    def finding(f):
        numbers = {
            k: pytest.approx(v, rel=1e-3, abs=1e-5) if isinstance(v, float) else v
            for k, v in f.evidence.items()
        }
        return (
            f.code,
            f.severity,
            f.site,
            f.mode,
            rounded(f.message),
            f.fix,
            numbers,
            [finding(g) for g in f.also],
        )

    sites = [
        (s.name, s.kind, s.type_name.split(".")[-1], s.spec, s.mode_train, s.mode_eval, s.calls, s.shapes)
        for s in report.sites
    ]
    return (
        [finding(f) for f in report.findings],
        sites,
        report.passed,
        [(n.code, n.site) for n in report.not_run],
    )


@pytest.mark.parametrize("name", demo.NAMES)
def test_demo_has_the_same_findings(name):
    model, inputs, targets, optimizer = demo.load(name)
    twin = with_ours(model)
    optimizer_ = demo.optimizer_of(twin, faulty=name == demo.FAULTY)
    keywords = {"loss_fn": demo.loss, "dataset_size": demo.TRAINING_SAMPLES}
    torchs = ns.check(model, inputs, targets, optimizer=optimizer, **keywords)
    ours = ns.check(twin, inputs, targets, optimizer=optimizer_, **keywords)
    assert {site.type_name for site in ours.sites} == {
        f"normscope.nn.{n}" for n in ("BatchNorm1d", "BatchNorm2d", "LayerNorm")
    }
    assert said(ours) == said(torchs)
    assert ours.findings


class Zoo(nn.Module):
    """One of each, at rather different scales."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CHANNELS, 3, bias=True)
        self.batch = nn.BatchNorm2d(CHANNELS)
        self.group = nn.GroupNorm(2, CHANNELS, eps=0.5)
        self.instance = nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True)
        self.linear = nn.Linear(CHANNELS, FEATURES)
        self.layer = nn.LayerNorm(FEATURES)
        self.rms = nn.RMSNorm(FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.instance(self.group(self.batch(self.conv(x)).relu()))
        y: torch.Tensor = self.rms(self.layer(self.linear(x.mean((2, 3)))))
        return y


def test_zoo_has_the_same_findings():
    torch.manual_seed(0)
    model = Zoo()
    x = torch.randn(16, 3, 7, 7) + 1
    for _ in range(20):
        model(x)
    assert said(ns.check(with_ours(model), x)) == said(ns.check(model, x))


def test_check_leaves_statistics_as_they_were():
    model = nn.Sequential(nn.Linear(3, 4), own.BatchNorm1d(4), own.LayerNorm(4))
    before = copy.deepcopy(model.state_dict())
    ns.check(model, torch.randn(16, 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_own_layers_are_sites_with_tensors_and_modes():
    model = nn.Sequential(
        own.FrozenBatchNorm(4), own.ScaleNorm(5), own.L2Norm(), own.RMSNorm(5, convention="gemma")
    )
    report = ns.check(model, torch.randn(16, 4, 5))
    assert [(s.name, s.kind, s.type_name, s.mode_train, s.mode_eval) for s in report.sites] == [
        ("0", "module", "normscope.nn.FrozenBatchNorm", "frozen", "frozen"),
        ("1", "module", "normscope.nn.ScaleNorm", "input", "input"),
        ("2", "module", "normscope.nn.L2Norm", "input", "input"),
        ("3", "module", "normscope.nn.RMSNorm", "input", "input"),
    ]


class Functions(nn.Module):
    """Norms that are calls, one of them of a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ns.functional.layer_norm(x, (FEATURES,), self.weight)
        y, total = ns.functional.add_rms_norm(self.linear(y), x, (FEATURES,), self.weight, 1e-6)
        return ns.functional.normalize(y, ns.families.l2_normalize()) + total


def test_calls_of_functions_are_sites():
    report = ns.check(Functions(), torch.randn(16, FEATURES))
    found = [(s.type_name, s.spec.stats, s.spec.scale, s.spec.eps, s.calls, s.shapes) for s in report.sites]
    shapes = ((16, FEATURES),)
    assert found == [
        ("normscope.functional.layer_norm", "... d -> ...", "std", 1e-5, 1, shapes),
        ("normscope.functional.rms_norm", "... d -> ...", "rms", 1e-6, 1, shapes),
        ("normscope.functional.normalize", "... d -> ...", "l2", 1e-12, 1, shapes),
    ]
    assert {s.kind for s in report.sites} == {"functional"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.norm = own.RMSNorm(FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.linear(x)).relu()
        return y


def test_norm_of_an_exported_program_is_a_site():
    """With native kernels it holds one of our operators, else one of torch's."""
    program = torch.export.export(Block(), (torch.randn(16, FEATURES),)).module()
    report = ns.check(program, torch.randn(16, FEATURES))
    (site,) = report.sites
    assert (site.spec.stats, site.spec.scale, site.spec.weight) == ("... d -> ...", "rms", "d")


LAYERS = [
    own.BatchNorm1d(6),
    own.BatchNorm2d(6, momentum=None),
    own.BatchNorm3d(6, affine=False),
    own.FrozenBatchNorm(6),
    own.InstanceNorm1d(6, affine=True),
    own.InstanceNorm2d(6, track_running_stats=True),
    own.InstanceNorm3d(6),
    own.LayerNorm(6),
    own.LayerNorm((3, 6), bias=False),
    own.ChannelsFirstLayerNorm(6),
    own.GroupNorm(3, 6),
    own.RMSNorm(6),
    *(own.RMSNorm(6, convention=name) for name in ("llama", "t5", "gemma")),
    own.ScaleNorm(6),
    own.PixelNorm(),
    own.L2Norm(),
    own.L2Norm(dim=1),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda m: repr(m).split(",")[0] + getattr(m, "convention", ""))
def test_verify_passes(layer):
    report = verify.run_layer(copy.deepcopy(layer))
    failed = [item for item in report.evidence if not item.passed]
    assert report.evidence
    assert not failed, report.text(long=True)


def test_functions_may_be_first_loaded_by_the_forward_that_is_checked() -> None:
    code = (
        "import torch, normscope as ns\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return ns.normalize(x, ns.families.layer_norm(weight=False, bias=False))\n"
        "print(ns.check(Net(), torch.randn(8, 4)).sites[0].type_name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.strip() == "normscope.functional.normalize"
