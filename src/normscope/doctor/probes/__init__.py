"""Measurements, one a file. A probe listens to named runs of the model and hands rules plain numbers.

A new probe is one new file here with a ``Probe`` subclass; nothing else needs to be told about it. Probes never
import rules. The runs (see ``doctor/runs.py``) are shared: the model runs once per run, however many probes listen.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject


class Probe:
    """One measurement. Made anew for each check, so attributes may hold what was observed.

    ``start`` returns None to take part, or the reason why it cannot (no running statistics, one sample, ...): the
    rules that need this probe are then listed as not run with that reason. ``finish`` returns the measurement,
    which rules read as ``subject.measured[name]``.
    """

    name: ClassVar[str]
    runs: ClassVar[tuple[str, ...]] = ()
    """names of the runs it listens to; with none, it needs no data and only ``finish`` is called"""
    rides: ClassVar[bool] = False
    """measures for the report's pictures, not for a rule: it takes part in every check and makes no run happen"""

    def start(self, subject: Subject) -> str | None:
        return None

    def observe(self, event: Event) -> None:
        """One call of one site. Reduce to small numbers here: holding activations would double the user's memory."""

    def finish(self, subject: Subject) -> Any:
        raise NotImplementedError


@cache
def all_probes() -> dict[str, type[Probe]]:
    """Every probe by name, from the files of this package.

    Raises:
        ValueError: two probes have one name.
    """
    found: dict[str, type[Probe]] = {}
    for info in iter_modules(__path__):
        module = import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Probe) and value.__module__ == module.__name__:
                if value.name in found:
                    raise ValueError(f"two probes are named {value.name!r}: {found[value.name]} and {value}")
                found[value.name] = value
    return dict(sorted(found.items()))
