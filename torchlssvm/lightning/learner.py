"""Learning of features by ``LSSVMModule``: each sample once, on one rank or many, with or without a store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchlssvm.backbone_hash import fingerprint
from torchlssvm.corrections.corrector import Corrector
from torchlssvm.corrections.head_samples import HeadSamples
from torchlssvm.corrections.seen_samples import RunProgress, SeenSamples, may_have_forgotten, new_run_name
from torchlssvm.events import Add
from torchlssvm.lightning import ranks
from torchlssvm.lightning.batches import RANDOM_ORDER, describe_difference
from torchlssvm.linear import LinearHead
from torchlssvm.sample_adapter import SampleAdapter
from torchlssvm.store import SampleStore

T = TypeVar("T")

log = logging.getLogger("torchlssvm.lightning")


class Learner:
    """A head, its corrector, and the samples it has seen.

    Three ways, by the kind of head: a head on a grid learns each rank's own share, and :meth:`synchronize` adds the shares up;
    with a store the first rank learns all, and the others copy its sums; anything else learns all, on every rank.
    """

    def __init__(self, head: Any):
        self.head = head
        self.seen = SeenSamples()
        self.corrector = Corrector(head, seen=self.seen)
        self.progress: RunProgress | None = None  # of a run with a store, on the first rank
        self.left_out = 0  # samples that are not held and came in batches this run has passed: taken for erased
        self.forgetful = False  # True if ids alone no longer tell which samples this run has seen
        self.path: str | None = None
        self.observers: list[Any] = []  # called with (ids, x, y) of what was learned here

    @property
    def store(self) -> SampleStore | None:
        """The store, while it is open."""
        return self.corrector.store

    @property
    def empty(self) -> bool:
        """True if the head holds no samples."""
        return SampleAdapter(self.head).count == 0

    @property
    def named(self) -> HeadSamples:
        """The samples of a head without a store."""
        assert isinstance(self.corrector.samples, HeadSamples)
        return self.corrector.samples

    # -- the store -----------------------------------------------------------------------------------------------------

    def open(self, path: str, backbone: nn.Module, **options: Any) -> None:
        """Open or create the store, on the first rank, bound to the features of this network.

        ``options``: the suppression list of the store, its key, and what becomes of samples that were erased.
        """
        if self.path is not None:
            return
        if not isinstance(self.head, LinearHead) and ranks.are_several():
            raise ValueError("a store of a kernel machine is for one rank: its samples cannot be added up")

        def work() -> None:
            if not self.empty:  # a checkpoint was loaded before: the store knows better
                SampleAdapter(self.head).clear()
            store = SampleStore(path, head=self.head, fingerprint=fingerprint(backbone), **options)
            self.seen = SeenSamples(store)
            self.corrector = Corrector(self.head, store, self.seen)

        ranks.on_first(work)
        self.path = str(path)
        if not ranks.is_first():
            self._forget()

    def restore(self) -> None:
        """Restore the head from the store, on all ranks."""
        if self.path is not None:
            ranks.on_first(lambda: None if self.store is None else self.store.restore())
            self._copy_first_rank()

    def begin(self, run: str | None, epoch: int) -> str:
        """Begin a run, or resume the one of this name; returns its name, on all ranks."""

        def work() -> str:
            if self.store is not None or not ranks.are_several():
                self.corrector.apply_pending()
            if self.store is None:
                return run or new_run_name()
            self.progress = RunProgress.begin(self.store, epoch) if run is None else RunProgress.resume(self.store, run)
            self.forgetful = may_have_forgotten(self.store, self.progress.start)
            if self.forgetful or (run is None and may_have_forgotten(self.store)):
                known = (
                    "nothing remembers which" if self.store.suppression.path is None else "only requests are remembered"
                )
                log.warning(
                    "samples were erased from %s, and %s: %s learned again if the data set still has them",
                    self.store.path,
                    known,
                    "in a new run they are" if run is None else "in batches that this run has not passed yet they are",
                )
            return self.progress.run

        return ranks.on_first(work)

    def check_order(self, epoch: int, loader: dict[str, Any], trusted: bool) -> None:
        """Check that the batches of this epoch are those the store has learned; ValueError if they may not be.

        ``loader``: the description of the loader now; ``trusted``: the loader itself says that it goes on where it was.
        """

        def work() -> None:
            if self.progress is None:
                return
            then, middle = self.progress.loader, self.progress.epoch == epoch and self.progress.batches > 0
            self.progress = replace(self.progress, loader=loader)
            if then is None or not middle:
                return
            changed = describe_difference(then, loader)
            unknown = loader["order"] == RANDOM_ORDER or (loader["order"] is None and not trusted)
            if changed or (unknown and self.forgetful):
                raise ValueError(
                    f"the store has learned {self.progress.batches} batches of this epoch, and which samples those were cannot "
                    f"be told: {changed or 'the train loader shuffles anew each time'}. Resume with the same loader, a "
                    "torchlssvm.lightning.ResumableLoader, or fit without ckpt_path: what the store holds is not learned again"
                )

        ranks.on_first(work)

    def _copy_first_rank(self) -> None:
        if isinstance(self.head, LinearHead):
            ranks.copy_from_first(self.head)

    def close(self) -> None:
        """Close the store; the head stays as it is."""
        if self.store is not None:
            self.store.close()
        if self.path is not None:
            self._forget()
            self.path = None
        self.progress, self.forgetful, self.left_out = None, False, 0

    def _forget(self) -> None:
        self.seen = SeenSamples()
        self.corrector = Corrector(self.head, seen=self.seen)

    # -- learning ------------------------------------------------------------------------------------------------------

    def learn(
        self,
        x: Tensor,
        y: Tensor,
        ids: list[str] | None,
        subjects: list[str | None] | None,
        at: tuple[int, int] = (0, 0),
    ) -> int:
        """Learn samples x (B, J), y (B,) of the batch ``at`` (epoch, batch); returns how many were seen before."""
        if self.path is not None and ids is None:
            raise ValueError(
                "a store needs an id for each sample: batches (x, y, ids), e.g. of torchlssvm.lightning.Indexed(dataset)"
            )
        if ranks.is_summed(self.head) and self.path is None:
            return self._learn(x, y, ids, subjects)
        several = ranks.are_several()
        parts = ranks.gather((x.cpu(), y.cpu(), ids, subjects)) if several else [(x, y, ids, subjects)]
        parts = [(part[0].to(x.device), part[1].to(x.device), *part[2:]) for part in parts]
        if self.path is not None:
            return ranks.on_first(lambda: self._learn_in_store(parts, at))
        return sum(self._learn(*part) for part in parts)

    def _learn(self, x: Tensor, y: Tensor, ids: list[str] | None, subjects: list[str | None] | None) -> int:
        """Learn without a store: the samples that are new go into the head, as an event."""
        if ids is None:
            ranks.agree_on_grid(self.head, x)
            if len(x):
                self.named.complete = False
                self.head.add(x, y)
                for observer in self.observers:
                    observer(None, x, y)
            return 0
        new = self.seen.new(ids)
        learned = self.corrector.leave_out_unusable(x, ids, subjects, new)
        ranks.agree_on_grid(self.head, x[learned])
        if new:
            events = [make_addition(x, y, ids, subjects, learned)] if learned else []
            self.seen.record(self.corrector.unusable)
            self.corrector.learn(events, settle=not (ranks.are_several() and ranks.is_summed(self.head)))
            for event in events:
                self.seen.record(event.ids, event.event_id)
                self._tell(event)
        return len(ids) - len(new)

    def _learn_in_store(self, parts: list[Any], at: tuple[int, int]) -> int:
        """Learn with a store: the new samples of all ranks, the events that waited for them, and the progress of the run."""
        store, progress = self.store, self.progress
        assert store is not None
        left_out = self.forgetful and progress is not None and progress.passed(*at)
        events, skipped = [], 0
        for x, y, ids, subjects in parts:
            self.seen.record(i for i in ids if i in store)
            new = self.seen.new(ids)
            if left_out:
                self.left_out += len(new)
                new = []
            skipped += len(ids) - len(new)
            learned = self.corrector.leave_out_unusable(x, ids, subjects, new)
            if learned:
                events.append(make_addition(x, y, ids, subjects, learned))
                self.seen.record(events[-1].ids, events[-1].event_id)  # first: taken back if it is not applied
        if progress is not None:
            self.progress = progress.after(*at)
        notes = {} if self.progress is None or self.progress == progress else self.progress.note()
        self.seen.record(self.corrector.unusable)
        self.corrector.learn(events, notes)
        for event in events:
            self._tell(event)
        return skipped

    def _tell(self, event: Add) -> None:
        keep = [k for k, i in enumerate(event.ids) if i not in self.corrector.suppressed]
        for observer in self.observers if keep else []:
            observer([event.ids[k] for k in keep], event.x[keep].detach().cpu(), event.y[keep].detach().cpu())

    def synchronize(self) -> None:
        """Bring all ranks to the same state: add up what each learned, or copy that of the first one."""
        if not ranks.are_several():
            return
        if self.path is not None:
            self._copy_first_rank()
        elif ranks.is_summed(self.head):
            ranks.add_up(self.head)
            self.merge_seen()
            if ranks.share(len(self.corrector.pending)):
                self.change_on_first(self.corrector.apply_pending)

    def change_on_first(self, work: Callable[[], T]) -> T:
        """Change the head on the first rank, and bring the others to its state; returns what the first one returns."""
        return change_on_first(self.corrector, work, stored=self.path is not None)

    def end_pass(self) -> None:
        """Apply the events that waited for the end of the epoch, where one rank does it alone."""
        if self.path is not None:
            ranks.on_first(lambda: self.corrector.apply_pending(final=True))
        elif not ranks.are_several():
            self.corrector.apply_pending(final=True)

    def unanswered(self, over: bool) -> list[str]:
        """List the events that still wait, in words, on all ranks; ``over``: the run has ended, none is on watch."""

        def work() -> list[str]:
            pending = self.corrector.pending
            if over:
                pending.end_run()
            return [str(p) for p in pending.unanswered]

        return ranks.on_first(work)

    def merge_seen(self) -> None:
        """Merge the sets of seen samples across ranks."""
        named = self.named
        states = ranks.gather((named.hashes, named.complete, self.seen.hashes))
        named.hashes = {name: value for held, *_ in states for name, value in held.items()}
        named.complete = all(complete for _, complete, _ in states)
        self.seen.hashes = set().union(*(hashes for *_, hashes in states))

    # -- what goes into a checkpoint -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State as primitives and tensors; empty with a store, which has it."""
        if self.path is not None:
            return {}
        return {"corrector": self.corrector.state_dict(), "offered": self.seen.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        if self.path is None and state:
            self.corrector.load_state_dict(state["corrector"])
            self.seen.load_state_dict(state["offered"])


def change_on_first(corrector: Corrector, work: Callable[[], T], stored: bool) -> T:
    """Change a head that all ranks hold alike on the first one, and bring the others to its state."""
    try:
        return ranks.on_first(work)
    finally:
        if ranks.are_several() and stored:
            ranks.copy_from_first(corrector.head)
        elif ranks.are_several():
            ranks.add_up(corrector.head)
            state = ranks.share(corrector.state_dict())
            if not ranks.is_first():
                corrector.load_state_dict(state)


def make_addition(x: Tensor, y: Tensor, ids: list[str], subjects: list[str | None] | None, new: list[int]) -> Add:
    """Make the event that adds the samples at the places ``new``."""
    keep = torch.tensor(new, device=x.device)
    owners = None if subjects is None else [subjects[k] for k in new]
    return Add(ids=[ids[k] for k in new], x=x[keep], y=y[keep], subject=owners)
