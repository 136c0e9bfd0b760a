"""What was seen of a training run: updates of running statistics, by whom and how often, and the ranks' statistics.

``normscope.Monitor`` fills it; rules read it as ``subject.measured["training"]``. Plain numbers, no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normscope.doctor.subject import Subject

NEEDS_TRAINING = "needs training: normscope.Monitor"


@dataclass(frozen=True)
class RankGap:
    """How far the running statistics of one rank lie from those of the rank it was compared with."""

    rank: int
    other: int
    step: int
    """optimizer step before whose forward they were taken, after any broadcast of buffers"""
    shift: float
    """root mean square over channels of the difference of the means, in units of the denominator"""
    log_var: float
    """largest |log ratio| of the variances + eps"""


@dataclass(frozen=True)
class SiteTraining:
    """One site over the run so far. Medians are over the optimizer steps that were seen whole and updated the site."""

    steps: int = 0
    """such steps"""
    per_step: float = 0.0
    """median number of updates of the running statistics in a step"""
    in_backward: float = 0.0
    """median of those that were made while a backward pass was running: recomputation"""
    forwards: float = 0.0
    """median number of forward passes of the model in those steps"""
    inside: float = 0.0
    """median of those among them that the optimizer's own step made, by its closure"""
    added: int = 0
    """in the last step that was looked at: backward passes that the gradient is the sum of, 0 where unknown"""
    repeated: int | None = None
    """in the last step that was looked at: updates with the same batch statistics as an earlier one; None: no look"""
    counted_only: bool = False
    """the counter moved where no call was seen, as in compiled code"""
    accumulated: bool = False
    """`normscope.nn.accumulating` moved them, which the counter tells"""
    with_grad: int = 0
    """updates with gradients, those of checkpointed forward passes among them"""
    without_grad: int = 0
    """updates without gradients that no backward pass followed up; recalibrations are not counted"""
    stretches: int = 0
    """stretches between two optimizer steps in which those came"""
    in_eval: int = 0
    """updates while the module was in eval mode"""
    recalibrated: int = 0
    """updates without gradients that recompute the statistics: a cumulative average, or one that was just reset"""
    follows: bool = False
    """its parameters change although it never runs with gradients: a moving average of another model"""
    shift: float = 0.0
    """largest move of the means over one stretch without gradients, in standard deviations"""
    log_var: float = 0.0
    """the same of the variances: largest |log ratio|"""
    synchronized: bool = False
    """batch statistics are taken over all ranks"""
    samples: int = 0
    """samples of the batch of this rank, 0 where unknown"""
    elements: int = 0
    """elements of a statistic set, 0 where unknown"""
    effective: float | None = None
    """independent values behind a batch mean, estimated in training"""
    ranks: tuple[RankGap, ...] = ()
    """comparisons with other ranks, the last of each"""


@dataclass(frozen=True)
class TrainingRecord:
    """A training run so far."""

    steps: int = 0
    """optimizer steps that were seen whole"""
    knows_steps: bool = False
    """an optimizer was given, or ``step()`` is called"""
    trained: bool = False
    """a forward pass with gradients was seen"""
    world: int = 1
    """ranks of the process group"""
    rank: int = 0
    sites: Mapping[str, SiteTraining] = field(default_factory=dict)


def training_of(subject: Subject) -> TrainingRecord | None:
    """What a monitor recorded; None in a plain check."""
    record: TrainingRecord | None = subject.measured.get("training")
    return record
