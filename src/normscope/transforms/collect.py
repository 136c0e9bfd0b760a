"""What comes into norms while a model runs: the moments that their running statistics are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from normscope.distributed import Moments
from normscope.doctor.nested import tensors
from normscope.errors import BadInput
from normscope.reading import Reading, read
from normscope.transforms.chosen import Chosen


class Collector:
    """Context manager: ``take(path, moments)`` is called for each call of each of some norms, in order.

    For a batch norm they are the moments of each channel over samples and positions. An instance norm stores the mean
    over samples of what each sample has, so there they are the moments, over samples, of the means and variances of
    each sample, one after the other.
    """

    def __init__(
        self, model: nn.Module, sites: Iterable[Chosen], take: Callable[[str, Moments], None]
    ) -> None:
        modules = dict(model.named_modules())
        self._modules = [(site.path, modules[site.path]) for site in sites]
        self._take = take
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for path, module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._hook(path), with_kwargs=True))

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, path: str) -> Any:
        def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found = next(iter(tensors((args, kwargs))), None)
            if found is None:
                raise BadInput(f"{path or 'the model itself'}: the norm is called without a tensor")
            with torch.no_grad():
                self._take(path, _moments(found[1], read(module, input_ndim=found[1].ndim)))

        return entered


def _moments(x: Tensor, reading: Reading) -> Moments:
    bound = reading.spec.bind(tuple(x.shape))
    kept = [axis.dim for axis in bound.axes if axis.kept]
    erased = [axis.dim for axis in bound.axes if not axis.kept]
    if len(kept) == 1 and bound.sample_dim not in kept and bound.sample_dim is not None:
        return Moments.of(x, erased)
    if bound.sample_dim is None:  # one sample without a batch axis
        x, erased = x[None], [axis + 1 for axis in erased]
    running = reading.spec.running
    correction = 0.0 if running is None else running.correction
    x = x.detach().double()
    means = x.mean(erased)
    variances = x.var(erased, correction=correction)
    return Moments.of(torch.cat([means, variances], 1), (0,))


def statistics(moments: Moments, reading: Reading) -> tuple[Tensor, Tensor]:
    """Mean and variance that a norm stores for these moments, float64."""
    if "b" in reading.spec.pattern.kept:
        mean, var = moments.mean.chunk(2)
        return mean, var
    running = reading.spec.running
    return moments.mean, moments.variance(0.0 if running is None else running.correction)


def empty(reading: Reading) -> Moments:
    """Of no call at all."""
    (channels,) = reading.tensors["running_mean"].shape
    return Moments.none([2 * channels if "b" in reading.spec.pattern.kept else channels])
