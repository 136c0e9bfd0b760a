"""All normalizations of a state, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normscope.errors import BadInput
from normscope.porting import flax, keras, torch
from normscope.porting.norms import STORED, Found, Norm
from normscope.porting.report import PortReport
from normscope.transforms.report import SiteChange

READ = {"torch": torch.norms, "keras": keras.norms, "flax": flax.norms, "linen": flax.norms}
SEPARATORS = {"torch": ".", "keras": "/", "flax": "/", "linen": "/"}
NO_NUMBERS = "a state holds neither eps nor momentum: set them in the target as the source has them"


def port_state(
    state: Mapping[Any, Any], source: str, target: str, offset: float, rename: dict[str, str]
) -> tuple[dict[str, Any], PortReport]:
    """See `normscope.porting.port.port`."""
    if not state:
        raise BadInput("the state is empty: there is nothing to port.")
    found: Found = READ[source](state)
    norms, left = found
    separator = SEPARATORS[source]
    _all_known(rename, {separator.join(norm.path) for norm in norms})
    result: dict[str, Any] = {}
    sites = []
    for norm in norms:
        path, why = separator.join(norm.path), _unfit(norm, target)
        names = ", ".join(norm.names.values())
        if why:
            sites.append(SiteChange(path, f"{source}: {names}", reason=why))
            continue
        if "weight" in norm.tensors and offset:
            norm.tensors["weight"] += offset
        new = tuple(rename[path].split(SEPARATORS[target])) if path in rename else norm.path
        entries = _written(new, norm, target)
        if target in ("flax", "linen"):
            flax.merged(result, entries)
        else:
            result |= entries
        after = f"{target}: {SEPARATORS[target].join(new)} ({', '.join(norm.tensors)})"
        sites.append(SiteChange(path, f"{source}: {names}", after))
    for group in left:
        sites.append(SiteChange(separator.join(group.path), ", ".join(group.names), reason=group.reason))
    return result, PortReport("port", tuple(sites), notes=tuple(_notes(norms, source, target, offset)))


def _written(path: tuple[str, ...], norm: Norm, target: str) -> dict[str, Any]:
    if target == "torch":
        return dict(torch.written(path, norm.tensors))
    if target == "keras":
        return keras.written(path, norm.tensors, only_scale=set(norm.tensors) == {"weight"})
    return flax.written(path, norm.tensors, linen=target == "linen")


def _unfit(norm: Norm, target: str) -> str:
    axes = norm.tensors[STORED[0]].dim() if STORED[0] in norm.tensors else 1
    if axes != 1 and target in ("torch", "keras"):
        return f"its statistics have {axes} axes, and a batch norm of {target} stores one"
    return ""


def _all_known(rename: dict[str, str], paths: set[str]) -> None:
    strange = sorted(set(rename) - paths)
    if strange:
        raise BadInput(
            f"rename names {', '.join(strange)}, and the normalizations are {', '.join(sorted(paths)) or 'none'}."
        )


def _notes(norms: list[Norm], source: str, target: str, offset: float) -> list[str]:
    if not norms:
        return []
    notes = [NO_NUMBERS]
    if offset:
        notes.append(f"weights: {offset:g} was added, which the source adds itself")
    if any(STORED[0] in norm.tensors for norm in norms):
        if source == "torch":
            notes.append(
                "running variances are carried as they are; torch stored M / (M - 1) times the variance of a batch of "
                f"M elements a channel, and {target} goes on with the variance itself; num_batches_tracked is dropped"
            )
        elif target == "torch":
            notes.append(
                f"running variances are carried as they are; {source} stores the variance of a batch, and torch.nn "
                "goes on with M / (M - 1) times it for M elements a channel; normscope.nn's batch norms do not with "
                "running_correction=0. num_batches_tracked starts at 0"
            )
    return notes
