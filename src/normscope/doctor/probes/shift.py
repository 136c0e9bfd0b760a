"""Which biases the following norm removes: derived from its axes, and measured as the gradient they do not get.

A bias b_c adds a constant along every axis but c. A norm that centers, and whose statistic sets each hold a single c,
subtracts exactly that constant again: mean(x + b) = mean(x) + b. Group norm with more than one channel a group
removes only the mean of its biases, and a norm over c only their overall mean: neither makes them redundant.

Where the norm takes them away, the loss does not depend on them: in a backward pass with batch statistics their
gradient is rounding error. That measures the same on the model as it is, however else the bias may be used, and also
where the norm's specification is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from normscope.doctor.probes import Probe

if TYPE_CHECKING:
    from normscope.doctor.site import Call, Neighbour, Site
    from normscope.doctor.subject import Subject
    from normscope.spec import NormSpec


@dataclass(frozen=True)
class FedBias:
    """A bias of a convolution or linear layer that feeds a norm through views alone."""

    site: str
    call: int
    producer: str
    op: str
    features: int
    magnitude: float
    """largest |bias|"""
    removed: bool | None
    """by the norm's axes, in training; None where its specification or the feature axis is not known"""
    gradient: float | None
    """norm of the bias's gradient over that of the weight's; None where it was not measured"""


class ShiftProbe(Probe):
    """``measured["shift"]``: one :class:`FedBias` for every bias that stands directly before a norm."""

    name = "shift"
    # The gradient run is where biases show no gradient. The eval run keeps the probe going where there is none.
    runs = ("eval", "gradient")

    def finish(self, subject: Subject) -> list[FedBias]:
        names = {id(p): name for name, p in subject.model.named_parameters()}
        return [
            _measure(subject, names, site, call, neighbour)
            for site in subject.sites
            for call in site.calls
            for neighbour in call.fed_by
            if _directly_before(neighbour)
        ]


def _directly_before(neighbour: Neighbour) -> bool:
    return (
        neighbour.kind in ("conv", "linear")
        and neighbour.bias is not None
        and neighbour.consumers == 1
        and not neighbour.through
    )


def _measure(
    subject: Subject, names: dict[int, str], site: Site, call: Call, neighbour: Neighbour
) -> FedBias:
    assert neighbour.bias is not None
    bias = neighbour.bias.detach()
    return FedBias(
        site=site.name,
        call=call.index,
        producer=neighbour.path,
        op=neighbour.op,
        features=bias.numel(),
        magnitude=float(bias.abs().max()) if bias.numel() else 0.0,
        removed=_removed(site, call, neighbour.feature_axis),
        gradient=_gradient(subject, names, neighbour),
    )


def _removed(site: Site, call: Call, axis: int | None) -> bool | None:
    spec = call.spec or site.spec
    if spec is None or axis is None:
        return None
    return site.mode_train in ("batch", "input") and removes_shift(spec, call.shape, axis)


def removes_shift(spec: NormSpec, shape: tuple[int, ...], axis: int) -> bool:
    """Whether adding one constant per index of input axis ``axis`` leaves the normalized values unchanged.

    True where the norm centers and no statistic set holds more than one index of that axis.

    >>> from normscope.spec import families
    >>> removes_shift(families.batch_norm(), (8, 6, 5, 5), 1)
    True
    >>> [removes_shift(families.group_norm(g), (8, 6, 5, 5), 1) for g in (1, 3, 6)]
    [False, False, True]
    """
    if not spec.center:
        return False
    axis %= len(shape)
    return all(part.kept or part.size == 1 for part in spec.bind(shape).axes if part.dim == axis)


def _gradient(subject: Subject, names: dict[int, str], neighbour: Neighbour) -> float | None:
    bias = subject.gradients.get(names.get(id(neighbour.bias), ""))
    weight = subject.gradients.get(names.get(id(neighbour.weight), ""))
    if bias is None or weight is None:
        return None
    size = float(weight.detach().double().norm())
    return float(bias.detach().double().norm()) / size if size > 0 else None
