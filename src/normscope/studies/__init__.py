"""Studies: what normalization does, one intervention at a time, on data, with a rule declared before the run.

Each file of this folder is one study: a module with a `Study` called ``STUDY``, found by its file's name (``-`` in the
name of the study is ``_`` in that of the file). It declares a grid of cells and measures one cell for one seed:

>>> from normscope.studies import Decision, Measure, Study, above, run
>>> def measure(cell, seed, scale):
...     return {"error": 0.1 * cell["width"] + 0.01 * seed}
>>> study = Study(
...     name="widths",
...     title="Wider is worse",
...     question="Does the error grow with the width?",
...     intervention="the width",
...     held_fixed="everything else",
...     method="A line and a little noise.",
...     measures=(Measure("error", unit="units", better="lower"),),
...     cells=lambda scale: [{"width": w} for w in (1, 2)],
...     measure=measure,
...     decisions=(
...         Decision(
...             "grows",
...             "The error at width 2 is above that at width 1.",
...             lambda table: above(table.difference("error", {"width": 2}, {"width": 1})),
...         ),
...     ),
...     limits="A toy.",
... )
>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     results = run(study, out=folder, seeds=5, backend="sequential")
>>> results.decided["grows"].verdict, round(results.decided["grows"].numbers["value"].mean, 3)
('holds', 0.1)

The runner is `run`; `normscope study` is its command line. The parts stand in `normscope.studies.lab`: ``table`` and
``intervals`` (means over seeds with bootstrap intervals, paired differences), ``verdicts`` (`above`, `below`, `within`,
`at_most`, `at_least`, `all_of`), ``data`` (images without a network), ``training``, ``networks``, ``figures``.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Any

from normscope.errors import BadInput

if TYPE_CHECKING:
    from normscope.studies.lab.intervals import Interval as Interval
    from normscope.studies.lab.results import Results as Results
    from normscope.studies.lab.runner import run as run
    from normscope.studies.lab.study import Decision as Decision
    from normscope.studies.lab.study import Measure as Measure
    from normscope.studies.lab.study import Study as Study
    from normscope.studies.lab.table import Table as Table
    from normscope.studies.lab.verdicts import Verdict as Verdict
    from normscope.studies.lab.verdicts import above as above
    from normscope.studies.lab.verdicts import all_of as all_of
    from normscope.studies.lab.verdicts import at_least as at_least
    from normscope.studies.lab.verdicts import at_most as at_most
    from normscope.studies.lab.verdicts import below as below
    from normscope.studies.lab.verdicts import within as within

_HOME = {
    "Decision": "study",
    "Interval": "intervals",
    "Measure": "study",
    "Results": "results",
    "Study": "study",
    "Table": "table",
    "Verdict": "verdicts",
    "above": "verdicts",
    "all_of": "verdicts",
    "at_least": "verdicts",
    "at_most": "verdicts",
    "below": "verdicts",
    "run": "runner",
    "within": "verdicts",
}

__all__ = [*_HOME, "find", "names"]


def names() -> list[str]:
    """The studies that come with Normscope.

    >>> "geometry" in names()
    True
    """
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__) if not m.ispkg)


def find(name: str) -> Study:
    """The study of this name.

    >>> find("geometry").name
    'geometry'

    Raises BadInput where there is none.
    """
    if name not in names():
        raise BadInput(f"there is no study named {name!r}; there are {', '.join(names())}")
    study: Study = import_module(f"{__name__}.{name.replace('-', '_')}").STUDY
    return study


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.lab.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
