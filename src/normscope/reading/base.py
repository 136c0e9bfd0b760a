"""What a reader returns, and how it refuses. A reader is one file of this package with a ``READER``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from normscope.errors import NormscopeError

if TYPE_CHECKING:
    import torch

    from normscope.spec import NormSpec


class UnknownNormalization(NormscopeError, TypeError):
    """The object is not a normalization that can be read exactly; the text says why and what to do.

    Attributes:
        invalid: it is a normalization of the family by its class, built with numbers that no specification can hold.
        recognized: a reader knows what it is and says why it cannot be read; False where no reader knows it.
    """

    def __init__(self, text: str, *, invalid: bool = False, recognized: bool = True) -> None:
        super().__init__(text)
        self.invalid = invalid
        self.recognized = recognized


@dataclass(frozen=True, eq=False)
class Reading:
    """What one normalization is, what it holds, and which statistics it normalizes by.

    A mode is ``batch`` (statistics of what comes in, of a norm that couples samples or carries running state),
    ``running`` (stored statistics, in eval only), ``frozen`` (stored statistics, in train as in eval) or ``input``
    (statistics of each sample, no state).
    """

    spec: NormSpec
    type_name: str
    """``torch.nn.BatchNorm2d``, ``onnx.LayerNormalization``, or the qualified name of a user's subclass"""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """weight, bias, running_mean, running_var, num_batches_tracked: those that it has, as arrays of its framework.
    References, never copies"""
    mode_now: str = "input"
    mode_train: str = "input"
    """the mode after ``.train()``"""
    mode_eval: str = "input"
    """the mode after ``.eval()``"""
    updates: tuple[str, ...] = ()
    """in which of train and eval a forward moves the stored statistics"""
    synchronized: bool = False
    """in training, statistics are taken over all ranks of a process group"""
    remarks: tuple[str, ...] = ()
    """what no specification says: how the sums are taken, how outputs are cast"""


@dataclass(frozen=True, eq=False)
class CallReading:
    """What one call of a function normalizes, and by which statistics."""

    spec: NormSpec
    type_name: str
    """as written: ``F.layer_norm``, ``torch.layer_norm``, ``aten.native_layer_norm``"""
    input: torch.Tensor
    tensors: dict[str, torch.Tensor]
    """weight, bias, running_mean, running_var: those that were passed"""
    mode: str
    """batch | running | input"""


@dataclass(frozen=True)
class Reader:
    """One reader: ``read`` and ``read_call`` return None for what is not theirs.

    A reader imports its framework inside its functions, and is asked only where ``needs`` is imported already: no
    object of a framework exists before that.
    """

    needs: str
    knows: tuple[str, ...]
    """names of what it reads, for messages"""
    read: Callable[[Any, int | None], Reading | None] | None = None
    read_call: Callable[[Any, tuple[Any, ...], dict[str, Any]], CallReading | None] | None = None


def qualified_name(cls: type) -> str:
    """Name of a class for people: ``torch.nn.BatchNorm2d``, not ``torch.nn.modules.batchnorm.BatchNorm2d``."""
    homes = {
        "torch.nn.modules.": "torch.nn",
        "normscope.nn.": "normscope.nn",
        "keras.src.layers.": "keras.layers",
        "flax.nnx.": "flax.nnx",
        "flax.linen.": "flax.linen",
    }
    home = next(
        (public for inside, public in homes.items() if cls.__module__.startswith(inside)), cls.__module__
    )
    return f"{home}.{cls.__qualname__}"
