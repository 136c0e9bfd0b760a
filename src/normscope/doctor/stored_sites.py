"""The norms of a checkpoint as sites: their specification as far as names, shapes and a configuration tell it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from normscope.doctor.site import Site
from normscope.doctor.stored_norms import BATCH, GROUP, INSTANCE, LAYER, RMS, StoredNorm
from normscope.doctor.tracing.config import BATCH as BATCH_KEYS
from normscope.doctor.tracing.config import LAYER as LAYER_KEYS
from normscope.doctor.tracing.config import LAYERS as OVER_FEATURES
from normscope.doctor.tracing.config import RMS as RMS_KEYS
from normscope.doctor.wording import clean_path
from normscope.spec import NormSpec, families

MOST_VALUES = 2**24
"""numbers of all norms together that are read; a model of 10 GB has some 600,000"""
AXES = "abcdefgh"
TYPE_NAMES = {
    BATCH: "batch norm", LAYER: "layer norm", GROUP: "group norm", INSTANCE: "instance norm", RMS: "RMS norm",
    "": "layer, group or instance norm",
}  # fmt: skip
REASONS = {
    GROUP: "a group norm by its name; the number of groups is not in the file",
    INSTANCE: "an instance norm by its name; the axes that it normalizes over are not in the file",
    BATCH: "a batch norm by its name, without the running statistics that would show it",
    LAYER: "a layer norm by its name, with running statistics, which layer norms do not keep",
    RMS: "an RMS norm by its name, with running statistics, which RMS norms do not keep",
    "": "a norm by its tensors; neither its name nor its shapes tell which",
}


def bare(norms: Iterable[StoredNorm]) -> tuple[StoredNorm, ...]:
    """The norms under the names that the model's author gave them, without those of wrappers."""
    return tuple(
        replace(norm, path=clean_path(norm.path.removeprefix("module.")).removeprefix("module."))
        for norm in norms
    )


def sites_of(
    norms: Iterable[StoredNorm],
    config: Mapping[str, Any] | None,
    *,
    eps: float | None = None,
    momentum: float | None = None,
) -> tuple[list[Site], list[str]]:
    """A site a norm, its tensors read, and notes. ``eps`` and ``momentum`` are what the user knows."""
    sites: list[Site] = []
    left, unread = MOST_VALUES, 0
    for norm in norms:
        size = sum(tensor.size for tensor in norm.tensors.values())
        site = _site(norm)
        sites.append(site)
        if size > left:
            site.reason, unread = (
                "not read: the norms of this file hold more numbers than a model's",
                unread + 1,
            )
            continue
        left -= size
        site.tensors = {name: tensor.read() for name, tensor in norm.tensors.items()}
        site.expected_eps = expected_eps(config, norm) if config is not None else None
        certain = "rms" in norm.path.rpartition(".")[2].lower() or "rms_norm_eps" in (config or {})
        _specify(site, norm, site.expected_eps if eps is None else eps, momentum, certain=certain)
    notes = (
        [f"{unread} norms were not read: together they hold more than {MOST_VALUES} numbers"]
        if unread
        else []
    )
    return sites, notes


def _site(norm: StoredNorm) -> Site:
    site = Site(norm.path, norm.path, "stored", TYPE_NAMES[norm.kind])
    if norm.has_statistics:
        site.mode_train, site.mode_eval, site.mode_now = "batch", "running", "running"
    return site


def _specify(
    site: Site, norm: StoredNorm, eps: float | None, momentum: float | None, *, certain: bool
) -> None:
    """``certain``: an RMS norm is one, by its name or the configuration."""
    spec = _spec(norm)
    if spec is None:
        site.reason = REASONS[norm.kind]
        return
    unknown = {"weight_offset"} if norm.kind == RMS else set()
    if norm.kind == RMS and not certain:
        unknown.add("center")  # a layer norm without a bias looks alike
    if eps is not None:
        spec = spec.replace(eps=eps)
    else:
        unknown.add("eps")
    if spec.running is not None:
        if momentum is not None:
            spec = spec.replace(running=replace(spec.running, momentum=momentum))
        else:
            unknown.add("momentum")
    site.spec, site.unknown = spec, frozenset(unknown)


def _spec(norm: StoredNorm) -> NormSpec | None:
    """None where what is stored does not tell the axes."""
    weight, bias = "weight" in norm.tensors, "bias" in norm.tensors
    if norm.has_statistics:
        return families.batch_norm(weight=weight, bias=bias) if norm.kind == BATCH else None
    if norm.kind == LAYER:
        rank = len(norm.tensors["weight"].shape)
        return families.layer_norm(" ".join(AXES[:rank]) if rank > 1 else "d", weight=weight, bias=bias)
    return families.rms_norm() if norm.kind == RMS else None


def expect(sites: Iterable[Site], config: Mapping[str, Any]) -> None:
    """The eps that the ``config.json`` of a checkpoint names becomes what is expected of a model that loaded it."""
    for site in sites:
        if site.kind == "functional" or site.spec is None:
            continue
        if site.spec.running is not None:
            kind = BATCH
        elif not site.spec.center:
            kind = RMS
        else:
            kind = LAYER if site.spec.stats in OVER_FEATURES else ""
        named = _named_eps(config, kind, site.name)
        if named is not None and named != site.expected_eps:
            site.expected_eps, site.expected_by_weights = named, True


def expected_eps(config: Mapping[str, Any], norm: StoredNorm) -> float | None:
    """The eps that ``config.json`` names for a norm of this kind."""
    return _named_eps(config, norm.kind, norm.path)


def _named_eps(config: Mapping[str, Any], kind: str, path: str) -> float | None:
    """The eps for norms of one kind.

    A model of several parts (``text_config``, ``vision_config``) may have one for each: the part is the one whose name
    stands in the path, or all where they agree.
    """
    keys = {BATCH: BATCH_KEYS, LAYER: LAYER_KEYS, RMS: RMS_KEYS}.get(kind, ())
    own = _eps(config, keys)
    parts = {
        name.removesuffix("_config"): found
        for name, part in config.items()
        if name.endswith("_config") and isinstance(part, Mapping) and (found := _eps(part, keys)) is not None
    }
    for name, value in parts.items():
        if name and name in path:
            return value
    if own is not None:
        return own
    return next(iter(parts.values())) if len(set(parts.values())) == 1 else None


def _eps(config: Mapping[str, Any], keys: Iterable[str]) -> float | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1:
            return float(value)
    return None
