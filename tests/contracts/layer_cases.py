"""Every layer of normscope.nn, with the arguments that change what it computes, and its counterpart in torch.nn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import normscope.nn as own
from normscope.reading import Reading, read
from normscope.reference import RunningState


@dataclass(frozen=True)
class LayerCase:
    name: str
    shape: tuple[int, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    float32: bool = False
    """the convention computes in float32 whatever the input"""
    tensors: bool = True
    """has parameters or buffers"""
    samples: int = 0
    """the axis of samples"""
    made: bool = False
    """weight and bias of the specification are made of the parameters"""

    def __str__(self) -> str:
        return self.id or f"{self.name}-{len(self.shape)}d"

    @property
    def like(self) -> Callable[..., torch.nn.Module] | None:
        """The class of torch.nn that the layer stands in for."""
        same = isinstance(getattr(torch.nn, self.name, None), type) and "convention" not in self.kwargs
        if self.name == "SyncBatchNorm":  # DistributedDataParallel refuses torch's on CPUs, by class
            same = False
        return getattr(torch.nn, self.name) if same else None

    def make(self, **more: Any) -> torch.nn.Module:
        """The layer with parameters and state that hide nothing."""
        return filled(getattr(own, self.name)(*self.args, **self.kwargs, **more))

    def make_torch(self, **more: Any) -> torch.nn.Module:
        assert self.like is not None
        return filled(self.like(*self.args, **self.kwargs, **more))

    def input(self, dtype: torch.dtype = torch.float64) -> Tensor:
        noise = torch.randn(self.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return (2 * noise + 1).to(dtype)


SECOND = ("running_var", "running_covariance", "running_whitening")
"""what layers call the second thing that they store"""


def filled(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                if name == "running_covariance":  # symmetric and positive
                    noise = noise @ noise.mT
                tensor.copy_(0.5 + noise.abs() if name == "running_var" else 0.5 + noise)
    return module


def arrays(reading: Reading) -> dict[str, Any]:
    """The arguments of the reference besides input and specification."""
    held = {name: tensor.detach().double().numpy().copy() for name, tensor in reading.tensors.items()}
    given = {name: held.get(name) for name in ("weight", "bias")}
    if "running_mean" in held:
        (second,) = [held[name] for name in SECOND if name in held]
        given["running"] = RunningState(held["running_mean"], second, int(held.get("num_batches_tracked", 0)))
    return given | {"training": reading.mode_now in ("batch", "input")}


def reading_of(module: torch.nn.Module, case: LayerCase) -> Reading:
    return read(module, input_ndim=len(case.shape))


BATCH, INSTANCE = "BatchNorm", "InstanceNorm"
RENORM, GHOST, THRESHOLD = "BatchRenorm", "GhostBatchNorm", "Threshold"
CASES = [
    LayerCase(f"{BATCH}1d", (6, 5), (5,)),
    LayerCase(f"{BATCH}1d", (4, 5, 3), (5, 1e-3, 0.3)),
    LayerCase(f"{BATCH}2d", (3, 5, 4, 2), (5,)),
    LayerCase(f"{BATCH}2d", (3, 5, 4, 2), (5, 1e-3, None), id=f"{BATCH}2d-cumulative"),
    LayerCase(f"{BATCH}2d", (3, 5, 4, 2), (5,), {"affine": False}, id=f"{BATCH}2d-plain"),
    LayerCase(f"{BATCH}2d", (3, 5, 4, 2), (5,), {"track_running_stats": False}, id=f"{BATCH}2d-untracked"),
    LayerCase(f"{BATCH}3d", (2, 5, 3, 4, 2), (5,)),
    LayerCase("SyncBatchNorm", (6, 5), (5, 1e-3, 0.3, False)),
    LayerCase("SyncBatchNorm", (3, 5, 4, 2), (5,)),
    LayerCase(f"{RENORM}1d", (6, 5), (5,), {"r_max": 1.5, "d_max": 0.5}),
    LayerCase(f"{RENORM}1d", (4, 5, 3), (5, 1e-3, 0.3), {"averages": "variance", "r_max": 9.0, "d_max": 9.0}),
    LayerCase(f"{RENORM}2d", (3, 5, 4, 2), (5,)),
    LayerCase(
        f"{RENORM}2d", (3, 5, 4, 2), (5, 1e-3, None, False), {"r_max": 2.0}, id=f"{RENORM}2d-cumulative"
    ),
    LayerCase(f"{RENORM}3d", (2, 5, 3, 4, 2), (5,), {"bias": False}),
    LayerCase(f"{GHOST}1d", (6, 5), (5,), {"size": 2}),
    LayerCase(
        f"{GHOST}1d", (7, 5, 3), (5, 1e-3, 0.3), {"size": 3, "remainder": "short"}, id=f"{GHOST}1d-short"
    ),
    LayerCase(f"{GHOST}2d", (7, 5, 4, 2), (5,), {"number": 3, "remainder": "balanced"}),
    LayerCase(
        f"{GHOST}2d", (6, 5, 4, 2), (5, 1e-3, 0.3), {"size": 3, "updates": "once"}, id=f"{GHOST}2d-once"
    ),
    LayerCase(
        f"{GHOST}3d",
        (4, 5, 3, 4, 2),
        (5, 1e-3, 0.3, False, False),
        {"size": 2},
        id=f"{GHOST}3d-untracked",
        tensors=False,
    ),
    LayerCase("BatchWhitening", (9, 6), (6, 2)),
    LayerCase("BatchWhitening", (4, 6, 5), (6, 3, 1e-3, None), {"method": "cholesky", "eps_at": "trace"}),
    LayerCase("BatchWhitening", (3, 6, 4, 2), (6, 2, 1e-3, 0.3, False), {"state": "whitening"}),
    LayerCase(
        "BatchWhitening", (9, 6), (6, 2), {"track_running_stats": False}, id="BatchWhitening-untracked"
    ),
    LayerCase("IterNorm", (3, 6, 4, 2), (6, 3), {"bias": False}),
    LayerCase("IterNorm", (4, 6, 5), (6, 2), {"iterations": 3, "state": "covariance"}),
    LayerCase("GroupWhitening", (3, 6, 5), (2, 6)),
    LayerCase("GroupWhitening", (3, 6, 4, 2), (3, 6, 1e-3), {"method": "iternorm", "eps_at": "trace"}),
    LayerCase("GroupWhitening", (5, 8), (2, 8, 1e-3, False), {"method": "cholesky"}, tensors=False),
    LayerCase("WeightStandardization", (4, 3, 3, 2), ((4, 3, 3, 2),), tensors=False),
    LayerCase("WeightStandardization", (4, 7), ((4, 7), "biased", 1e-3), tensors=False),
    LayerCase("WeightStandardization", (4, 3, 5), ((4, 3, 5), "scaled"), {"gamma": 1.7}),
    LayerCase(f"{INSTANCE}1d", (3, 5, 6), (5,), {"affine": True}),
    LayerCase(f"{INSTANCE}1d", (5, 6), (5,), {"affine": True}, id=f"{INSTANCE}1d-unbatched"),
    LayerCase(f"{INSTANCE}2d", (3, 5, 4, 2), (5, 1e-3, 0.3, True, True), id=f"{INSTANCE}2d-tracked"),
    LayerCase(f"{INSTANCE}2d", (3, 5, 4, 2), (5,), tensors=False),
    LayerCase(f"{INSTANCE}3d", (2, 5, 3, 4, 2), (5,), {"affine": True}),
    LayerCase("LayerNorm", (4, 3, 7), (7,)),
    LayerCase("LayerNorm", (4, 3, 7), ((3, 7), 1e-3, True, False), id="LayerNorm-two-axes"),
    LayerCase("LayerNorm", (4, 7), (7,), {"elementwise_affine": False}, id="LayerNorm-plain", tensors=False),
    LayerCase("ChannelsFirstLayerNorm", (2, 7, 3, 4), (7,)),
    LayerCase("ChannelsFirstLayerNorm", (4, 7), (7, 1e-3, True, False)),
    LayerCase("GroupNorm", (2, 6, 5, 3), (3, 6)),
    LayerCase("GroupNorm", (4, 6), (2, 6, 1e-3, False), id="GroupNorm-plain", tensors=False),
    LayerCase("RMSNorm", (4, 3, 7), (7,)),
    LayerCase("RMSNorm", (4, 3, 7), ([3, 7], 1e-3), id="RMSNorm-two-axes"),
    LayerCase("RMSNorm", (4, 7), (7, 1e-6, False), id="RMSNorm-plain", tensors=False),
    *(
        LayerCase("RMSNorm", (4, 3, 7), (7,), {"convention": name}, id=f"RMSNorm-{name}", float32=True)
        for name in ("llama", "t5", "gemma")
    ),
    LayerCase("ScaleNorm", (4, 3, 7), (7,)),
    LayerCase("PixelNorm", (2, 7, 3, 4), tensors=False),
    LayerCase("L2Norm", (4, 7), tensors=False),
    LayerCase("L2Norm", (2, 7, 3), kwargs={"dim": 1}, id="L2Norm-dim-1", tensors=False),
    LayerCase("FilterResponseNorm1d", (3, 5, 6), (5,)),
    LayerCase("FilterResponseNorm2d", (3, 5, 4, 2), (5, 1e-3)),
    LayerCase("FrozenBatchNorm", (3, 5, 4, 2), (5,)),
    LayerCase("FrozenBatchNorm", (6, 5), (5, 1e-3)),
    LayerCase(f"{THRESHOLD}BatchNorm1d", (3, 4, 5), (5, 0.5)),
    LayerCase(f"{THRESHOLD}BatchNorm1d", (3, 2, 5, 4), (5, 0.5, 2.0, 1e-3, None), {"gain": "weight"}),
    LayerCase(f"{THRESHOLD}BatchNorm2d", (3, 2, 5, 4, 3), (5, 0.5), {"layout": "b t c ..."}),
    LayerCase(f"{THRESHOLD}BatchNorm2d", (6, 5, 4, 3), (5, 0.5), {"layout": "(t b) c ...", "steps": 3}),
    LayerCase(f"{THRESHOLD}BatchNorm3d", (2, 2, 5, 3, 2, 2), (5,), {"bias": False}),
    LayerCase(f"{THRESHOLD}LayerNorm", (3, 2, 5, 4), (5, 0.5)),
    LayerCase(f"{THRESHOLD}LayerNorm", (3, 2, 5), (5, 0.5), {"per_step": False, "layout": "b t c ..."}),
    LayerCase(
        f"{THRESHOLD}LayerNorm",
        (6, 5),
        (5, 0.5, 1.0, 1e-3, False),
        {"per_step": False, "layout": "(t b) c ...", "steps": 3},
        tensors=False,
    ),
    LayerCase(f"{THRESHOLD}GroupNorm", (6, 4, 3), (2, 4, 0.5), {"layout": "(t b) c ...", "steps": 3}),
    LayerCase(f"{THRESHOLD}GroupNorm", (3, 2, 4, 3, 2), (2, 4, 0.5), {"per_step": False}),
    LayerCase(f"{THRESHOLD}RMSNorm", (3, 2, 5, 4), (5, 0.5)),
    LayerCase("BatchNormThroughTime1d", (3, 4, 5), (3, 5), samples=1),
    LayerCase("BatchNormThroughTime2d", (2, 3, 5, 4, 3), (3, 5, 1e-3, None), {"layout": "b t c ..."}),
    LayerCase("BatchNormThroughTime3d", (3, 2, 5, 3, 2, 2), (3, 5), {"bias": True}, samples=1),
    LayerCase("TemporalEffectiveBatchNorm1d", (3, 4, 5), (3, 5), samples=1, made=True),
    LayerCase("TemporalEffectiveBatchNorm2d", (6, 5, 4, 3), (3, 5), {"layout": "(t b) c ..."}, made=True),
    LayerCase(
        "TemporalEffectiveBatchNorm3d", (3, 2, 5, 3, 2, 2), (3, 5), {"bias": False}, samples=1, made=True
    ),
]
WITH_TORCH = [case for case in CASES if case.like is not None]
STORING = [case for case in CASES if isinstance(getattr(case.make(), "running_mean", None), Tensor)]
