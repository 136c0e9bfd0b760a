"""What a frozen normalization is: a module whose ``train()`` leaves it in eval, and that knows the way back.

The module stays the object it is. Its class becomes a subclass of its own class that overrides ``train`` and nothing
that computes, so its forward, its keys in a state dict, its hooks and every reference to it are as before. What was
there is kept in one plain attribute, which copies and pickles with the module.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from normscope.doctor.modes import set_training
from normscope.doctor.refusals import Refused

RECORD = "normscope_frozen"
"""attribute: ``training``, the flag to come back to (absent where statistics are live), and ``requires_grad`` by
name (absent where gain and bias are)"""
MARK = "_normscope_frozen_from"
"""attribute of a frozen class: the user's class"""


def frozen_parts(module: nn.Module) -> tuple[str, ...]:
    """Which of ``statistics`` and ``affine`` are frozen by this library.

    >>> frozen_parts(nn.BatchNorm1d(3))
    ()
    """
    record = vars(module).get(RECORD, {})
    return tuple(
        part for part, key in (("statistics", "training"), ("affine", "requires_grad")) if key in record
    )


def freeze_statistics(module: nn.Module) -> None:
    """Put the module into eval mode for good."""
    vars(module).setdefault(RECORD, {})["training"] = module.training
    _become_frozen(module)
    set_training(module, False)


def freeze_affine(module: nn.Module) -> None:
    """Turn ``requires_grad`` off for its parameters."""
    before = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    vars(module).setdefault(RECORD, {})["requires_grad"] = before
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def thaw(module: nn.Module, statistics: bool, affine: bool) -> None:
    """Back to what was: the class, the flag that ``train()`` or ``eval()`` asked for last, ``requires_grad``."""
    record = vars(module)[RECORD]
    if statistics and "training" in record:
        module.__class__ = getattr(type(module), MARK)
        set_training(module, record.pop("training"))
    if affine and "requires_grad" in record:
        parameters = dict(module.named_parameters())
        for name, flag in record.pop("requires_grad").items():
            if name in parameters:
                parameters[name].requires_grad_(flag)
    if not record:
        del vars(module)[RECORD]


def _become_frozen(module: Any) -> None:
    users: Any = type(module)
    module.__class__ = _frozen_class(users)


@cache
def _frozen_class(users: Any) -> Any:
    def train(self: Any, mode: bool = True) -> Any:
        super(frozen, self).train(mode)
        getattr(self, RECORD)["training"] = self.training
        set_training(self, False)
        return self

    def reset_running_stats(self: Any) -> None:
        raise Refused(
            f"the running statistics of this {users.__name__} are frozen, and resetting them would leave mean 0 and "
            "variance 1 that nothing updates. Call normscope.transforms.unfreeze first"
        )

    def extra_repr(self: Any) -> str:
        return f"{super(frozen, self).extra_repr()}, frozen={'+'.join(frozen_parts(self))}"

    def reduce(self: Any, protocol: int) -> Any:  # a class made here is found by what it was made of
        make, arguments, *state = super(frozen, self).__reduce_ex__(protocol)
        return (_rebuilt, (make, *(users if one is frozen else one for one in arguments)), *state)

    members = {
        "__module__": users.__module__,
        "__qualname__": users.__qualname__,
        "__doc__": users.__doc__,
        "__reduce_ex__": reduce,
        "train": train,
        "extra_repr": extra_repr,
        MARK: users,
    }
    if hasattr(users, "reset_running_stats"):
        members["reset_running_stats"] = reset_running_stats
    frozen: Any = type(users.__name__, (users,), members)
    return frozen


def _rebuilt(make: Any, *arguments: Any) -> Any:
    module = make(*arguments)
    _become_frozen(module)
    return module
