"""``--weights FOLDER``: its weights go into the model, and its config says which eps is expected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import normscope as ns
from normscope.targets import checkpoints

EPS = 1e-12


class Net(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.norm = nn.LayerNorm(8, eps=eps)
        self.last = nn.LayerNorm(8, eps=eps)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.embed.weight  # tied: a folder holds it once

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.norm(self.embed(tokens))))


def written(folder: Path, *, sharded: bool = False, eps: float | None = EPS) -> Net:
    torch.manual_seed(1)
    net = Net()
    tensors = {name: t.detach().clone() for name, t in net.state_dict().items() if name != "head.weight"}
    if sharded:
        names = list(tensors)
        places = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(names)}
        for file in set(places.values()):
            save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"layer_norm_eps": eps} if eps else {}))
    return net


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_of_a_folder_are_loaded(tmp_path: Path, sharded: bool) -> None:
    saved, net = written(tmp_path, sharded=sharded), Net()
    state, config, notes = checkpoints.load_into(net, tmp_path)
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in saved.state_dict().items())
    assert net.head.weight is net.embed.weight
    assert "head.weight" not in state
    assert (config, notes) == ({"layer_norm_eps": EPS}, [])


def findings(net: Net, folder: Path) -> list[tuple[str, str, str]]:
    state, config, _ = checkpoints.load_into(net, folder)
    report = ns.check(net, state=state, config=config, select=["NS105"])
    return [(finding.severity, finding.site, finding.message) for finding in report.findings]


def test_code_with_another_eps_than_its_weights(tmp_path: Path) -> None:
    written(tmp_path)
    ((severity, site, message),) = findings(Net(), tmp_path)
    assert (severity, site) == ("warning", "norm")
    assert message.startswith("eps is 1e-05, the config of the weights says 1e-12.")
    assert "1 other site" in message


def test_code_that_follows_is_innocent(tmp_path: Path) -> None:
    written(tmp_path)
    assert findings(Net(EPS), tmp_path) == []
    written(tmp_path, eps=None)
    assert findings(Net(), tmp_path) == []


def test_an_entry_that_model_code_never_reads_is_no_warning(tmp_path: Path) -> None:
    """The model carries the same config, and all its norms have another eps: as its authors wrote it."""
    written(tmp_path)
    net = Net()
    net.config = {"layer_norm_eps": EPS}
    ((severity, _, message),) = findings(net, tmp_path)
    assert severity == "info"
    assert "the model's config says 1e-12. Most norms of this model do not follow it." in message
