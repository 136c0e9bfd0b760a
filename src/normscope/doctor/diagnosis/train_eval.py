"""Step 2: train against eval, with the same input and the state told.

Rules judge the statistics that known sites keep, and so explain the gap that these make: the run with batch
statistics shows it. What else ``train()`` changes shows in a run after it, with dropout off, and is not in order until
its cause is known. What is random beside dropout (noise, stochastic depth) is told by a second seed.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from normscope.doctor.change import Change, change, some
from normscope.doctor.diagnosis.step import Case, Step, told
from normscope.doctor.modes import NoFunctionalDropout
from normscope.doctor.modes_apart import GAP
from normscope.doctor.nested import detached
from normscope.doctor.wording import label, listed, number, percent, plural
from normscope.errors import told as error_told

if TYPE_CHECKING:
    from collections.abc import Iterator

TITLE = "train against eval"
CODES = "NS301 NS302 NS304 NS307 NS308 NS303 NS305 NS306 NS309 NS311 NS313 NS601"
SHOWN = 3
ROUNDING = 1e-4
RUNS = {
    "eval": "after eval()",
    "batch": "with batch statistics",
    "train": "after train()",
    "seed": "after train() with another seed",
}


def step(case: Case) -> Step:
    subject = case.subject
    stateful = [site for site in subject.sites if site.has_running_state]
    finding = case.worst(CODES) or case.worst("NS106", but=lambda f: GAP not in f.evidence)
    seen, runs = [], {}
    undecided = [
        f"{n.code}{f' at {n.site}' if n.site else ''}: {n.reason}"
        for n in case.report.not_run
        if n.code == "NS304" and stateful and not n.reason.startswith("frozen")
    ]
    for run, words in RUNS.items():
        try:
            runs[run] = _outputs(case, run)
        except Exception as error:
            seen.append(f"the model does not run {words}: {error_told(error)}.")
    gaps = _gaps(runs)
    seen += [_said(gaps[run], words) for run, words in RUNS.items() if run in gaps and run != "seed"]
    first = [site for site in stateful if finding is not None and site.name == finding.site]
    for site in (first + [site for site in stateful if site not in first])[:SHOWN]:
        count = site.array("num_batches_tracked")
        updates = (
            f"{plural(int(count.max()), 'update')}" if count is not None and count.size else "no counter"
        )
        momentum = (
            site.spec.running.momentum if site.spec is not None and site.spec.running is not None else None
        )
        rate = f", momentum {number(momentum)}" if momentum is not None else ""
        seen.append(
            f"{label(site)}: {updates}{rate}; {site.mode_train} statistics in train, {site.mode_eval} in eval."
        )
    if len(stateful) > SHOWN:
        seen.append(f"and {plural(len(stateful) - SHOWN, 'more site')} with running statistics.")
    unknown = _unknown(case, runs, gaps)
    if finding is not None:
        follows, ok = told(finding), False
    elif unknown:
        follows, ok = f"not decided: {unknown}.", None
    elif not stateful:
        follows, ok = "no site keeps statistics, and train and eval give the same outputs.", True
    elif undecided:
        follows = f"not all could be told: {listed(undecided, 2)}."
        ok = True if any(n.code in case.report.passed for n in case.report.not_run) else None
    else:
        follows = "stored statistics are those of this data, and every norm is in the mode it should be in."
        ok = True
    return Step(
        2,
        TITLE,
        "the same batch after eval(), with batch statistics where training uses them, and after train() (dropout off)",
        tuple(seen),
        follows,
        ok,
        finding.site if finding is not None else "",
        finding.fix if finding is not None else "",
    )


def _outputs(case: Case, run: str) -> list[torch.Tensor]:
    subject = case.subject
    watch: tuple[Any, ...] = ()
    if run in ("train", "seed"):
        watch = (NoFunctionalDropout(), *([_another_seed(subject.seed)] if run == "seed" else []))
    mode = "train" if run == "seed" else run
    output = subject.session.forward(subject.args or (), subject.kwargs, mode=mode, watch=watch)
    return list(detached(output))


@contextmanager
def _another_seed(seed: int) -> Iterator[None]:
    torch.manual_seed(seed + 1)
    yield


def _gaps(runs: dict[str, list[torch.Tensor]]) -> dict[str, Change | None]:
    """Of the runs to the one in eval mode, of two seeds, and of the run in train mode to that with batch statistics.

    None where no output can be compared.
    """
    pairs = {
        "batch": ("eval", "batch"),
        "train": ("eval", "train"),
        "seed": ("train", "seed"),
        "rest": ("batch", "train"),
    }
    return {
        name: _worst(runs[one], runs[other])
        for name, (one, other) in pairs.items()
        if one in runs and other in runs
    }


def _worst(before: list[torch.Tensor], after: list[torch.Tensor]) -> Change | None:
    moved = [
        change(some(old), some(new), old.dtype)
        for old, new in zip(before, after, strict=False)
        if old.is_floating_point() and old.shape == new.shape
    ]
    return max(moved, key=lambda c: c.relative, default=None)


def _differs(gap: Change) -> bool:
    """By more than other kernels of the same arithmetic do: attention has one for eval alone."""
    return gap.relative > max(ROUNDING, gap.tolerance)


def _said(gap: Change | None, words: str) -> str:
    if gap is None:
        return f"{words} the model returns no floating point tensor to compare with that of eval."
    if not _differs(gap):
        return f"{words} outputs are the same as in eval."
    return f"{words} outputs differ by {percent(gap.relative)} of their size from those in eval."


def _unknown(case: Case, runs: dict[str, list[torch.Tensor]], gaps: dict[str, Change | None]) -> str:
    """Why a difference, or none, says nothing; "" where sites that the rules judge explain it."""
    sites = case.subject.sites
    switching = [s for s in sites if s.mode_train != s.mode_eval and not s.has_running_state]
    rest, noise = gaps.get("rest"), gaps.get("seed")
    if switching:
        names = listed([label(site) for site in switching], SHOWN)
        return (
            f"{names} {'normalizes' if len(switching) == 1 else 'normalize'} by other statistics in train than in "
            "eval; where the stored ones are is not known, so no rule looked whether they fit this data"
        )
    if noise is not None and _differs(noise):
        return (
            f"train mode is random beside dropout (another seed changes outputs by {percent(noise.relative)}), as "
            "noise or stochastic depth make it, and a gap of that size would not show"
        )
    batch = gaps.get("batch")
    unjudged = batch is not None and _differs(batch) and not any(site.has_running_state for site in sites)
    if unjudged or (rest is not None and _differs(rest)):
        return (
            "no site found explains the difference; a norm inlined in a forward (under `if self.training`), or a "
            "branch of training alone, would. Make the norm a module of its own, so that it is found"
        )
    if "train" not in runs and not any(site.has_running_state for site in sites):
        return "what train() changes could not be seen"
    return ""
