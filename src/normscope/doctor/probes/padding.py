"""Do padded positions change what a site computes at valid ones?

Two questions: other content at the padded places (same length), and more padded places. In both runs only valid
positions are compared; what a model leaves in padded places is its own affair. A site whose valid input stayed the
same and whose valid output did not is the one that mixes.

In training a norm that stores statistics normalizes by those of the batch: those of all places are compared with those
of the valid ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from normscope.doctor.change import change, some
from normscope.doctor.probes import Probe
from normscope.doctor.variants import other_length
from normscope.reference import statistics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject

POSITIONS = 256
"""valid positions that are compared, evenly spaced"""


@dataclass(frozen=True)
class Mixing:
    """What padding did at one site in one run."""

    order: int
    received: bool
    """valid positions were changed already when they came in"""
    changed: bool
    """valid positions of the output changed"""
    relative: float
    """root mean square change of the output at valid positions over its root mean square"""

    @property
    def responsible(self) -> bool:
        return self.changed and not self.received


@dataclass(frozen=True)
class Counted:
    """Batch statistics of all positions against those of the valid ones, over the sets with a spread."""

    shift: float
    """root mean square of the difference of the means, in units of the denominator of the valid"""
    log_var: float
    """log of the ratio of the variances + eps, of the median set"""


@dataclass(frozen=True)
class Padding:
    """``content`` (other content, same length) and ``length`` (more padding): site name -> :class:`Mixing`."""

    content: dict[str, Mixing]
    length: dict[str, Mixing]
    output_content: float | None
    """relative change of the model's output at valid positions; None where it cannot be matched"""
    output_length: float | None
    masked: int
    """padded positions in the user's batch"""
    positions: int
    """positions in the user's batch"""
    training: dict[str, Counted]
    """site name -> what padding does to its batch statistics, for the sites that normalize by them in training"""


Layout = tuple[int, int]
"""axes of samples and positions; (a, a) where one axis holds both, (-1, -1) for a tensor without positions"""


