"""Running statistics from data, exactly: no labels, no weights moved, and a look at whether it got worse."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from normscope.distributed import Ranks
from normscope.doctor import arguments
from normscope.doctor.interrupts import uninterrupted
from normscope.doctor.refusals import Refused, refuse_unmaterialized, unwrap
from normscope.errors import BadInput
from normscope.transforms.chosen import Chosen, Model, Select, chosen, copied, one_of
from normscope.transforms.frozen import frozen_parts
from normscope.transforms.held_out import Metric, compared
from normscope.transforms.loader import Loader
from normscope.transforms.masks import Mask
from normscope.transforms.passes import METHODS, Estimate
from normscope.transforms.recalibration_report import RecalibrationReport, Shift
from normscope.transforms.report import SiteChange

__all__ = ["ATTRIBUTE", "RecalibrationReport", "recalibrate"]

ATTRIBUTE = "normscope_recalibration"
"""of the model: plain data, which copies and pickles with it"""


def recalibrate(
    model: Model,
    data: Any,
    *,
    method: str = "exact",
    source: str = "",
    selection: str = "",
    inputs: Callable[[Any], Any] | None = None,
    mask: Mask = None,
    select: Select = None,
    held_out: Any = None,
    metric: Metric | None = None,
    distributed: bool | None = None,
    inplace: bool = False,
    dry_run: bool = False,
) -> tuple[Model, RecalibrationReport]:
    """Take the running statistics of a model's norms from data.

    ``"exact"``: one pass in which norms normalize by the batch, as in training, with dropout off. Each norm gets the
    mean and variance of all elements that came into it, merged in float64, so every sample weighs the same, also in a
    last batch that is smaller. What comes into later norms depends on the batches, as in training.
    ``"layerwise"``: norm by norm, in the order of the forward, each with those before it recalibrated and everything in
    eval, which is what deployment computes: the cut into batches does not matter. One pass a norm.
    ``"ema"``: one pass as ``"exact"``, and the norm's own momentum from the statistics that it has, as training would.

    The stored variance is m2 / (M - 1) over the M elements of a channel, as PyTorch's. A norm that a forward calls
    several times (at each time step, say) takes all its calls; one that stores statistics of each step (``t b c ... ->
    t c``) gets those of each. Counters are set to the number of calls (``"ema"``: raised by it). Nothing else of the
    model moves: no weights, no flags, no other buffers, no random state; and where anything fails, nothing at all.
    Labels are not taken: of batches ``(inputs, labels)`` only what the forward requires is passed on.

    Under ``torch.distributed`` each rank gives its shard (batches may be uneven, a rank may have none), all ranks call
    together, and get the same bits.

    Args:
        model: any module; statistics that are frozen stay.
        data: a tensor, tuple or dict (one batch), or an iterable of batches, such as a DataLoader.
        source: where the data come from, in words; ``selection``: by which rule they were chosen. Kept with the result.
        inputs: what of a batch goes into the model, where that cannot be told: ``lambda batch: batch["image"]``.
        mask: which elements count, True where they do: the key of a batch that is a dict, a function of a batch, a
            tensor where data are one batch, or a list with one a batch. Samples on axis 0, steps or positions, in their
            order, on the others: (B,), (B, L), (B, H, W); or as many axes as a norm's input, broadcast to it. Only
            valid elements enter statistics, with exact counts, and norms that normalize by the batch do so by its
            valid elements. A norm whose input the mask does not fit is left, with the reason.
        select: which norms, as in `freeze`.
        held_out: inputs, in the forms of ``data``, on which outputs before and after are compared, in eval.
        metric: a function of a model that returns a number, larger is better, such as its accuracy on labelled data
            that were not recalibrated on. Called before and after.
        distributed: merge over ranks; by default where a process group with several ranks is there.
        inplace: change ``model`` itself, not a deep copy. dry_run: change nothing, return ``model`` and the report.

    Returns the model and a report; ``report.worse`` is True where the metric fell, ``report.provenance`` is kept as
    ``model.normscope_recalibration``: fingerprint of the data (it does not depend on order and batches), samples,
    method, source, selection, and the statistics before.

    Raises:
        BadInput: data, method or select cannot be used, data are empty or hold NaN, or give statistics that are not
            finite.
        ModelError: the model raised on a batch; another rank failed.
        Refused: nothing stores statistics; the mask fits no norm; ``"ema"`` over several ranks, whose result would
            depend on their order; or SyncBatchNorm over several ranks by a method that runs it in training.
        Whatever the data raise while they are run over.

    Wu and Johnson 2021, Rethinking "Batch" in BatchNorm, https://arxiv.org/abs/2105.07576, section 3. Nado et al. 2020,
    https://arxiv.org/abs/2006.10963; Schneider et al. 2020, https://arxiv.org/abs/2006.16971.

    >>> import torch
    >>> model = nn.Sequential(nn.BatchNorm1d(1)).eval()
    >>> new, report = recalibrate(model, [torch.tensor([[1.0], [2.0]]), torch.tensor([[6.0]])], method="layerwise")
    >>> new[0].running_mean.item(), new[0].running_var.item(), report.provenance["samples"]
    (3.0, 7.0, 3)
    """
    arguments.module(model)
    one_of("method", method, METHODS)
    sites = chosen(model, select)
    faults = {site.path: _fault(site) or _shared(site, sites) for site in sites}
    live = [site for site in sites if not faults[site.path]]
    ranks = Ranks.present() if distributed in (None, True) else Ranks()
    _refuse(model, live, sites, faults, method, ranks)
    loader = Loader(data, model, inputs, mask)
    after = copied(model, "recalibrate")
    found = METHODS[method](after, live, loader, ranks)
    estimates = found.estimates
    faults |= found.refused
    _refuse_unfit(live, found.refused)
    called = [site for site in live if site.path in estimates]
    _refuse_values(called, estimates, found.order)
    provenance = _provenance(method, source, selection, loader, ranks, called)
    _apply(after, called, estimates, provenance)
    seen = None
    if held_out is not None or metric is not None:
        others = None if held_out is None else Loader(held_out, model, inputs)
        seen = compared(model, after, others, metric)
    report = RecalibrationReport(
        "recalibrate",
        tuple(_change(site, faults[site.path], estimates, provenance) for site in sites),
        notes=tuple(loader.notes),
        dry_run=dry_run,
        provenance=provenance,
        shifts=tuple(_shift(site, estimates[site.path]) for site in called),
        held_out=seen,
    )
    if dry_run:
        return model, report
    if not inplace:
        return after, report
    with uninterrupted():
        _apply(model, called, estimates, provenance)
    return model, report


def _fault(site: Chosen) -> str:
    """Why the statistics of a norm stay, "" where they do not."""
    if "statistics" in frozen_parts(site.module):
        return "its statistics are frozen: unfreeze them first"
    if site.reading is None:
        return site.reason
    if site.reading.mode_train == "frozen":
        return "its statistics are frozen by its class"
    if "running_mean" not in site.reading.tensors:
        return "stores no statistics"
    if site.reading.mode_eval != "running":
        return "normalizes by its input in evaluation too, so its buffers are not read"
    if site.reading.spec.scale != "std":
        return f"stores no mean and variance: its scale is {site.reading.spec.scale!r}"
    return ""


def _shared(site: Chosen, sites: list[Chosen]) -> str:
    """Whose statistics lie in the same tensor, "" where nobody's do."""
    mine = {id(_tensors(site)[name]) for name in ("running_mean", "running_var")}
    for other in sites:
        if other is not site and mine & {id(tensor) for tensor in _tensors(other).values()}:
            return f"stores its statistics in a tensor of {other.name or 'the model itself'}, where only one's fit"
    return ""


