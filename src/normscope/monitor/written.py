"""Norms written by hand: found among the user's own modules in the first look, and identified once, on copies.

A hook notes the shape that each module of the user's own is called with. What on a copy gives for 8 x what it gives for
x, as a normalization does, or keeps running statistics, is identified as a check does it; the rest is left alone. The
innermost such module counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from normscope.doctor.identified import identify_written, probing_shapes
from normscope.doctor.session import Session
from normscope.doctor.site import Call
from normscope.doctor.sites import UNIDENTIFIED, written_site
from normscope.doctor.tracing.calls import normalized
from normscope.identify.module_box import box_of_module, call_of
from normscope.monitor.watch import Hook, out_of_sight

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.tracing.paths import ModuleNames
    from normscope.monitor.verdict import Modes

LAYERS = (
    *(nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag),
    *(nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase),
)
"""what holds one of these is more than a norm"""
LIBRARIES = ("torch.", "normscope.")
LARGE, SAME = 1e4, 0.05
"""size of the input, beside which no eps counts / difference of outputs, of the largest"""
SEVERAL = "called with more than its input"


class Unread:
    """Hooks on the modules that may be norms, for the length of the first look.

    Args:
        names: of the model.
        sites: those that are known without a forward.
    """

    def __init__(self, names: ModuleNames, sites: Iterable[Site]) -> None:
        self.shapes: dict[str, tuple[tuple[int, ...], str, str]] = {}
        """path -> shape, dtype and device of its first input in training"""
        self.unlike: dict[str, str] = {}
        """path -> why its call is none of a norm"""
        self._handles = [
            module.register_forward_hook(self._hook(path), with_kwargs=True)
            for path, module in _candidates(names, list(sites)).items()
        ]

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any = None, output: Any = None) -> None:
            if out_of_sight() or not module.training or path in self.shapes or not self._handles:
                return
            given = normalized(args, kwargs or {})
            if not isinstance(given, torch.Tensor) or not isinstance(output, torch.Tensor):
                return
            if len(args) + len(kwargs or {}) > 1:
                self.unlike[path] = SEVERAL
            elif given.shape == output.shape and given.is_floating_point() and given.numel():
                dtype = str(given.dtype).removeprefix("torch.")
                self.shapes[path] = tuple(given.shape), dtype, str(given.device)

        return Hook(hook)


class Written:
    """The norms written by hand that were found, and what they are.

    Args:
        names: of the model, with the readings that a look uses.
    """

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._sites: dict[str, Site] = {}

    def identify(self, seen: Unread, sites: Iterable[Site], model: nn.Module) -> list[Site]:
        """Those whose specification is known now; the model is left as it is."""
        listed = {site.name: site for site in sites if site.kind == "hand-written" and site.spec is None}
        found: dict[str, Site] = {}
        with Session(model) as session, np.errstate(all="ignore"):
            for path in sorted(seen.shapes, key=lambda path: -path.count(".")):
                (module,) = (m for m in self._names.modules.values() if self._names.path(m) == path)
                if any(_inside(other, path) for other in found):
                    continue
                shape, dtype, device = seen.shapes[path]
                if path not in listed:
                    with session.protecting():
                        if not normalizes(module, shape):
                            continue
                site = written_site(module, self._names)
                site._names = self._names
                site.calls = [Call(0, 0, shape, dtype, device, "contiguous")]
                found[path] = site
            identify_written(session, found.values())
        for name, site in listed.items():
            if name not in found:
                why = seen.unlike.get(name, "not called in training in the first look")
                found[name] = replace(site, reason=f"{UNIDENTIFIED}: {why}")
        order = {path: place for place, path in enumerate(seen.shapes)}
        self._sites = dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))
        return [site for site in found.values() if site.spec is not None]

    def among(self, sites: list[Site], modes: Modes) -> list[Site]:
        """The sites as they are now, these in the place of what was known of them without a forward."""
        for site in sites:
            if site.kind == "hand-written" and site.spec is None:
                site.reason = f"{UNIDENTIFIED}: no look has ended yet"
        now = [self._now(site, modes) for site in self._sites.values()]
        return [site for site in sites if site.name not in self._sites] + now

    def _now(self, site: Site, modes: Modes) -> Site:
        assert site.module is not None
        if site.spec is None:
            return replace(site, _arrays={})
        read = self._names.readings.identified[id(site.module)]
        after = {call: _flag(modes, call, site.path) for call in ("train", "eval")}
        return replace(
            site,
            tensors=self.tensors(site)(),
            mode_train=read(None, after["train"]).mode,
            mode_eval=read(None, after["eval"]).mode,
            mode_now=read(None, site.module.training).mode,
            calls=[],
            _arrays={},
        )

    def tensors(self, site: Site) -> Callable[[], dict[str, torch.Tensor]]:
        """What an identified site holds, as it is when that is called."""
        module = site.module
        assert module is not None
        return lambda: self._names.readings.read(module, None).tensors(module)


def normalizes(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a copy in training gives for large x what it gives for 8 x, and each output depends on several inputs.

    >>> normalizes(nn.LayerNorm(4), (8, 4)), normalizes(nn.Tanh(), (8, 4)), normalizes(nn.Identity(), (8, 4))
    (True, False, False)
    """
    small = probing_shapes(module, shape)[0]
    random = np.random.default_rng(0)
    x = LARGE * (random.standard_normal(small) * 2 + 0.5)
    kept = random.random(small) < 0.5
    mixed = np.where(kept, x, LARGE * random.standard_normal(small))
    try:
        box = box_of_module(module, call_of(torch.zeros(small))).in_mode(training=True)
        y, scaled, others = box(x), box(8 * x), box(mixed)
    except (Exception, SystemExit):  # the user's code on inputs that it never saw
        return False
    if y.shape != x.shape or not all(np.isfinite(one).all() for one in (y, scaled, others)):
        return False
    moved = np.abs(others - y)[kept].max(initial=0.0)
    return bool(np.abs(scaled - y).max() <= SAME * np.abs(y).max() and moved > 0)


def _candidates(names: ModuleNames, sites: list[Site]) -> dict[str, nn.Module]:
    known = [site.path for site in sites if site.spec is not None]
    found = {}
    for module in names.modules.values():
        path, home = names.path(module) or "", f"{type(module).__module__}."
        if isinstance(module, torch.jit.ScriptModule) or home.startswith(LIBRARIES):
            continue
        if any(path == site or _inside(path, site) or _inside(site, path) for site in known):
            continue
        if not any(isinstance(part, LAYERS) for part in module.modules()):
            found[path] = module
    return found


def _inside(path: str, outer: str) -> bool:
    return path != outer and path.startswith(f"{outer}." if outer else "")


def _flag(modes: Modes, call: str, path: str) -> bool:
    try:
        return modes.modes_after(call).get(path, call == "train")
    except RuntimeError:  # the model's own train() or eval() raises
        return call == "train"
