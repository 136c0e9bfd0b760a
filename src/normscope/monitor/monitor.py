"""``Monitor``: every normalization of a model watched while it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normscope.doctor import arguments
from normscope.doctor.check import chosen
from normscope.doctor.interrupts import uninterrupted
from normscope.doctor.report import Finding, Report
from normscope.doctor.session import Session
from normscope.doctor.tracing.paths import ModuleNames
from normscope.errors import BadInput, NormscopeError, told
from normscope.monitor import verdict
from normscope.monitor.given import optimizers, refuse_shards, roots, strangers
from normscope.monitor.look import Look
from normscope.monitor.news import News
from normscope.monitor.ranks import Ranks, process_group
from normscope.monitor.records import counters, record, watches
from normscope.monitor.site_look import SiteLook
from normscope.monitor.watch import Hook, in_backward, out_of_sight
from normscope.monitor.written import Unread, Written

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.monitor.verdict import Judged

_NUMBERS = count()


class Monitor:
    """Watch every normalization of a model while it is trained, for at most a few percent of a step.

    At every step, one hook a norm that keeps statistics counts its updates: by the training forward, by recomputation,
    without gradients, in eval. At the first step and every ``every`` steps a look is taken: statistics of the batch
    against the stored ones, denominators against eps, gains and their gradients; and the doctor's rules are applied
    (NS2xx, NS3xx and NS4xx as far as a training decides them). Norms written by hand are identified once, on copies,
    after the first look. Nothing is changed: the same bits are trained with a
    monitor as without one, and after ``stop()`` no hook is left.

    Args:
        model: a module, or several by name: ``{"student": student, "teacher": teacher}``. ``torch.compile`` and
            data-parallel wrappers are looked through.
        optimizer: one or several; a step of any of them is a step. Without one, call ``step()`` after each optimizer
            step; without either, a forward pass with gradients counts as a step and NS310 is not decided.
        every: steps from one look to the next.
        select, ignore: rule codes, or their beginnings, to apply or to leave out.
        frozen_policy: what you meant to freeze, as in :func:`normscope.check`.
        on_finding: called with each new :class:`~normscope.doctor.report.Finding`; what it raises ends the training.
        jsonl: a file to which looks and findings are appended, one JSON object a line.
        tensorboard: a directory or a ``SummaryWriter``.
        seed: of what a look picks at random.
        world, rank, store: of the process group, for runs without ``torch.distributed``'s default one.

    Raises:
        BadInput: settings that cannot be used.
        Refused: a model that cannot be read (lazy, meta, or sharded).
        MissingExtra: ``tensorboard`` is a directory and the package is not installed.

    Example:
        >>> import normscope
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with normscope.Monitor(model, optimizer) as monitor:
        ...     for _ in range(3):
        ...         loss = model(torch.randn(32, 8)).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        >>> monitor.steps, monitor.findings, len(model[1]._forward_pre_hooks)
        (3, (), 0)
    """

    COSTLY_EVERY = 10
    """looks from one that also computes the reference in float64 to the next; the first is one"""

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        every: int = 100,
        *,
        select: Sequence[str] | None = None,
        ignore: Sequence[str] | None = None,
        frozen_policy: str = "",
        on_finding: Callable[[Finding], object] | None = None,
        jsonl: str | Path | None = None,
        tensorboard: Any = None,
        seed: int = 0,
        world: int | None = None,
        rank: int | None = None,
        store: Any = None,
    ) -> None:
        self._several = isinstance(model, Mapping)
        self._model = arguments.module(nn.ModuleDict(model) if isinstance(model, Mapping) else model)
        self._optimizers = optimizers(optimizer)
        arguments.settings(None, None, None, frozen_policy)
        if on_finding is not None and not callable(on_finding):
            raise BadInput(f"on_finding must be callable, got {type(on_finding).__name__}")
        self.every = arguments.whole_number("every", every, 1, 2**31)
        chosen(select, ignore)  # refuses what is no code
        self._select, self._ignore = select, ignore
        self._settings = {"seed": seed, "frozen_policy": frozen_policy}
        self._on_finding = on_finding
        self._jsonl, self._tensorboard = jsonl, tensorboard
        self._group = world, rank, store
        self._handles: list[Any] = []
        self._running = False
        self._reset()

    def _reset(self) -> None:
        self.steps = 0
        """optimizer steps since ``start()``"""
        self.looks: dict[str, SiteLook] = {}
        """site name -> its last look"""
        self._knows_steps = bool(self._optimizers)
        self._trained = self._told_of_batches = False
        self._forwards = self._forwards_before = self._looks = 0
        self._look: Look | None = None
        self._unread: Unread | None = None
        self._news = News(self._on_finding, None, None)
        self._measured: dict[str, Any] = {}
        self._reasons: dict[str, str] = {}
        self._notes: list[str] = []

    # -- its frame -----------------------------------------------------------------------------------------

    def __enter__(self) -> Monitor:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Monitor:
        """Put the hooks on. A monitor that was stopped starts anew.

        Raises:
            NormscopeError: it is running already.
        """
        if self._running:
            raise NormscopeError("this monitor is running already: stop() it first, or make another")
        refuse_shards(self._model)
        self._reset()
        with Session(self._model) as session:
            self._modes = verdict.Modes(session, several=self._several)
        self._names = ModuleNames(self._modes.model)
        self._readings = self._names.readings
        self._written = Written(self._names)
        world, rank, store = (
            there if given is None else given
            for given, there in zip(self._group, process_group(), strict=True)
        )
        # the n-th monitors of all ranks belong together; a store of the user's own is theirs alone
        self._ranks = Ranks(world, rank, store, next(_NUMBERS) if self._group[2] is None else 0)
        subject = verdict.subject_of(self._modes, self._written, **self._settings)
        self._watches, unseen = watches(subject.sites, self._names)
        if unseen:
            self._notes.append(f"{', '.join(unseen)}: scripted, takes no hooks and is not watched")
        self._note(strangers(self._modes.model, self._optimizers))
        self._news = News(self._on_finding, self._jsonl, self._tensorboard)
        with uninterrupted():
            try:
                self._put_on()
            except BaseException:
                self._take_off()
                raise
        return self

    def _put_on(self) -> None:
        self._running = True
        for watch in self._watches.values():
            self._handles += watch.hooks()
        for root in roots(self._modes.model):
            self._handles.append(root.register_forward_pre_hook(Hook(self._forward), with_kwargs=True))
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._optimizer_steps))
            self._handles.append(optimizer.register_step_post_hook(self._optimizer_stepped))
        self._begin_look()

    def _take_off(self) -> None:
        self._running = False
        if self._look is not None:
            self._look.close()  # an unfinished step: nothing is concluded from it
            self._look = None
        if self._unread is not None:
            self._unread.close()
            self._unread = None
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    def stop(self) -> None:
        """Take the hooks off and judge what was seen since the last look. The model is as without a monitor."""
        was_running = self._running
        with uninterrupted():
            self._take_off()  # also what an interrupted stop() left
        if not was_running:
            return
        for watch in self._watches.values():
            watch.close(self._forwards, whole=False)
        try:
            self._news.tell(self.steps, self._judged(None))
        finally:
            self._news.close()

    # -- what training tells -------------------------------------------------------------------------------

    def step(self) -> None:
        """An optimizer step was made. Not needed where the monitor was given the optimizer."""
        if not self._running or self._optimizers:
            return
        guessed = not self._knows_steps and self.steps > 0
        if guessed:  # forward passes were taken for steps until now
            self.steps = 0
            for watch in self._watches.values():
                watch.forget_steps()
        self._knows_steps = True
        self._stepped()
        if guessed and self._look is None:
            self._begin_look()  # the first was at a forward pass

    def batch(self, *inputs: Any) -> None:
        """A training forward on ``inputs`` begins. Needed only where the model itself is not called (a Lightning
        module, whose ``training_step`` calls its parts)."""
        self._told_of_batches = True
        self._count(inputs, {})

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if out_of_sight() or self._told_of_batches or not torch.is_grad_enabled() or in_backward():
            return
        self._count(args, kwargs)

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._running:
            return
        if self._forwards and not self._knows_steps:
            self._stepped()
        if not self._trained:
            self._trained = True
            for watch in self._watches.values():
                watch.forget_unasked()  # passes before any training are dry runs and initializations
        self._forwards += 1
        if self._look is not None:
            self._look.batch(args, kwargs)

    def _optimizer_steps(self, *_: Any) -> None:
        self._forwards_before = self._forwards

    def _optimizer_stepped(self, *_: Any) -> None:
        self._stepped(self._forwards - self._forwards_before)

    def _stepped(self, inside: int = 0) -> None:
        """``inside``: forward passes that the optimizer made itself."""
        look = self._look
        counted = counters(self._watches) if look is not None else {}
        for name, watch in self._watches.items():
            hidden = look is not None and (watch.merged or not watch.called)
            watch.close(self._forwards, counted[name] - self._counters[name] if hidden else 0, inside)
        self.steps += 1
        self._forwards = 0
        if look is not None:
            with uninterrupted():
                look.close()
                self._look = None
            self._looked(look)
        found = self._identified()
        if found or self.steps % self.every == 0:  # what was found is measured at once
            self._begin_look(costly=found)

    # -- looks ---------------------------------------------------------------------------------------------

    def _begin_look(self, *, costly: bool = False) -> None:
        with self._surviving("no look was begun"), uninterrupted():
            subject = verdict.subject_of(self._modes, self._written, **self._settings)
            self._counters = counters(self._watches)
            costly |= self._looks % self.COSTLY_EVERY == 0
            witnesses = {name: watch.witness for name, watch in self._watches.items()}
            self._look = Look(self.steps + 1, subject, self._readings, witnesses, costly=costly)
            if not self._looks:
                self._unread = Unread(self._names, subject.sites)
            self._looks += 1

    def _identified(self) -> bool:
        """After the first look: whether norms written by hand are measured from here on."""
        if self._unread is None:
            return False
        unread, self._unread = self._unread, None
        found: list[Site] = []
        with self._surviving("norms written by hand were not identified"), uninterrupted():
            unread.close()
            sites = verdict.subject_of(self._modes, self._written, **self._settings).sites
            found = self._written.identify(unread, sites, self._modes.model)
            for watch in watches(found, self._names, self._written.tensors)[0].values():
                if watch.name not in self._watches:
                    self._watches[watch.name] = watch
                    self._handles += watch.hooks()
        return bool(found)

    def _looked(self, look: Look) -> None:
        self.looks.update(look.sites)
        self._note(
            [
                *look.failed,
                *(f"{name or 'the model'}: {why}" for name, why in look.left.items()),
            ]
        )
        with self._surviving("the ranks could not be compared"):
            eps = {site: float(getattr(watch.module, "eps", 0.0)) for site, watch in self._watches.items()}
            self._ranks.exchange(look.step, look.stored, eps)
        found = self._judged(look)
        self._news.looks(look.sites.values())
        self._news.tell(self.steps, found)

    def _judged(self, look: Look | None) -> list[Finding]:
        found: list[Finding] = []
        with self._surviving("it could not be judged"):
            found = self._judge(look)[0]
        return found

    @contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        """A fault of the monitor must not end a training; it is told in the report."""
        try:
            yield
        except Exception as error:
            self._note([f"after step {self.steps} {what}: {told(error)}"])

    def _judge(self, look: Look | None = None, *, settled: bool = False) -> Judged:
        subject = verdict.subject_of(self._modes, self._written, **self._settings)
        if look is not None:
            reasons = look.finish(subject)
            for name in subject.measured:
                self._reasons.pop(name, None)
            self._reasons.update({k: why for k, why in reasons.items() if k not in self._measured})
            self._measured.update(subject.measured)
        subject.measured = dict(self._measured)
        subject.measured["training"] = record(
            subject.sites,
            self._watches,
            self.looks,
            self._measured.get("effective_samples", {}),
            self._ranks.found,
            steps=self.steps,
            knows_steps=self._knows_steps,
            trained=self._trained or any(watch.total_with_grad for watch in self._watches.values()),
            world=self._ranks.world,
            rank=self._ranks.rank,
        )
        which = verdict.rules(self._select, self._ignore, settled=settled or self.steps >= verdict.WARM)
        return *verdict.verdict(which, subject, self._reasons), subject.sites

    def _note(self, notes: Iterable[str]) -> None:
        self._notes += [note for note in dict.fromkeys(notes) if note not in self._notes]

    # -- results -------------------------------------------------------------------------------------------

    @property
    def findings(self) -> tuple[Finding, ...]:
        """In the order in which they appeared; one that grows to new sites or graver appears again."""
        return tuple(self._news.found)

    def report(self) -> Report:
        """What holds now, of all that was seen since ``start()``; rules on settled statistics included."""
        if not hasattr(self, "_modes"):
            raise BadInput("nothing was watched yet: start() the monitor, or use it in a with statement")
        if self._running:
            for watch in self._watches.values():
                watch.settle()
        seen = f"seen: {self.steps} optimizer steps, a look at every {self.every}th"
        return verdict.report_of(
            self._modes.model,
            self._judge(settled=True),
            earlier=self._news.found,
            elsewhere=verdict.left_to_a_check(self._select, self._ignore),
            notes=[*self._notes, *self._news.failed, seen],
        )
