"""What comes into norms while a model runs: the moments that their running statistics are made of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import normscope.nn as layers
from normscope import functional
from normscope.distributed import Moments
from normscope.doctor.nested import tensors
from normscope.errors import BadInput
from normscope.kernels.elementary import Elementary, names_of
from normscope.nn.masking import valid
from normscope.reading import read
from normscope.spec import Cast, NormSpec, RunningState
from normscope.spec.bound import evened
from normscope.transforms.chosen import Chosen
from normscope.transforms.masks import Valid

Take = Callable[[str, Moments], None]


class Collector:
    """Context manager: ``take(path, moments)`` is called for each call of each of some norms, in order.

    For a batch norm they are the moments of each entry of its state over all else: of each channel over samples and
    positions; of each step and channel where the state holds steps. Virtual batches come one after the other. An
    instance norm stores the mean over samples of what each sample has, so there they are the moments, over samples, of
    the means and variances of each sample, one after the other.

    Args:
        counts: the mask of the batch.
        refused: gets path and reason where the mask has no place in a norm's input.
        by_batch: norms under a mask normalize by the valid elements of the batch; their output is 0 at the others.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Iterable[Chosen],
        take: Take,
        counts: Valid | None = None,
        *,
        refused: dict[str, str],
        by_batch: bool = False,
    ) -> None:
        modules = dict(model.named_modules())
        self._modules = [(site, modules[site.path]) for site in sites]
        self._take = take
        self._valid = counts
        self._refused = refused
        self._by_batch = by_batch and counts is not None
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for site, module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._before(site), with_kwargs=True))
            if self._by_batch:
                # ahead of the user's hooks, which may look at the output or replace it
                after = module.register_forward_hook(self._after(site), prepend=True, with_kwargs=True)
                self._handles.append(after)

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, site: Chosen) -> Any:
        def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = _input(site, args, kwargs)
            reading = read(module, input_ndim=x.ndim)
            mask = self._mask(x, reading.spec, _own_mask(module, x, args, kwargs))
            if isinstance(mask, str):
                self._refused[site.path] = mask
                return
            with torch.no_grad():
                for moments in _moments(x, reading.spec, mask, averaged=averages(site)):
                    if not moments.empty:
                        self._take(site.path, moments)

        return entered

    def _after(self, site: Chosen) -> Any:
        def left(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            x = _input(site, args, kwargs)
            reading = read(module, input_ndim=x.ndim)
            mask = self._mask(x, reading.spec, _own_mask(module, x, args, kwargs))
            if isinstance(mask, str) or mask is None or reading.mode_now != "batch" or not bool(mask.any()):
                return output
            held, running = reading.tensors, reading.spec.running
            # batch renormalization reads its state; copies, since training moves them, and what becomes of them is
            # nobody's business: a set of one element must not be refused for its stored variance
            state = RunningState(held["running_mean"].clone(), held["running_var"].clone())
            spec = reading.spec.replace(running=running and replace(running, correction=0))
            weight, bias = held.get("weight"), held.get("bias")
            return functional.normalize(x, spec, weight, bias, running=state, training=True, mask=mask)

        return left

    def _mask(self, x: Tensor, spec: NormSpec, own: Tensor | None) -> Tensor | str | None:
        if self._valid is None:
            return own
        found = self._valid.placed(tuple(x.shape), spec)
        if isinstance(found, str):
            return found
        return found.to(x.device) if own is None else found.to(x.device) & own


def averages(site: Chosen) -> bool:
    """Its statistics are means over sets (the samples of an instance norm) of what each set has."""
    assert site.reading is not None
    spec = site.reading.spec
    return bool(set(spec.pattern.kept) - {*_names(spec), "v"})


def statistics(moments: Moments, site: Chosen) -> tuple[Tensor, Tensor]:
    """Mean and variance that a norm stores for these moments, float64, in the shape of its state."""
    assert site.reading is not None
    running = site.reading.spec.running
    if averages(site):
        mean, var = moments.mean
    else:
        mean, var = moments.mean, moments.variance(0.0 if running is None else running.correction)
    shape = site.reading.tensors["running_mean"].shape
    return mean.reshape(shape), var.reshape(shape)


def empty(site: Chosen) -> Moments:
    """Of no call at all."""
    assert site.reading is not None
    spec, shape = site.reading.spec, site.reading.tensors["running_mean"].shape
    entries = shape if len(shape) == len(_names(spec)) else [shape.numel()]
    return Moments.none([2, *entries] if averages(site) else entries)


def _names(spec: NormSpec) -> list[str]:
    return names_of(spec.running_axes, ())


def _own_mask(module: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What the model itself tells a layer of normscope.nn: its ``mask=`` and ``lengths=``."""
    if not type(module).__module__.startswith(layers.__name__):
        return None
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    mask, lengths = given.get("mask"), given.get("lengths")
    if mask is None and lengths is None:
        return None
    return valid(type(module).__name__, x, mask, lengths)


def _input(site: Chosen, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found = next(iter(tensors((args, kwargs))), None)
    if found is None:
        raise BadInput(f"{site.name or 'the model itself'}: the norm is called without a tensor")
    return found[1]


def _moments(x: Tensor, spec: NormSpec, mask: Tensor | None, *, averaged: bool) -> Iterator[Moments]:
    """Of the state's entries, in the order of its axes."""
    spec = evened(spec.replace(cast=Cast()), tuple(x.shape))
    view = Elementary.of(x.detach().double(), spec, mask)
    names = [axis.name for axis in view.axes]
    state = [names.index(name) for name in names_of(spec.running_axes, view.axes)]
    turns = names.index("v") if "v" in names and view.axes[names.index("v")].kept else None
    turns = None if turns in state else turns
    others = [i for i in range(len(names)) if i not in state and i != turns]
    kept = [i for i in others if view.axes[i].kept]
    erased = [i for i in others if not view.axes[i].kept]
    order = [*([] if turns is None else [turns]), *state, *kept, *erased]
    value = view.x.permute(order)
    counts = None if view.mask is None else view.mask.permute(order)
    for turn in range(1 if turns is None else value.shape[0]):
        part = value if turns is None else value[turn]
        there = counts if counts is None or turns is None else counts[turn]
        over = range(len(state), part.ndim)
        if averaged:
            yield _of_sets(part, there, len(state), len(kept), spec)
        else:
            yield Moments.of(part, [*over], there)


def _of_sets(x: Tensor, mask: Tensor | None, state: int, kept: int, spec: NormSpec) -> Moments:
    """Moments over sets of the mean and variance of each; a set without a valid element is left out."""
    sets = Moments.of(x, [*range(state + kept, x.ndim)], mask)
    correction = 0.0 if spec.running is None else spec.running.correction
    pairs = torch.stack([sets.mean, sets.variance(correction)])
    present = None
    if isinstance(sets.count, Tensor):
        present = (sets.count > 0)[None].expand(pairs.shape)
    return Moments.of(pairs, [*range(1 + state, pairs.ndim)], present)