def _refuse(
    model: nn.Module,
    live: list[Chosen],
    sites: list[Chosen],
    faults: dict[str, str],
    method: str,
    ranks: Ranks,
) -> None:
    refuse_unmaterialized(unwrap(model))
    if not live:
        why = "; ".join(f"{s.name or 'the model itself'}: {faults[s.path]}" for s in sites[:3])
        raise Refused(f"no normalization has running statistics to recalibrate{f' ({why})' if why else ''}")
    if ranks.world == 1:
        return
    if method == "ema":
        raise Refused(
            f"an exponential average depends on the order of batches, which {ranks.world} ranks do not have. Use "
            'method="exact" or "layerwise"; or distributed=False on one rank'
        )
    synchronized = next((s for s in live if s.reading and s.reading.synchronized), None)
    if synchronized is not None and method == "exact":
        raise Refused(
            f"{synchronized.name or 'the model itself'} synchronizes inside the forward, where ranks with unequal "
            'shards wait for each other. Use method="layerwise", which runs it in eval'
        )


def _refuse_unfit(live: list[Chosen], refused: dict[str, str]) -> None:
    if len(refused) == len(live):
        why = "; ".join(f"{site.name or 'the model itself'}: {refused[site.path]}" for site in live[:3])
        raise Refused(f"the mask fits no norm, so nothing was recalibrated ({why})")


