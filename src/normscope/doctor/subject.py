"""What is being checked: the model, its sites, the user's batch, and what probes measured. Rules read only this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from normscope.doctor.wording import listed

if TYPE_CHECKING:
    import torch

    from normscope.doctor.session import Session
    from normscope.doctor.site import Site


@dataclass(eq=False)
class Subject:
    model: torch.nn.Module
    session: Session
    sites: list[Site]
    args: tuple[Any, ...] | None = None
    """positional inputs on the model's device, None without data"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    targets: Any = None
    loss_fn: Callable[..., torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    mask: torch.Tensor | None = None
    """True at valid positions, (B, L)"""
    state: Mapping[str, torch.Tensor] | None = None
    """what the model's checkpoint holds, name -> tensor; None where none was given"""
    lacking: Mapping[str, tuple[tuple[str, ...], str]] | None = None
    """of a checkpoint without its code: path of a norm -> the statistics missing there, and what shows it"""
    batch_size: int = 0
    """number of samples in the batch: size of axis 0 shared by the inputs; 0 without data"""
    inputs_dependent: str = ""
    """why the samples of the batch are not independent (duplicates, crops of one image); "" where they look so"""
    seed: int = 0
    dataset_size: int | None = None
    frozen_policy: str = ""
    """the freeze policy the user declared: "", "statistics", "affine" or "both" """
    synthetic: bool = False
    """the inputs are random numbers, not data: nothing about the user's data may be concluded"""
    runs: dict[str, str] = field(default_factory=dict)
    """run name -> "" where it ran, else why not (see doctor/runs.py)"""
    unmeasured: dict[str, str] = field(default_factory=dict)
    """site name -> why its calls could not be measured"""
    outputs: dict[str, Any] = field(default_factory=dict)
    """run name -> what the model returned in it, detached; dropped when the probes have finished"""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """after the "gradient" run: parameter name -> gradient of the loss; dropped when the probes have finished"""
    own_backward: dict[str, str] = field(default_factory=dict)
    """name of a site written by hand -> the ``autograd.Function`` that its output comes from"""
    measured: dict[str, Any] = field(default_factory=dict)
    """probe name -> its measurement; absent where the probe could not run"""

    @property
    def has_data(self) -> bool:
        return self.args is not None

    def stateless(self) -> str:
        """What is known where no running statistics were seen."""
        unknown = [site.name or "the model" for site in self.sites if site.spec is None]
        if not unknown:
            return "no site keeps running statistics"
        return (
            "no site that is identified keeps running statistics; whether others do is not known: "
            f"{listed(unknown)} (not identified)"
        )

    def known(self) -> Iterator[Site]:
        """The sites whose specification is known."""
        return (site for site in self.sites if site.spec is not None)
