"""Step 2: train against eval, with the same input and the state told."""

from __future__ import annotations

from normscope.doctor.change import change, some
from normscope.doctor.diagnosis.step import Case, Step, told
from normscope.doctor.nested import detached
from normscope.doctor.wording import label, listed, number, percent, plural
from normscope.errors import told as error_told

TITLE = "train against eval"
CODES = "NS301 NS302 NS304 NS307 NS308 NS303 NS305 NS306 NS309 NS311 NS313 NS601"
SHOWN = 3


def step(case: Case) -> Step:
    subject = case.subject
    stateful = [site for site in subject.sites if site.has_running_state]
    finding = case.worst(CODES)
    seen, ok = [], finding is None
    undecided = [
        f"{n.code}{f' at {n.site}' if n.site else ''}: {n.reason}"
        for n in case.report.not_run
        if n.code == "NS304" and stateful and not n.reason.startswith("frozen")
    ]
    try:
        seen.append(_difference(case))
    except Exception as error:
        seen.append(f"the model does not run with batch statistics: {error_told(error)}.")
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
    if finding is not None:
        follows = told(finding)
    elif not stateful:
        follows = "no site keeps statistics, so train and eval normalize alike."
    elif undecided:
        follows = f"not all could be told: {listed(undecided, 2)}."
    else:
        follows = "stored statistics are those of this data, and every norm is in the mode it should be in."
    return Step(
        2,
        TITLE,
        "the same batch with every module in eval, and with batch statistics where training uses them (dropout off)",
        tuple(seen),
        follows,
        None
        if ok and undecided and not any(n.code in case.report.passed for n in case.report.not_run)
        else ok,
        finding.site if finding is not None else "",
        finding.fix if finding is not None else "",
    )


def _difference(case: Case) -> str:
    subject = case.subject
    runs = [
        detached(subject.session.forward(subject.args or (), subject.kwargs, mode=mode))
        for mode in ("eval", "batch")
    ]
    moved = [
        change(some(old), some(new), old.dtype)
        for old, new in zip(*runs, strict=False)
        if old.is_floating_point() and old.shape == new.shape
    ]
    if not moved:
        return "the model returns no floating point tensor to compare."
    worst = max(moved, key=lambda c: c.relative)
    if not worst.real:
        return "outputs are the same in both."
    return f"outputs differ by {percent(worst.relative)} of their size between the two."