def _refuse_values(called: list[Chosen], estimates: dict[str, Estimate], order: list[str]) -> None:
    for site in sorted(called, key=lambda s: order.index(s.path)):
        found = estimates[site.path]
        dtype = _tensors(site)["running_var"].dtype  # a variance of 1e6 is infinite in float16
        bad = ~(found.mean.to(dtype).isfinite() & found.var.to(dtype).isfinite())
        if bool(bad.any()):
            why = (
                "one element a channel"
                if found.elements == 1
                else "no valid element"
                if not found.elements
                else f"NaN, infinity, or numbers beyond {str(dtype).removeprefix('torch.')}"
            )
            raise BadInput(
                f"{site.name or 'the model itself'}: {int(bad.sum())} of {bad.numel()} channels get statistics that "
                f"are not finite ({why} came in); the model is as it was. Check the data and what stands before this "
                "norm"
            )


def _provenance(
    method: str, source: str, selection: str, loader: Loader, ranks: Ranks, called: list[Chosen]
) -> dict[str, Any]:
    shards = ranks.gathered((loader.samples, loader.batches, loader.valid, loader.masked, loader.content))
    samples, batches, valid, masked, content = (sum(values) for values in zip(*shards, strict=True))
    fingerprint = hashlib.sha256(f"{samples} {content % 2**128}".encode()).hexdigest()
    return {
        "method": method,
        "source": source,
        "selection": selection,
        "data": fingerprint,
        "samples": samples,
        "batches": batches,
        "ranks": ranks.world,
        **({"valid": f"{valid} of {masked}"} if masked else {}),
        "previous": {
            site.name: {
                name: tensor.detach().double().tolist()
                for name, tensor in _tensors(site).items()
                if name not in ("weight", "bias")
            }
            for site in called
        },
    }


def _tensors(site: Chosen) -> dict[str, Tensor]:
    return {} if site.reading is None else site.reading.tensors


def _apply(
    model: nn.Module, called: list[Chosen], estimates: dict[str, Estimate], provenance: dict[str, Any]
) -> None:
    inner = unwrap(model)
    modules = dict(inner.named_modules())
    for site in called:
        estimates[site.path].write(modules[site.path])
    if called:
        vars(inner)[ATTRIBUTE] = json.loads(json.dumps(provenance))


def _change(
    site: Chosen, fault: str, estimates: dict[str, Estimate], provenance: dict[str, Any]
) -> SiteChange:
    if not fault and site.path not in estimates:
        masked = " or gets no valid element" if "valid" in provenance else ""
        fault = f"is not called on these data{masked}"
    after = "" if fault else f"statistics of {provenance['samples']} samples"
    return SiteChange(site.name, site.type_name, after, fault, site.aliases)


def _shift(site: Chosen, new: Estimate) -> Shift:
    held = _tensors(site)
    mean, var = held["running_mean"].detach().double().cpu(), held["running_var"].detach().double().cpu()
    eps = site.reading.spec.eps or 0.0 if site.reading else 0.0
    ratio = (new.var + eps) / (var + eps)
    away = (new.mean - mean).abs() / (var + eps).sqrt()
    return Shift(site.name, float(away.max()), float(ratio.min()), float(ratio.max()))
