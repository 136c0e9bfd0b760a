"""What a look says of one site, in plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from normscope.doctor.report import plain

if TYPE_CHECKING:
    from normscope.doctor.site import Site


@dataclass
class SiteLook:
    """One site in one look, in plain numbers. Statistics are those of the site's first forward pass in that step."""

    step: int
    site: str
    mode: str
    shape: tuple[int, ...]
    dtype: str
    calls: int = 0
    """forward passes"""
    recomputed: int = 0
    """passes made in the backward pass"""
    repeated: int = 0
    """passes with the batch statistics of an earlier one"""
    added: int = 0
    """backward passes that the gradient of the step is the sum of, 0 where unknown"""
    samples: int = 0
    elements: int = 0
    """of a statistic set"""
    batch_mean: float = float("nan")
    """root mean square over the sets"""
    batch_variance: float = float("nan")
    """median over the sets"""
    running_mean: float = float("nan")
    running_variance: float = float("nan")
    shift: float = float("nan")
    """batch against running means: root mean square in units of the running denominator"""
    denominator_min: float = float("nan")
    denominator_median: float = float("nan")
    near_eps: float = float("nan")
    """share of the sets whose variance is below eps"""
    gain_min: float = float("nan")
    gain_median: float = float("nan")
    gain_max: float = float("nan")
    gain_gradient: float = float("nan")
    """root mean square of the gradient of the gain, as the optimizer saw it; NaN without one"""
    bias_gradient: float = float("nan")

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = plain({f.name: getattr(self, f.name) for f in fields(self)})
        return out


def add_parameters(look: SiteLook, site: Site) -> None:
    """Gains and gradients, as the optimizer sees them."""
    weight, bias = site.tensors.get("weight"), site.tensors.get("bias")
    if weight is not None and weight.numel() and site.spec is not None:
        gain = (site.spec.weight_offset + weight.detach().float()) * site.spec.gain
        look.gain_min, look.gain_max = float(gain.min()), float(gain.max())
        look.gain_median = float(gain.median())
    for name, tensor in (("gain_gradient", weight), ("bias_gradient", bias)):
        gradient = None if tensor is None or not tensor.is_leaf else tensor.grad
        if gradient is not None and gradient.numel():
            setattr(look, name, float(gradient.float().square().mean().sqrt()))
