"""Evidence for people: within 100 columns, save for the last line, which is never broken; or everything written out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normscope.verify.evidence import Evidence, VerifyReport
    from normscope.verify.unverified import Unverified

WIDTH = 100
NAMED = 6
"""so many of those not verified are named in the last line"""


def report_lines(report: VerifyReport, *, long: bool) -> Iterator[str]:
    """The whole report. ``long``: every item with its input and results in full."""
    yield f"normscope verify: {report.target}"
    topics = report.topics
    if report.by_norm and not long:
        yield from _folded(topics) if len(topics) > 1 else _one_a_line(*topics.items())
    else:
        for topic, items in topics.items():
            yield f"\n{topic}"
            yield from _blocks(items, long)
    if report.not_verified:
        yield "\nnot verified"
        for item in report.not_verified:
            yield from _wrapped(f"  {item.site}  {item.type_name}: ", item.why, hang=6)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield ""
    yield from _wrapped("with ", versions, hang=5)
    yield _verdict(report)


def item_lines(item: Evidence, *, long: bool, convention: bool = True) -> Iterator[str]:
    """One item: the claim, input, convention, results, and the number against its tolerance."""
    yield from _wrapped(f"  {_word(item)}  ", item.claim)
    yield from _value("input ", item.input, long)
    if convention:
        yield from _wrapped("          ", item.convention)
    for name, value in item.result.items():
        yield from _value(f"{name} = ", value, long)
    yield from _wrapped("          ", f"measured {_numbers(item, 3)}: {item.because}")


def _verdict(report: VerifyReport) -> str:
    count = len(report.evidence)
    checks = f"{count} checks of {_norms(len(report.topics))}" if report.by_norm else f"{count}"
    told = f"all {checks} passed" if report.passed else f"{len(report.failed)} of {checks} FAILED"
    return told + _not_verified(report.not_verified)


def _not_verified(items: tuple[Unverified, ...]) -> str:
    if not items:
        return ""
    named = ", ".join(item.site for item in items[:NAMED])
    rest = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return f"; {_norms(len(items))} not verified: {named}{rest}"


def _norms(count: int) -> str:
    return f"{count} norm{'' if count == 1 else 's'}"


def _blocks(items: Iterable[Evidence], long: bool) -> Iterator[str]:
    """Item after item; a convention is printed where it changes."""
    before = None
    for item in items:
        yield from item_lines(item, long=long, convention=item.convention != before)
        before = item.convention


def _one_a_line(topic: tuple[str, list[Evidence]]) -> Iterator[str]:
    """One norm: one line a check, and below the first that failed what explains it."""
    name, items = topic
    yield f"\n{name}"
    yield from _wrapped("  ", items[0].convention, hang=4)
    yield from _value("first input ", items[0].input, False, indent=2)
    first_failure = next((item for item in items if not item.passed), None)
    for item in items:
        yield from _wrapped(f"  {_word(item)}  {_numbers(item, 2):>18}  ", item.claim)
        if item is first_failure:
            yield from [*item_lines(item, long=False, convention=False)][1:]


def _folded(topics: dict[str, list[Evidence]]) -> Iterator[str]:
    """Several norms: one line a norm, and below it the checks that failed, the first with what explains it."""
    yield ""
    for topic, items in topics.items():
        failed = [item for item in items if not item.passed]
        told = f"{len(failed)} of {len(items)} checks failed" if failed else f"{len(items)} checks"
        word = "FAILED" if failed else "passed"
        yield from _wrapped(f"  {word}  ", f"{topic}: {told}; {items[0].convention}")
        if failed:
            yield from item_lines(failed[0], long=False, convention=False)
        for item in failed[1:]:
            yield from _wrapped(f"  FAILED  {_numbers(item, 2):>18}  ", item.claim)


def _word(item: Evidence) -> str:
    return "passed" if item.passed else "FAILED"


def _numbers(item: Evidence, digits: int) -> str:
    return f"{item.measured:.{digits}g} {'>=' if item.at_least else '<='} {item.tolerance:.{digits}g}"


def _wrapped(head: str, text: str, *, hang: int | None = None) -> Iterator[str]:
    """``head`` and ``text`` in lines of at most WIDTH; later lines are indented by ``hang``, or below the text."""
    below = " " * (len(head) if hang is None else hang)
    yield from wrap(head + text, WIDTH, subsequent_indent=below, break_on_hyphens=False) or [head]


def _value(name: str, value: Any, long: bool, *, indent: int = 10) -> Iterator[str]:
    head = " " * indent + name
    if long:
        yield head + written(value)
    elif isinstance(value, str):
        yield from _wrapped(head, value, hang=indent + 2)
    else:
        yield head + abbreviated(value, WIDTH - len(head))


def written(value: Any) -> str:
    """In full, ten significant digits; lists in brackets, names before their values."""
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {written(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(written(item) for item in value)}]"
    return str(value)


def abbreviated(value: Any, room: int) -> str:
    """In at most ``room`` characters where the value is a list: its size and its beginning.

    >>> abbreviated([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], 40)
    '[[1, 2, 3], [4, 5, 6]]'
    >>> abbreviated([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], 20)
    '2x3: [[1, 2, ...'
    """
    full = written(value)
    if len(full) <= room or not isinstance(value, (list, tuple)):
        return full
    sizes, inner = [], value
    while isinstance(inner, (list, tuple)) and inner:
        sizes.append(str(len(inner)))
        inner = inner[0]
    head = f"{'x'.join(sizes)}: "
    return f"{head}{full[: room - len(head) - 4].rpartition(' ')[0]} ..."
