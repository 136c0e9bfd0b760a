"""Whether a model is in training as it was handed over. Wrapping a model in eval mode makes a parent in train mode.

Loads no torch, since rules import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject


def in_training(subject: Subject) -> bool:
    """The model is in train mode, and so is a part that this matters to: one with state of its own, or a dropout.

    >>> from types import SimpleNamespace
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    >>> in_training(SimpleNamespace(model=nn.Sequential(net, nn.Softmax(1))))
    False
    >>> in_training(SimpleNamespace(model=nn.Sequential(net, nn.Linear(2, 2))))
    True
    """
    if not getattr(subject.model, "training", False):
        return False
    return any(getattr(m, "training", False) and _has_effect(m) for m in subject.model.modules())


def stored_in_training(site: Site, training: bool) -> str:
    """Why training normalizes this site by its stored statistics, as eval does; "" where it does not.

    ``training``: what :func:`in_training` says of the model.
    """
    if not site.has_running_state or site.mode_eval not in ("running", "frozen"):
        return ""
    if site.mode_train in ("running", "frozen"):
        return "frozen"
    return "in eval in a model that is being trained" if training and site.mode_now == "running" else ""


def _has_effect(module: torch.nn.Module) -> bool:
    from torch.nn.modules.dropout import _DropoutNd

    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return bool(own) or isinstance(module, _DropoutNd)
