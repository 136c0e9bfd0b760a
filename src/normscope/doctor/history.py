"""What a site's state tells about its past: how often it was updated, and whether it was trained at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject


def updates(site: Site) -> int | None:
    """How often the running statistics were updated, by their own counter; None without one that counts."""
    counter = None if counter_is_idle(site) else site.array("num_batches_tracked")
    return None if counter is None or counter.size != 1 else int(counter.item())


def momentum_of(site: Site) -> float | None:
    """The update fraction of the running statistics; None where it varies, or is not known."""
    running = site.spec.running if site.spec is not None else None
    return None if running is None or "momentum" in site.unknown else running.momentum


def counter_is_idle(site: Site) -> bool:
    """PyTorch's instance norms have a counter and never touch it: statistics that keep the sample axis."""
    return site.spec is not None and "b" in site.spec.stats.partition("->")[2].split()


def statistics_at_start(site: Site) -> bool:
    """Running mean exactly 0 and running variance exactly 1 in every channel: the values they are born with."""
    mean, var = site.array("running_mean"), site.array("running_var")
    if mean is None and var is None:
        return False
    return (mean is None or not mean.any()) and (var is None or bool((var == 1).all()))


def affine_at_start(site: Site) -> bool | None:
    """Whether gain and bias look untouched by training; None where the site has neither.

    The bias tells: it starts as one number, mostly 0, and the first step moves every channel of it differently. Gains
    may start at random (DCGAN), so they are asked only where there is no bias. What makes gain and bias of a condition
    tells where it is born as zeros.
    """
    modulation = getattr(site.module, "modulation", None)
    if modulation is not None and getattr(site.module, "zero", False):  # of normscope.nn
        return not any(bool(parameter.any()) for parameter in modulation.parameters())
    asked = site.array("bias")
    if asked is None:
        asked = site.array("weight")
    if asked is None:
        return None
    if asked.size == 1:
        return float(asked.flat[0]) in (0.0, 1.0)
    return bool((asked == asked.flat[0]).all()) if asked.size else True


def looks_trained(subject: Subject) -> bool:
    """Some norm of the model has left its initialization, in its gain and bias or in its statistics, or the optimizer
    remembers steps."""
    return _stepped(subject) or any(
        affine_at_start(site) is False or (site.has_running_state and not statistics_at_start(site))
        for site in subject.sites
    )


def would_tell(subject: Subject) -> bool:
    """Some norm has parameters of its own, or the optimizer keeps a memory, that would show a training."""
    return bool(subject.optimizer and subject.optimizer.defaults.get("momentum") != 0) or any(
        affine_at_start(site) is not None for site in subject.sites
    )


def _stepped(subject: Subject) -> bool:
    if subject.optimizer is None or subject.model is None:
        return False
    return any(subject.optimizer.state.get(parameter) for parameter in subject.model.parameters())
