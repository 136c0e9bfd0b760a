"""Are the samples of a batch independent? Sampling errors, and every rule that rests on them, assume so.

Three looks, each blind to what it does not name:

- copies: samples equal in every input, bit for bit;
- near copies: floating-point samples with more than a feature axis whose values correlate above 0.995
  (neighbouring frames, light augmentation);
- crops of one photograph: images of 64 pixels or more that share a region. Two images have a sharp peak in their
  phase correlation only where they show the same detail at some shift (Kuglin and Hines, 1975); mirrored and scaled
  views are tried as well. Small images have too few frequencies for this test, and crops without overlap pass it.

Samples so linked form groups, and a batch with many fewer groups than samples is called dependent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from normscope.doctor.nested import tensors

MOST_SAMPLES = 16
"""pairs are compared among at most so many samples, evenly spaced"""
NEAR_COPY = 0.995
SIDE = 64
PEAK = 0.22
"""of the phase correlation; the highest of 210 pairs of unrelated photographs was 0.19"""
ZOOMS = tuple(1.06**k for k in range(9))
AGREEMENT = 0.85
"""correlation of two thumbnails laid over each other at the peak's shift"""
SHARE = 0.75
"""dependent where the groups are at most this share of the samples"""


@dataclass(frozen=True)
class Independence:
    groups: int
    """groups of samples that are linked to each other"""
    looked_at: int
    """samples that were compared"""
    kind: str
    """what links them"""


def dependence(inputs: Any, samples: int) -> str:
    """Why the samples of a batch do not look independent, "" where they do.

    Args:
        inputs: tensors in any nesting; those whose axis 0 has ``samples`` entries are looked at.
        samples: the batch size.

    Example:
        >>> x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        >>> dependence(x, 4), dependence(x[[0, 0, 0, 1]], 4)
        ('', 'only 2 of 4 samples are distinct (copies)')
    """
    found = examine(inputs, samples)
    if found.groups > SHARE * found.looked_at or found.looked_at < 2:
        return ""
    return f"only {found.groups} of {found.looked_at} samples are distinct ({found.kind})"


def examine(inputs: Any, samples: int) -> Independence:
    """Which samples are linked; arguments as for :func:`dependence`."""
    batch = [t.detach() for _, t in tensors(inputs) if t.ndim and t.shape[0] == samples]
    if samples < 2 or not batch:
        return Independence(samples, samples, "")
    chosen = torch.linspace(0, samples - 1, min(samples, MOST_SAMPLES)).round().long()
    n = len(chosen)
    picked = [t[chosen.to(t.device)].cpu() for t in batch]
    linked = torch.ones(n, n, dtype=torch.bool)
    for t in picked:
        flat = t.reshape(n, -1)
        linked &= torch.stack([(flat == row).all(1) for row in flat])
    copies = _groups(linked)
    signals = [t for t in picked if t.is_floating_point() and t.ndim >= 3]
    main = max(signals, key=torch.Tensor.numel, default=None)  # others may be masks or shared conditions
    if copies <= SHARE * n or main is None or not bool(torch.isfinite(main).all()):
        return Independence(copies, n, "copies")
    linked |= _near_copies(main.float())
    if main.ndim == 4 and min(main.shape[-2:]) >= SIDE:
        linked |= _shared_regions(main.float())
    return Independence(_groups(linked), n, "near copies, or views of one image")


def _groups(linked: torch.Tensor) -> int:
    """Number of connected components."""
    label = list(range(len(linked)))
    for i, j in linked.nonzero().tolist():
        if label[i] != label[j]:
            old, new = label[j], label[i]
            label = [new if item == old else item for item in label]
    return len(set(label))


def _near_copies(x: torch.Tensor) -> torch.Tensor:
    """Pairs whose values correlate above NEAR_COPY, each feature standardized over all samples and places: one large
    constant channel would make any two samples alike."""
    features = (1,) if x.ndim > 3 else (1, x.ndim - 1)  # of (B, C, L) or (B, L, C), it is not known which
    for axis in features:
        others = [a for a in range(x.ndim) if a != axis]
        x = x - x.mean(others, keepdim=True)
        x = x / x.square().mean(others, keepdim=True).sqrt().clamp_min(1e-30)
    flat = x.flatten(1)
    flat = flat - flat.mean(1, keepdim=True)
    flat = flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-30)
    near: torch.Tensor = flat @ flat.T > NEAR_COPY
    return near


def _shared_regions(x: torch.Tensor) -> torch.Tensor:
    """Pairs of images (B, C, H, W) that show one region, at some zoom, mirrored or not.

    The highest peak of the phase correlation over the views proposes a shift; the pair is linked where the two
    images, laid over each other at that shift, agree. The second look tells photographs of one thing from aligned
    or upsampled images, whose few strong frequencies make broad peaks as well.
    """
    n = len(x)
    grey = x.mean(1, keepdim=True)
    still = _thumbnails(grey)
    base = _phases(still)
    highest = torch.full((n, n), PEAK)
    agree = torch.zeros(n, n)
    height, width = grey.shape[-2:]
    for zoom in ZOOMS:
        h, w = round(height / zoom), round(width / zoom)
        top, left = (height - h) // 2, (width - w) // 2
        view = _thumbnails(grey[..., top : top + h, left : left + w])
        for seen in (view, view.flip(-1)):
            other = _phases(seen)
            for i in range(n):
                peaks, where = torch.fft.irfft2(base[i] * other.conj(), s=(SIDE, SIDE)).flatten(1).max(1)
                for j in torch.nonzero(peaks > highest[i]).flatten().tolist():
                    highest[i, j] = peaks[j]
                    agree[i, j] = _overlay(still[i], seen[j], int(where[j]))
    agree = torch.maximum(agree, agree.T)
    return agree > AGREEMENT


def _overlay(a: torch.Tensor, b: torch.Tensor, shift: int) -> float:
    """Correlation of the overlap of two thumbnails, ``b`` moved by the shift at which the flat index points."""
    dy, dx = ((d + SIDE // 2) % SIDE - SIDE // 2 for d in divmod(shift, SIDE))
    over_a = a[max(dy, 0) : SIDE + min(dy, 0), max(dx, 0) : SIDE + min(dx, 0)]
    over_b = b[max(-dy, 0) : SIDE + min(-dy, 0), max(-dx, 0) : SIDE + min(-dx, 0)]
    both = torch.stack([over_a.flatten(), over_b.flatten()])
    both = both - both.mean(1, keepdim=True)
    norms = both.norm(dim=1)
    return float((both[0] @ both[1]) / (norms[0] * norms[1]).clamp_min(1e-30))


def _thumbnails(x: torch.Tensor) -> torch.Tensor:
    """(B, 64, 64): area means where the image is larger; slightly smaller zoomed views are interpolated."""
    if min(x.shape[-2:]) >= SIDE:
        return torch.nn.functional.adaptive_avg_pool2d(x, SIDE)[:, 0]
    return torch.nn.functional.interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False)[:, 0]


def _phases(x: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(SIDE, periodic=False)
    x = (x - x.mean((1, 2), keepdim=True)) * window[:, None] * window
    spectrum: torch.Tensor = torch.fft.rfft2(x)
    return spectrum / spectrum.abs().clamp_min(1e-12)