class PaddingProbe(Probe):
    """``measured["padding"]``: :class:`Padding`."""

    name = "padding"
    runs = ("eval", "batch", "padded", "other_length")

    def start(self, subject: Subject) -> str | None:
        if subject.mask is None:
            return "needs a mask: pass mask= (True at valid positions)"
        if bool(subject.mask.all()):
            return "no position is masked: pass a batch with padding"
        rows, cols = torch.nonzero(subject.mask, as_tuple=True)
        chosen = torch.linspace(0, len(rows) - 1, min(len(rows), POSITIONS)).round().long()
        self._valid = (rows[chosen], cols[chosen])
        self._samples, self._length = subject.mask.shape
        other = other_length(subject.mask)
        self._lengths = {
            "eval": self._length,
            "batch": self._length,
            "padded": self._length,
            "other_length": other,
        }
        self._before: dict[
            tuple[str, int], dict[Layout, tuple[NDArray[np.float64], NDArray[np.float64]]]
        ] = {}
        self._found: dict[str, dict[str, Mixing]] = {"padded": {}, "other_length": {}}
        self._mask = subject.mask.cpu()
        self._training: dict[str, Counted] = {}
        self._folded: set[str] = set()
        return None

    def observe(self, event: Event) -> None:
        if event.run == "batch":
            counted = self._counted(event) if event.mode == "batch" else None
            if counted is not None:
                self._training.setdefault(event.site.name, counted)
            return
        key = (event.site.name, event.index)
        length = self._lengths[event.run]
        if event.output.shape != event.input.shape:
            return
        views = {
            layout: (self._picked(event.input, layout, length), self._picked(event.output, layout, length))
            for layout in self._layouts(event.input, length)
        }
        if event.run == "eval":
            self._before[key] = views
            return
        seen = []
        for layout, (old_in, old_out) in self._before.get(key, {}).items():
            new = views.get(layout)
            if new is None or new[0].shape != old_in.shape:
                continue
            out = change(old_out, new[1], event.output.dtype)
            seen.append((change(old_in, new[0], event.input.dtype).real, out))
        if not seen:
            return
        received, out = min(seen, key=lambda item: item[0])
        found = self._found[event.run]
        known = found.get(event.site.name)
        here = Mixing(len(found) if known is None else known.order, received, out.real, out.relative)
        if known is None or (here.responsible and not known.responsible):
            found[event.site.name] = here

    def finish(self, subject: Subject) -> Padding:
        assert subject.mask is not None
        return Padding(
            self._found["padded"],
            self._found["other_length"],
            self._at_output(subject, "padded"),
            self._at_output(subject, "other_length"),
            int((~subject.mask).sum()),
            subject.mask.numel(),
            {name: counted for name, counted in self._training.items() if self._located(name)},
        )

    def _located(self, name: str) -> bool:
        """One axis may hold samples of positions or positions of samples: valid values that stay as they are where
        the padding changes tell."""
        seen = self._found["padded"].get(name)
        return name not in self._folded or (seen is not None and not seen.received)

    def _counted(self, event: Event) -> Counted | None:
        """None where the input does not show samples and positions."""
        layout = next(self._layouts(event.input, self._length))
        if min(layout) < 0:
            return None
        if layout[0] == layout[1]:
            self._folded.add(event.site.name)
        mask = self._mask if layout[0] <= layout[1] else self._mask.T
        beside = [1] * event.input.ndim
        for axis in layout:
            beside[axis] = event.input.shape[axis]
        x, spec = event.input.detach().double().cpu().numpy(), event.spec
        moments = []
        for valid in (None, mask.reshape(beside).numpy()):
            mean, v, _ = statistics(x, spec, valid)
            moments.append((mean.ravel(), (np.diagonal(v, 0, -2, -1) if spec.whiten else v).ravel()))
        (mean, v), (mean_valid, v_valid) = moments
        eps = spec.eps or 0.0
        live = np.isfinite(mean + v + mean_valid + v_valid) & (v > 0) & (v_valid > 0)
        if mean.size != v.size or not live.any():
            return None
        shift = np.sqrt(np.mean((mean - mean_valid)[live] ** 2 / (v_valid[live] + eps)))
        return Counted(float(shift), float(np.median(np.log((v[live] + eps) / (v_valid[live] + eps)))))

    def _layouts(self, t: torch.Tensor, length: int) -> Iterator[Layout]:
        """Every way to read samples and positions off the shape, the usual one first."""
        shape = t.shape
        pairs = [
            (a, p)
            for a in range(t.ndim)
            for p in range(t.ndim)
            if a != p and shape[a] == self._samples and shape[p] == length
        ]
        yield from pairs
        folded = [(a, a) for a in range(t.ndim) if shape[a] == self._samples * length]
        yield from folded
        if not pairs and not folded:
            yield (-1, -1)

    def _picked(self, t: torch.Tensor, layout: Layout, length: int) -> NDArray[np.float64]:
        a, p = layout
        if a < 0:
            return some(t)
        if a == p:
            t = t.reshape(*t.shape[:a], self._samples, length, *t.shape[a + 1 :])
            p = a + 1
        rows, cols = (index.to(t.device) for index in self._valid)
        return some(t.detach().movedim((a, p), (0, 1))[rows, cols])

    def _at_output(self, subject: Subject, run: str) -> float | None:
        before, after = subject.outputs.get("eval"), subject.outputs.get(run)
        if not before or not after:
            return None
        found = []  # an output of more axes without the positions is strided: which of its places are valid is unknown
        for old, new in zip(before, after, strict=False):
            new_layouts = list(self._layouts(new, self._lengths[run]))
            layout = next((x for x in self._layouts(old, self._length) if x in new_layouts), None)
            if layout is None or not old.is_floating_point() or (layout[0] < 0 and old.ndim > 2):
                continue
            x, y = self._picked(old, layout, self._length), self._picked(new, layout, self._lengths[run])
            if x.shape == y.shape:
                out = change(x, y, old.dtype)
                found.append(out.relative if out.real else 0.0)
        return max(found, default=None)
