"""``check_state``: a checkpoint without its code. Its norms are found by their tensors, and the rules on state run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from normscope.doctor.check import chosen, row, versions
from normscope.doctor.judging import judge
from normscope.doctor.portraits import measurements
from normscope.doctor.probes import all_probes
from normscope.doctor.probes.finite import Bad, FiniteParameters, bad
from normscope.doctor.report import NotRun, Report, SiteRow, severity_rank
from normscope.doctor.runs import run_probes
from normscope.doctor.session import Session
from normscope.doctor.site import Site
from normscope.doctor.stored_norms import LAYER, Search, find_norms, without_statistics
from normscope.doctor.stored_sites import bare, sites_of
from normscope.doctor.stored_state import StoredState, in_memory
from normscope.doctor.subject import Subject
from normscope.doctor.wording import listed, plural
from normscope.errors import BadInput

FINITE = FiniteParameters.name
ALSO = ("NS105",)
"""rules of modules that a configuration beside the weights lets decide"""


def check_state(
    state: Mapping[str, Any] | str | Path,
    *,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    eps: float | None = None,
    momentum: float | None = None,
    target: str = "",
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Check the norms of a checkpoint by what it holds, without the model's code.

    A norm shows by its tensors: running statistics; a weight and a bias, two vectors of one size; a vector weight
    alone under a norm's name. What a file cannot tell, eps, momentum, often the kind, is said and not assumed: rules
    that need it are listed as not run. Only the norms' tensors are read, one by one, so memory does not grow with the
    file; nothing in a file is run.

    Args:
        state: a state dict (tensors or NumPy arrays by name, nested as training scripts nest them), or the path of a
            ``.safetensors``, ``.pt``, ``.pth``, ``.ckpt`` or ``.bin`` file, of an index of shards, or of a folder with
            ``config.json``, whose eps is taken.
        select, ignore: rule codes, or their beginnings, to run or to leave out.
        eps: the eps that your code builds these norms with; compared with that of ``config.json``.
        momentum: the update fraction of the running statistics, as in PyTorch.
        target: a name for the report, by default the path.
        progress: called with a word before each step.

    Returns:
        a :class:`~normscope.doctor.report.Report`.

    Raises:
        BadTarget: a file that is missing, broken or asks for code.
        BadInput: a state or settings that cannot be used.

    Example:
        >>> import torch, normscope
        >>> state = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).state_dict()
        >>> state["1.running_var"][2] = float("nan")
        >>> [(f.code, f.severity, f.site) for f in normscope.check_state(state).findings if f.severity == "error"]
        [('NS301', 'error', '1')]
    """
    told = {"eps": _number("eps", eps), "momentum": _number("momentum", momentum)}
    rules = chosen(select, ignore)
    step = progress or (lambda _: None)
    step("names")
    stored = opened(state)
    found = find_norms(stored.tensors)
    step("values")
    norms = bare(found.norms)
    sites, notes = sites_of(norms, stored.config, **told)
    lacking = without_statistics(norms)
    subject = Subject(
        model=nn.Module(), session=cast(Session, None), sites=sites, lacking=lacking  # no rule on state runs a model
    )  # fmt: skip
    ours = [rule for rule in rules if "C" in rule.kinds or rule.code in ALSO]
    needed = {name for rule in ours for name in rule.needs} - {FINITE}
    reasons = run_probes(subject, [all_probes()[name] for name in sorted(needed)])
    subject.measured[FINITE] = _not_finite(sites)
    step("rules")
    findings, passed, not_run = judge(ours, subject, reasons)
    hollow = _hollow(passed, sites, stated=eps is not None)
    not_run += hollow
    others = [rule for rule in rules if rule not in ours]
    not_run += [NotRun(rule.code, "needs the model's code: check the model itself") for rule in others]
    return Report(
        findings=tuple(sorted(findings, key=lambda f: (-severity_rank(f.severity), f.code))),
        sites=tuple(_row(site) for site in sites),
        passed=tuple(code for code in passed if code not in {entry.code for entry in hollow}),
        not_run=tuple(not_run),
        notes=tuple(stored.notes + _notes(found, sites) + notes),
        target=str(target) or stored.source,
        versions=versions(),
        measurements=measurements(subject),
    )


def _not_finite(sites: list[Site]) -> dict[str, Bad]:
    """The norms' gains and biases that are NaN or infinite, as the probe of a whole model tells them."""
    found: dict[str, Bad] = {}
    for site in sites:
        for name in ("weight", "bias"):
            if name in site.tensors and (seen := bad(site.tensors[name])) is not None:
                found[f"{site.path}.{name}".lstrip(".")] = seen
    return found


def _hollow(passed: Sequence[str], sites: list[Site], *, stated: bool) -> list[NotRun]:
    """Rules that found nothing because there was nothing to compare have not passed."""
    found = []
    if "NS401" in passed and not any(site.has_running_state for site in sites):
        found.append(NotRun("NS401", "no norm keeps the variances that eps stands beside"))
    if "NS105" in passed and not stated and any(site.expected_eps is not None for site in sites):
        found.append(
            NotRun("NS105", "eps is that of config.json: state that of your code to compare, eps=1e-5")
        )
    return found


def describe_state(state: Mapping[str, Any] | str | Path) -> tuple[SiteRow, ...]:
    """The norms of a checkpoint without any check."""
    stored = opened(state)
    sites, _ = sites_of(bare(find_norms(stored.tensors).norms), stored.config)
    return tuple(_row(site) for site in sites)


def opened(state: Any) -> StoredState:
    """A state dict in memory, a file, or one that is open already.

    Raises:
        BadTarget: a file that cannot be used.
        BadInput: neither.
    """
    if isinstance(state, StoredState):
        return state
    if isinstance(state, Mapping):
        return in_memory(state)
    if isinstance(state, (str, Path)):
        from normscope.targets.state_files import open_state  # a floor above

        return open_state(state)
    raise BadInput(
        f"state must be a state dict or the path of a file, got {type(state).__name__}; of a model, pass "
        "model.state_dict(), or use normscope.check(model)"
    )


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise BadInput(
            f"{name} must be a finite number from 0 on, got {value!r}; leave it out if you do not know it"
        )
    return float(value)


def _row(site: Site) -> SiteRow:
    return replace(row(site), unknown=tuple(sorted(site.unknown)))


def _notes(found: Search, sites: list[Site]) -> list[str]:
    """What the file cannot tell, and what was left out."""
    notes = []
    unknown = Counter(name for site in sites for name in site.unknown)
    if unknown:
        notes.append(
            "not in the file: "
            + ", ".join(f"{name} (of {plural(count, 'norm')})" for name, count in sorted(unknown.items()))
            + "; nothing was assumed in their place"
        )
    unsure = [site.name for site in sites if "center" in site.unknown]
    if unsure:
        notes.append(
            f"{plural(len(unsure), 'weight')} without a bias ({listed(unsure)}) taken for RMS norms by name; layer "
            "norms without a bias look alike"
        )
    several = [norm.path for norm in found.norms if norm.kind == LAYER and not norm.named]
    if several:
        notes.append(f"{listed(several)} taken for layer norms over several axes by their shapes")
    if found.vectors:
        notes.append(
            f"{plural(len(found.vectors), 'vector')} without a bias under no norm's name were left out: "
            f"{listed(found.vectors)}"
        )
    if found.quantized:
        notes.append(f"left out, since their parameters are stored as integers: {listed(found.quantized)}")
    return notes
