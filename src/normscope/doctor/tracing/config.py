"""The eps that a model's own configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.tracing.paths import ModuleNames

RMS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps")
LAYERS = ("... d -> ...", "b c ... -> b ...")
LAYER = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps")
BATCH = ("batch_norm_eps",)


def expected_eps(site: Site, names: ModuleNames) -> float | None:
    """The eps for a site of this kind in the nearest ``config`` above it; None where there is none.

    A model of transformers keeps its settings in ``config``; a part taken from another model keeps its own. Nothing
    is expected of a functional call: its author chose its eps there.
    """
    if site.kind == "functional":
        return None
    for module in names.ancestors(site.path):
        config = module.__dict__.get("config")
        if config is None:
            continue
        for key in _keys(site):
            value = _get(config, key)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
        return None
    return None


def _keys(site: Site) -> tuple[str, ...]:
    if site.spec is None:  # written by hand: layer norm or RMS norm
        return RMS
    if site.spec.running is not None:
        return BATCH
    if not site.spec.center:
        return RMS
    return LAYER if site.spec.stats in LAYERS else ()


def _get(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, dict) else getattr(config, key, None)
