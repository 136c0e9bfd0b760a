"""Which norms stay frozen: their training flags after the model's own ``train()``, and what is frozen around them.

A model may override ``train()`` to keep norms in eval, or may not: the method is really called, and undone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from normscope.doctor.probes import Probe
from normscope.doctor.tracing.paths import ModuleNames
from normscope.errors import told

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject


@dataclass(frozen=True)
class Freeze:
    """Training flags of the module that runs a site, and the parameters of and around it."""

    training_now: bool
    training_after_train: bool
    """after the model's ``train()``"""
    training_after_eval: bool
    """after ``train()`` and then ``eval()``"""
    parameters_frozen: bool
    """it has a gain or a bias, and none requires a gradient"""
    block_frozen: bool
    """no parameter of the smallest enclosing module that holds others than the site's own requires a gradient"""
    block: str
    """path of that module"""
    rest_frozen: bool
    """the same of its parameters but the site's own"""


class FreezeProbe(Probe):
    """``measured["freeze"]``: site name -> :class:`Freeze`."""

    name = "freeze"

    def start(self, subject: Subject) -> str | None:
        if any(site.kind == "node" for site in subject.sites):
            return "a graph has no train() and no eval()"
        try:
            subject.session.modes_after("train", "eval")
        except Exception as error:  # an exported program, for instance, has no modes
            return f"the model's own train() or eval() raised {told(error)}"
        return None

    def finish(self, subject: Subject) -> dict[str, Freeze]:
        names = ModuleNames(subject.model)
        in_train = subject.session.modes_after("train")
        in_eval = subject.session.modes_after("train", "eval")
        return {site.name: _freeze(site, names, in_train, in_eval) for site in subject.sites}


def _freeze(site: Site, names: ModuleNames, in_train: dict[str, bool], in_eval: dict[str, bool]) -> Freeze:
    around = list(names.ancestors(site.path))
    module = site.module if site.module is not None else around[0]
    path = names.path(module) or ""
    own = [tensor for name, tensor in site.tensors.items() if name in ("weight", "bias")]
    block = _block(around, own)
    mine = {id(tensor) for tensor in own}
    return Freeze(
        training_now=bool(module.training),
        training_after_train=in_train[path],
        training_after_eval=in_eval[path],
        parameters_frozen=_frozen(own),
        block_frozen=_frozen(block.parameters()),
        block=names.path(block) or "",
        rest_frozen=_frozen(p for p in block.parameters() if id(p) not in mine),
    )


def _block(around: list[torch.nn.Module], own: list[torch.Tensor]) -> torch.nn.Module:
    """The innermost module with a parameter that is not the site's own, else the model."""
    mine = {id(tensor) for tensor in own}
    for module in around:
        if any(id(parameter) not in mine for parameter in module.parameters()):
            return module
    return around[-1]


def _frozen(tensors: Iterable[torch.Tensor]) -> bool:
    empty = True
    for tensor in tensors:  # most are live, and the first one tells
        if tensor.requires_grad:
            return False
        empty = False
    return not empty
