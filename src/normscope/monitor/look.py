"""A close look at one optimizer step: the doctor's probes on the batch that is trained on, and a summary a site.

The probes are those of a check; only the forward they listen to is the user's own. What they compute is the doctor's:
without gradients, outside of autocast, nothing of it in the user's graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from normscope.doctor.nested import tensors
from normscope.doctor.probes.effective_samples import EffectiveSamplesProbe
from normscope.doctor.probes.gap import GapProbe
from normscope.doctor.probes.precision import PrecisionOfOutput
from normscope.doctor.probes.ranges import RangeOfActivations
from normscope.doctor.probes.statistics import Statistics
from normscope.doctor.sets import sets_of
from normscope.doctor.site import Event
from normscope.doctor.tracing.calls import MASKED, masked_call, normalized
from normscope.errors import told
from normscope.monitor.backwards import Backwards
from normscope.monitor.ranks import summary
from normscope.monitor.site_look import SiteLook, add_parameters
from normscope.monitor.watch import Hook, distance, in_backward, out_of_sight

if TYPE_CHECKING:
    from normscope.doctor.probes import Probe
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject
    from normscope.doctor.tracing.readings import ModuleReading, Readings
    from normscope.monitor.ranks import Summary

CALLS = 4
"""forward passes of a site that are measured in one look"""
REPEATS = 16
"""passes whose batch statistics are compared with each other"""
SAME = 1e-5
"""of a standard deviation: float32 roundings between two readings of equal numbers are a tenth of it"""
SPREAD = "normalized by the samples of all ranks, of which this one sees its own alone, it is not measured"
PROBES = (Statistics, GapProbe, EffectiveSamplesProbe)
COSTLY = (RangeOfActivations, PrecisionOfOutput)
"""that a look has now and then: the second computes in float64"""


class Look:
    """Hooks on every site for one optimizer step.

    Args:
        step: its number.
        subject: the model and its sites.
        readings: of modules by rank of their input.
        parameters: by site, those whose gradients tell how many backward passes add up.
        costly: with the probes that take longer.
    """

    def __init__(
        self,
        step: int,
        subject: Subject,
        readings: Readings,
        parameters: Mapping[str, Sequence[torch.Tensor]],
        *,
        costly: bool,
    ) -> None:
        self.step = step
        self.samples = 0
        self.sites: dict[str, SiteLook] = {}
        self.stored: Summary = {}
        """running statistics before the site's first forward pass in training"""
        self.failed: list[str] = []
        self.left: dict[str, str] = {}
        """sites with calls that were not measured, and why: not all elements count in them, or others' do"""
        self._subject, self._readings = subject, readings
        self._kinds = PROBES + (COSTLY if costly else ())
        self._probes: list[Probe] | None = None  # started when the batch size is known
        self._reasons: dict[str, str] = {}
        self._seen: Counter[str] = Counter()
        self._statistics: dict[str, list[tuple[Any, Any]]] = {}
        self._waiting: dict[str, Event] = {}
        self._handles = []
        self._backwards = {name: Backwards(given) for name, given in parameters.items()}
        for site in subject.sites:
            if isinstance(site.module, nn.Module) and not isinstance(site.module, torch.jit.ScriptModule):
                self._handles += [
                    site.module.register_forward_pre_hook(self._hook(self._before, site), with_kwargs=True),
                    site.module.register_forward_hook(self._hook(self._after, site), with_kwargs=True),
                ]

    def close(self) -> None:
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        self._waiting.clear()
        for name, counted in self._backwards.items():
            if name in self.sites:
                self.sites[name].added = counted.passes
            counted.close()

    def batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The inputs of a forward pass of the model: axis 0 counts samples."""
        if self.samples or out_of_sight():
            return
        given = (t for _, t in (*tensors(args), *tensors(kwargs)) if t.ndim)
        first = next(given, None)
        self.samples = 0 if first is None else int(first.shape[0])

    # -- hooks ---------------------------------------------------------------------------------------------

    def _hook(self, work: Any, site: Site) -> Any:
        def hook(module: nn.Module, *call: Any) -> None:
            # taken off by a hook before it, that of the forward which ends the step, it is called once more, without
            # the keyword arguments
            if out_of_sight() or not self._handles or not module.training:
                return
            try:
                work(site, module, *call)
            except Exception as error:  # a fault of the monitor must not end a training
                self.failed.append(f"{site.name or 'the model'} could not be looked at: {told(error)}")

        return Hook(hook)

    def _before(self, site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = normalized(args, kwargs)
        again = in_backward()
        if given is None or given.numel() == 0 or given.is_nested or not (again or torch.is_grad_enabled()):
            return
        reading = self._readings.read(module, given.dim())
        if reading.spec is None:
            return
        if site.name not in self.sites:
            shape, dtype = tuple(given.shape), str(given.dtype).removeprefix("torch.")
            self.sites[site.name] = SiteLook(
                self.step, site.name, reading.mode, shape, dtype, samples=self.samples
            )
        look = self.sites[site.name]
        look.recomputed += again
        look.calls += not again
        left = MASKED if masked_call(args, kwargs, reading.spec) else SPREAD if _spread(reading) else ""
        if left:
            self.left[site.name] = left
        measured = self._seen[site.name] < (1 if again else CALLS)
        compared = reading.mode == "batch" and len(self._statistics.get(site.name, ())) < REPEATS
        if not measured and not compared:
            return
        if left:
            with _apart(given.device.type):
                self._describe_stored(look, reading.tensors(module))
            return
        with _apart(given.device.type):
            held = reading.tensors(module)
            stored = {k: t.detach().clone() for k, t in held.items() if k in ("running_mean", "running_var")}
            event = Event(
                # a norm without state is what a check measures in evaluation
                run="eval" if reading.mode == "input" else "batch",
                site=site,
                index=self._seen[site.name],
                spec=reading.spec,
                mode=reading.mode,
                input=given.detach(),
                output=given.detach(),
                tensors={**held, **stored},
            )
            if compared:
                look.repeated += self._repeats(site.name, event)
            if not self._seen[site.name]:
                self._describe(look, event)
        if measured:
            self._seen[site.name] += 1
            self._waiting[site.name] = event

    def _after(
        self, site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        event = self._waiting.pop(site.name, None)
        if event is None or not isinstance(output, torch.Tensor):
            return
        event.output = output.detach()
        with _apart(output.device.type):
            for probe in self._started():
                if probe.name not in self._reasons:
                    try:
                        probe.observe(event)
                    except Exception as error:
                        self._reasons[probe.name] = f"internal error in probe {probe.name}: {told(error)}"

    def _started(self) -> list[Probe]:
        if self._probes is None:
            self._subject.batch_size = self.samples
            self._probes = []
            for kind in self._kinds:
                probe = kind()
                why = probe.start(self._subject)
                if why is None:
                    self._probes.append(probe)
                else:
                    self._reasons[probe.name] = why
        return self._probes

    def _repeats(self, name: str, event: Event) -> bool:
        """These batch statistics are those of an earlier pass."""
        sets = sets_of(event)
        if isinstance(sets, str):
            return False
        spread = SAME * np.sqrt(sets.variance + sets.eps)
        earlier = self._statistics.setdefault(name, [])
        same = any(
            mean.shape == sets.mean.shape
            and bool(np.all(np.abs(mean - sets.mean) <= spread))
            and bool(np.all(np.abs(variance - sets.variance) <= 2 * SAME * (sets.variance + sets.eps)))
            for mean, variance in earlier
        )
        earlier.append((sets.mean, sets.variance))
        return same

    def _describe_stored(self, look: SiteLook, held: Mapping[str, torch.Tensor]) -> None:
        mean, var = held.get("running_mean"), held.get("running_var")
        if look.site in self.stored or mean is None or var is None:
            return
        self.stored[look.site] = summary(mean, var)
        look.running_mean = float(mean.double().square().mean().sqrt())
        look.running_variance = float(var.double().median())

    def _describe(self, look: SiteLook, event: Event) -> None:
        self._describe_stored(look, event.tensors)
        mean, var = event.tensors.get("running_mean"), event.tensors.get("running_var")
        sets = sets_of(event)
        if isinstance(sets, str) or event.mode not in ("batch", "input") or not sets.finite.any():
            return
        known = sets.finite & ~sets.dead
        look.elements = sets.size
        look.batch_mean = float(np.sqrt(np.mean(np.square(sets.mean[sets.finite]))))
        look.batch_variance = float(np.median(sets.variance[sets.finite]))
        look.denominator_min = float(sets.denominator[sets.finite].min())
        look.denominator_median = float(np.median(sets.denominator[sets.finite]))
        look.near_eps = float(np.mean(sets.under_root[known] < sets.eps)) if known.any() else 0.0
        if mean is not None and var is not None and mean.numel() == sets.mean.size:
            now = torch.from_numpy(sets.mean), torch.from_numpy(sets.variance)
            look.shift = distance((mean.cpu(), var.cpu()), now, sets.eps)[0]

    # -- the end of the step -------------------------------------------------------------------------------

    def finish(self, subject: Subject) -> dict[str, str]:
        """Parameters and gradients at the optimizer step; fills ``subject.measured``, returns why probes could not."""
        subject.batch_size = self.samples
        for site in subject.sites:
            if site.name in self.sites:
                add_parameters(self.sites[site.name], site)
        if self.left and not self._seen:
            why = "; ".join(dict.fromkeys(self.left.values()))
            self._reasons.update(dict.fromkeys((kind.name for kind in self._kinds), why))
        for probe in self._started():
            if probe.name not in self._reasons:
                try:
                    subject.measured[probe.name] = probe.finish(subject)
                except Exception as error:
                    self._reasons[probe.name] = f"internal error in probe {probe.name}: {told(error)}"
        return self._reasons


def _spread(reading: ModuleReading) -> bool:
    """What is normalized by is in no rank's own input."""
    if not (reading.synchronized and reading.mode == "batch"):
        return False
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def _apart(device: str) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device, enabled=False), torch._C.DisableTorchFunction():
        yield
