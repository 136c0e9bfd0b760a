"""torch.fx, torch.jit.script and convert_sync_batchnorm: what they see of a layer.

A layer is a leaf to symbolic tracing, as torch's own are by the name of their package: the graph calls the module,
under every tracer. torch.jit.script compiles torch's own code in a layer that torch has; the other layers refuse.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NoReturn, cast

import torch.fx
from torch import Tensor, nn
from torch.jit import is_scripting as is_scripting  # type: ignore[attr-defined]  # in no __all__

from normscope.errors import BadInput

Proxy: Any = torch.fx.Proxy
"""what stands for a tensor while torch.fx traces; Any, because to a type checker no tensor can be one"""


def leaf(layer: nn.Module, input: Any, **given: Any) -> Tensor:
    """The call of ``layer`` as one node of the graph that is being traced.

    Raises BadInput where the layer is all that is traced: a graph in it cannot call it.
    """
    tracer = input.tracer
    path = tracer.path_of_module(layer)
    if not path:
        name = type(layer).__name__
        raise BadInput(
            f"torch.fx traces a model that has a {name} in it, as one call; got the {name} itself. "
            "Trace torch.nn.Sequential(layer)."
        )
    return cast(Tensor, tracer.create_proxy("call_module", path, (input,), given))


def method(name: str, function: Any) -> Callable[..., Tensor]:
    """torch's ``function`` under the name that it has as a method here.

    torch.jit.script names what it compiles by ``__name__``, and takes no second ``forward``.
    """
    return FunctionType(
        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
    )


class Unscriptable(nn.Module):
    """Mixin of layers that torch.nn does not have."""

    def __prepare_scriptable__(self) -> nn.Module:
        refuse_script(self)


def refuse_script(layer: nn.Module) -> NoReturn:
    """Raise BadInput, saying that torch.jit.script cannot compile ``layer``, and what else can be done."""
    raise BadInput(
        f"torch.jit.script takes those layers of normscope.nn that torch.nn has too; got {layer!r}. "
        "Use torch.export."
    )


class Unsynchronized(nn.Module):
    """Mixin of layers with the state of torch's batch norm, and its base class, that compute something else.

    torch.nn.SyncBatchNorm.convert_sync_batchnorm makes a plain batch norm of whatever has that class, without a word.
    It asks each module for its children, and there the layer refuses; nobody else who asks is refused.
    """

    _synchronized = "leaves such layers as they are"
    """what normscope.nn.SyncBatchNorm.convert_sync_batchnorm does; empty where torch's may have the layer"""

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """None, as of any layer.

        Raises BadInput where torch is making a synchronized batch norm of this layer.
        """
        if self._synchronized and sys._getframe(1).f_code is _CONVERSION:
            raise BadInput(
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm would put a plain batch norm, another function, in the "
                f"place of {self!r}. Use normscope.nn.SyncBatchNorm.convert_sync_batchnorm, which "
                f"{self._synchronized}, and leave sync_batchnorm off in a trainer. (Norms before it in this model are "
                "converted by now.)"
            )
        return super().named_children()


_CONVERSION = cast(Any, nn.SyncBatchNorm.convert_sync_batchnorm).__func__.__code__
