"""The layers of normscope.nn whose gain and bias come with the call, and those that are no normalization."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from layer_cases import filled
from torch import Tensor

import normscope.nn as own


@dataclass(frozen=True)
class ComputedCase:
    name: str
    shape: tuple[int, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    given: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """what comes with the call, and its shape"""
    id: str = ""
    spec: bool = True

    def __str__(self) -> str:
        return self.id or f"{self.name}-{len(self.shape)}d"

    def make(self, **more: Any) -> torch.nn.Module:
        return filled(getattr(own, self.name)(*self.args, **self.kwargs, **more))

    def input(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return (2 * _noise(self.shape, 3) + 1).to(dtype)

    def beside(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """What comes with the input."""
        given = {name: _noise(shape, 11 + i) for i, (name, shape) in enumerate(self.given.items())}
        classes = self.kwargs.get("classes")
        return {
            name: torch.arange(len(value)) % classes if classes and name == "condition" else value.to(dtype)
            for name, value in given.items()
        }


def _noise(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def both(*shape: int) -> dict[str, tuple[int, ...]]:
    return {"scale": shape, "shift": shape}


SPADE = "SpatiallyAdaptive"
GIVEN = [
    ComputedCase("AdaptiveLayerNorm", (4, 3, 7), (7,), given=both(4, 7)),
    ComputedCase("AdaptiveLayerNorm", (4, 7), (7,), {"offset": 0.0, "eps": 1e-3}, both(4, 7)),
    ComputedCase(
        "AdaptiveLayerNorm",
        (4, 2, 3, 7),
        (7,),
        {"per_position": True},
        both(4, 2, 3, 7),
        "AdaptiveLayerNorm-each",
    ),
    ComputedCase("AdaptiveGroupNorm", (2, 6, 5, 3), (3, 6), given=both(2, 6)),
    ComputedCase("AdaptiveGroupNorm", (2, 6, 5), (6, 6), {"offset": 0.0}, both(2, 6)),
    ComputedCase("ConditionalBatchNorm1d", (4, 5), (5,), given=both(4, 5)),
    ComputedCase("ConditionalBatchNorm2d", (3, 5, 4, 2), (5,), {"offset": 0.0, "momentum": None}, both(3, 5)),
    ComputedCase("ConditionalBatchNorm3d", (2, 5, 3, 4, 2), (5,), {"momentum": 0.3}, both(2, 5)),
    ComputedCase(f"{SPADE}BatchNorm2d", (3, 5, 4, 2), (5,), given=both(3, 5, 4, 2)),
    ComputedCase(f"{SPADE}InstanceNorm2d", (3, 5, 4, 2), (5,), {"eps": 1e-3}, both(3, 5, 4, 2)),
]
MADE = [
    ComputedCase(
        "AdaptiveLayerNorm",
        (4, 3, 7),
        (7,),
        {"condition_features": 2},
        {"condition": (4, 2)},
        "AdaptiveLayerNorm-made",
    ),
    ComputedCase(
        "AdaptiveGroupNorm", (4, 6, 5), (3, 6), {"classes": 3}, {"condition": (4,)}, "AdaptiveGroupNorm-made"
    ),
    ComputedCase(
        "ConditionalBatchNorm2d",
        (4, 5, 4, 2),
        (5,),
        {"classes": 3},
        {"condition": (4,)},
        "ConditionalBatchNorm2d-made",
    ),
    ComputedCase(
        f"{SPADE}BatchNorm2d",
        (3, 5, 4, 2),
        (5,),
        {"label_channels": 2, "hidden": 4},
        {"labels": (3, 2, 8, 6)},
        f"{SPADE}BatchNorm2d-made",
    ),
    ComputedCase("AdaptiveInstanceNorm", (3, 5, 4, 2), given={"style": (3, 5, 7)}),
    ComputedCase("AdaptiveInstanceNorm", (3, 5, 6), kwargs={"correction": 1}, given={"style": (3, 5, 4, 2)}),
]
ALONE = [
    ComputedCase("FilterResponseNorm1d", (3, 5, 6), (5,), {"learned_eps": 1e-4}, spec=False),
    ComputedCase("TLU", (3, 5, 6), (5,), spec=False),
    ComputedCase("DynamicTanh", (3, 6, 5), (5,), spec=False),
    ComputedCase("DynamicTanh", (3, 5, 4, 2), (5, False, 0.8), spec=False),
]
COMPUTED = [*GIVEN, *MADE, *ALONE]
