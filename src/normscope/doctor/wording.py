"""How findings speak: counts, numbers, lists of names, and many like findings told as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, severity_rank

if TYPE_CHECKING:
    from normscope.doctor.site import Site


def encodable(text: str) -> str:
    r"""Text with escapes for halves of surrogate pairs, which names may hold and UTF-8 has not.

    >>> encodable("naïve"), encodable("half\udc80")
    ('naïve', 'half\\udc80')
    """
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "site"), plural(49, "site"), plural(2, "batch")
    ('1 site', '49 sites', '2 batches')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}es" if noun.endswith(("ch", "s", "x")) else f"{count} {noun}s"


SAMPLES_UNKNOWN = (
    "cannot tell: axis 0 of the inputs counts samples, and no tensor among them says how many (tell a monitor whose "
    "model is not called itself with monitor.batch(inputs) before each pass)"
)


def number(value: float) -> str:
    """Three significant digits; whole numbers below a million in full.

    >>> number(0.0012345), number(103000.0), number(1e-12)
    ('0.00123', '103000', '1e-12')
    """
    return f"{value:.0f}" if abs(value) < 1e6 and value == round(value) else f"{value:.3g}"


def percent(share: float) -> str:
    """A share in percent.

    >>> percent(0.125), percent(0.0006)
    ('12.5 %', '0.06 %')
    """
    return f"{100 * share:.3g} %"


def listed(names: Sequence[str], limit: int = 3) -> str:
    """The first names, and how many more.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c and 2 more')
    """
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def eps_text(eps: float | None) -> str:
    """An eps as people write it.

    >>> eps_text(1e-05), eps_text(0.0010000000474974513), eps_text(None)
    ('1e-05', '0.001', 'None')
    """
    return "None" if eps is None else f"{eps:.6g}"


def label(site: Site) -> str:
    """The site's name, or "the model" for a model that is itself the norm."""
    return site.name or "the model"


def fold(findings: Iterable[Finding]) -> list[Finding]:
    """One diagnosis at many sites as one finding: at the first of the gravest, with the others under ``also``."""
    found = list(findings)
    if len(found) < 2:
        return found
    worst = max(severity_rank(f.severity) for f in found)
    head = next(f for f in found if severity_rank(f.severity) == worst)
    rest = tuple(f for f in found if f is not head)
    return [
        replace(
            head,
            message=f"{head.message}{_same(len(rest))}",
            evidence={**head.evidence, "sites": len(found)},
            also=rest,
        )
    ]


def unfold(finding: Finding) -> list[Finding]:
    """What ``fold`` put together; any other finding alone, with what follows from it still under it.

    >>> pair = [Finding("NS501", "a", "No effect."), Finding("NS501", "b", "No effect.")]
    >>> unfold(*fold(pair)) == pair
    True
    """
    others = len(finding.also)
    if not others or finding.evidence.get("sites") != others + 1:
        return [finding]
    evidence = {key: value for key, value in finding.evidence.items() if key != "sites"}
    message = finding.message.removesuffix(_same(others))
    return [replace(finding, message=message, evidence=evidence, also=()), *finding.also]


def _same(others: int) -> str:
    return f" The same at {plural(others, 'other site')}."


def clean_path(path: str) -> str:
    """A module path without the links that ``torch.compile`` and FSDP put in: as the user wrote it."""
    return ".".join(part for part in path.split(".") if part not in ("_orig_mod", "_fsdp_wrapped_module"))
