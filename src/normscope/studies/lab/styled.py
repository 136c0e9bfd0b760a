"""Images of three channels whose level, contrast and style are drawn apart from what they show."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

FACTORS = ("level", "contrast", "channel mean", "channel deviation", "channel correlation")
"""level and contrast are of all channels alike; the others differ between channels, and are what is called style"""
STRONGEST = {
    "level": 1.0,
    "contrast": 0.7,
    "channel mean": 1.0,
    "channel deviation": 0.7,
    "channel correlation": 0.6,
}
WEAKEST = 0.25
"""of the strongest: no label is decided by a hair"""


@dataclass(frozen=True)
class Styled:
    images: Tensor
    """(N, 3, H, W)"""
    factors: dict[str, Tensor]
    """name -> (N,), as drawn: negative in one half, positive in the other"""

    def label(self, factor: str) -> Tensor:
        """1 where the factor is above 0."""
        return (self.factors[factor] > 0).long()


def halved(images: Tensor) -> Tensor:
    """Half as high and wide, by means, where they are large; studies of many arms train four times as fast."""
    return functional.avg_pool2d(images, 2) if images.shape[-1] >= 20 else images


def styled(images: Tensor, generator: torch.Generator) -> Styled:
    """Each image (1, H, W) as three channels with a style of its own.

    The image and its two slopes are made uncorrelated, with mean 0 and deviation 1 in each image. Channels 0 and 1 then
    get the correlation r, channel c the deviation exp(tilt_c) and the mean offset_c, with tilts and offsets that are
    opposite in channels 0 and 1 and 0 in channel 2. At last everything is multiplied by exp(contrast), and the level is
    added. All five are drawn independently of each other and of the image.

    >>> made = styled(torch.rand(4, 1, 8, 8), torch.Generator().manual_seed(0))
    >>> torch.allclose(made.images[:, 2].mean((1, 2)), made.factors["level"], atol=1e-5)
    True
    """
    drawn = {}
    for name in FACTORS:
        sign = (
            torch.randperm(len(images), generator=generator) % 2 * 2 - 1
        )  # as many of one sign as of the other
        size = WEAKEST + (1 - WEAKEST) * torch.rand(len(images), generator=generator)
        drawn[name] = STRONGEST[name] * sign * size
    maps = _uncorrelated(images)
    r = _wide(drawn["channel correlation"])
    first, second, third = maps.unbind(1)
    maps = torch.stack([first, r * first + (1 - r * r).sqrt() * second, third], 1)
    opposite = torch.tensor([1.0, -1.0, 0.0])
    deviations = (drawn["channel deviation"][:, None] * opposite).exp()
    own = maps * _wide(deviations) + _wide(drawn["channel mean"][:, None] * opposite)
    return Styled(own * _wide(drawn["contrast"].exp()[:, None]) + _wide(drawn["level"][:, None]), drawn)


def _uncorrelated(images: Tensor) -> Tensor:
    """Channels (image, slope across, slope down) with the identity as their covariance over the places of an image."""
    across = images.roll(-1, 3) - images.roll(1, 3)
    down = images.roll(-1, 2) - images.roll(1, 2)
    flat = torch.cat([images, across, down], 1).flatten(2).double()
    flat = flat - flat.mean(2, keepdim=True)
    flat = flat / flat.std(2, correction=0, keepdim=True).clamp_min(1e-6)
    covariance = flat @ flat.mT / flat.shape[2] + 1e-6 * torch.eye(3, dtype=torch.float64)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), flat, upper=False)
    made: Tensor = white.float().reshape(len(images), 3, *images.shape[2:])
    return made


def _wide(x: Tensor) -> Tensor:
    return x.unsqueeze(-1).unsqueeze(-1)
