"""Normalizations that are no modules of a known kind: calls of functions, and arithmetic written by hand.

They show themselves only in a forward, so they are listed where there is a sample; a transform leaves them all.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from normscope import functional
from normscope.doctor.session import Session
from normscope.doctor.site import Site
from normscope.doctor.sites import find_sites
from normscope.transforms.chosen import HAND_WRITTEN
from normscope.transforms.report import SiteChange

OTHER_NAMES = {"normalize": "l2_norm"}
"""functions of torch that `normscope.functional` has under another name"""
HOME = f"{functional.__name__}."
INLINED = (
    "is written by hand inside a larger forward, and only layers that can be read are changed: write a layer of "
    "torch.nn in its place"
)


def elsewhere(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], known: Collection[str]
) -> tuple[SiteChange, ...]:
    """What normalizes in one forward in eval mode besides the modules at the paths ``known``, in order of calls.

    Raises whatever the model raises while it is followed.
    """
    with Session(model) as session:
        sites = find_sites(session, args, kwargs)
    # a module that is listed already answers for everything that it calls
    return tuple(_left(site) for site in sites if site.path not in known)


def _left(site: Site) -> SiteChange:
    reason = _reason(site)
    before = "arithmetic" if site.kind == "inlined" else site.type_name
    return SiteChange(site.name, before, "", reason, site.aliases, already=site.type_name.startswith(HOME))


def _reason(site: Site) -> str:
    if site.kind == "hidden":
        return (
            "runs inside a scripted, traced or exported module: accelerate the model it was made from; torch.export "
            "keeps layers of normscope.nn, torch.jit runs torch's code in their place"
        )
    if site.kind != "functional":
        return INLINED if site.kind == "inlined" else HAND_WRITTEN
    if site.type_name.startswith(HOME):
        return "is a call of normscope.functional already"
    name = site.type_name.rpartition(".")[2]
    ours = OTHER_NAMES.get(name, name)
    call = f"a call of {site.type_name}, not a module"
    if ours not in functional.__all__:
        return f"{call}, and normscope.functional has no counterpart"
    return f"{call}: write {HOME}{ours}, or a normscope.nn layer"
