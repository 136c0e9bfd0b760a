"""What a module says of itself, where it was not seen: layers of ``normscope.nn`` and modules with ``__normscope__``.

What was measured stands; only an update rule that no probe could see is taken from the module, and a refusal names what
the module says it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from normscope.identify.module_state import UNSEEN_UPDATE
from normscope.identify.result import Identification
from normscope.reading import UnknownNormalization, read

if TYPE_CHECKING:
    from normscope.spec import NormSpec

STATED_UPDATE = "how training moves them was not seen: the update is as the module states it"


def as_stated(answer: Identification, module: Any) -> Identification:
    """The answer with what the module states, told as such.

    >>> from torch import nn
    >>> as_stated(Identification(reason="not a norm"), nn.LayerNorm(4)).notes
    ()
    >>> import normscope.nn as own
    >>> as_stated(Identification(reason="not a norm"), own.ScaleNorm(4)).notes[0][:50]
    'not seen, but stated by the module: ... d -> ...; '
    """
    stated = _stated(module)
    if stated is None:
        return answer
    if answer.spec is None:
        return replace(answer, notes=(*answer.notes, f"not seen, but stated by the module: {stated}"))
    if UNSEEN_UPDATE not in answer.notes or not _as_evaluated(stated, answer.spec):
        return answer
    assert answer.spec.running is not None
    assert stated.running is not None
    running = replace(stated.running, over=answer.spec.running.over)
    notes = tuple(STATED_UPDATE if note == UNSEEN_UPDATE else note for note in answer.notes)
    alike = tuple(spec.replace(running=running) for spec in answer.equivalent)
    return replace(answer, spec=answer.spec.replace(running=running), equivalent=alike, notes=notes)


def _as_evaluated(stated: NormSpec, seen: NormSpec) -> bool:
    """Both store statistics, and normalize alike by them."""
    if stated.running is None or seen.running is None:
        return False
    return bool(stated.replace(running=None).same_function(seen.replace(running=None)))


def _stated(module: Any) -> NormSpec | None:
    kind = type(module)
    if not (hasattr(kind, "__normscope__") or kind.__module__.startswith("normscope.nn.")):
        return None
    try:
        return read(module).spec
    except (UnknownNormalization, ValueError):
        return None
