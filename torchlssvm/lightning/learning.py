"""What ``LSSVMModule`` does with features: learn them once, on one rank or many, with or without a store."""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchlssvm.backbone_hash import fingerprint
from torchlssvm.corrections.corrector import Corrector
from torchlssvm.corrections.pending_events import Pending
from torchlssvm.corrections.run_progress import Cursor, forgets
from torchlssvm.corrections.seen_samples import Offered
from torchlssvm.events import Add, Relabel
from torchlssvm.lightning import ranks
from torchlssvm.lightning.order import RANDOM, difference
from torchlssvm.linear import LSSVMHead
from torchlssvm.store import SampleStore

log = logging.getLogger("torchlssvm.lightning")


class Learner:
    """A head and what is known about the samples it was offered.

    Three ways, by what the head is: a head on a grid learns each rank's own share, and :meth:`level` adds the shares up; with a
    store the first rank learns all, and the others take its sums over; anything else learns all, on every rank.
    """

    def __init__(self, head: Any):
        self.head = head
        self.offered = Offered()
        self.corrector = Corrector(head, offered=self.offered)
        self.cursor: Cursor | None = None  # of a run with a store, on the first rank
        self.left_out = 0  # samples that were erased, as far as anybody can tell
        self.kept_out = 0  # samples that pending events kept out of this run, on this rank
        self.forgetful = False  # whether ids alone no longer tell what this run was offered
        self.path: str | None = None
        self.observers: list[Any] = []  # called with (ids, x, y) of what was learned here

    @property
    def store(self) -> SampleStore | None:
        """The open store."""
        return self.corrector.store

    @property
    def empty(self) -> bool:
        """Whether the head holds nothing."""
        return self.corrector.machine.empty

    # -- the store -----------------------------------------------------------------------------------------------------

    def open(self, path: str, backbone: nn.Module) -> None:
        """Open or create the store, on the first rank; the network is its source."""
        if self.path is not None:
            return
        if not isinstance(self.head, LSSVMHead) and ranks.several():
            raise ValueError("a store of a kernel machine is for one rank: its samples cannot be added up")

        def work() -> None:
            if not self.empty:  # a checkpoint was loaded before: the store knows better
                self.corrector.machine.clear()
            store = SampleStore(path, head=self.head, fingerprint=fingerprint(backbone))
            self.offered = Offered(store)
            self.corrector = Corrector(self.head, store, self.offered)
            for pending in self.corrector.pending:
                self.offered.record(pending.kept_out, pending.event.event_id)

        ranks.on_first(work)
        self.path = str(path)
        if not ranks.is_first():
            self._forget()

    def restore(self) -> None:
        """The head is what the store says, on all ranks."""
        if self.path is not None:
            ranks.on_first(lambda: None if self.store is None else self.store.restore())
            self._take_over()

    def begin(self, run: str | None, epoch: int) -> str:
        """A run begins, or goes on if it has a name; returns its name, on all ranks."""

        def work() -> str:
            if run is None:
                self.corrector.pending.end_run()
            if self.store is None:
                return run or secrets.token_hex(8)
            self.cursor = Cursor.begin(self.store, epoch) if run is None else Cursor.resume(self.store, run)
            self.forgetful = forgets(self.store, self.cursor.start)
            if self.forgetful or (run is None and forgets(self.store)):
                log.warning(
                    "samples were erased from %s, and nothing remembers which: %s learned again if the data set still has them",
                    self.store.path,
                    "in a new run they are" if run is None else "in batches that this run has not passed yet they are",
                )
            return self.cursor.run

        return ranks.on_first(work)

    def check_order(self, epoch: int, loader: dict[str, Any], trusted: bool) -> None:
        """Batches of this epoch are what they were when the store learned them, or ValueError.

        ``loader``: what they hang on now; ``trusted``: the loader itself says that it goes on where it was.
        """

        def work() -> None:
            if self.cursor is None:
                return
            then, middle = self.cursor.loader, self.cursor.epoch == epoch and self.cursor.batches > 0
            self.cursor = replace(self.cursor, loader=loader)
            if then is None or not middle:
                return
            changed = difference(then, loader)
            unknown = loader["order"] == RANDOM or (loader["order"] is None and not trusted)
            if changed or (unknown and self.forgetful):
                raise ValueError(
                    f"the store has learned {self.cursor.batches} batches of this epoch, and which samples those were cannot "
                    f"be told: {changed or 'the train loader shuffles anew each time'}. Resume with the same loader, a "
                    "torchlssvm.lightning.ResumableLoader, or fit without ckpt_path: what the store holds is not learned again"
                )

        ranks.on_first(work)

    def _take_over(self) -> None:
        if isinstance(self.head, LSSVMHead) and self.head.statistics is not None:
            ranks.copy_from_first(self.head)

    def close(self) -> None:
        """Close the store; the head stays as it is."""
        if self.store is not None:
            self.store.close()
        if self.path is not None:
            self._forget()
            self.path = None
        self.cursor, self.forgetful, self.left_out = None, False, 0

    def _forget(self) -> None:
        self.offered = Offered()
        self.corrector = Corrector(self.head, offered=self.offered)

    # -- learning ------------------------------------------------------------------------------------------------------

    def learn(
        self,
        x: Tensor,
        y: Tensor,
        ids: list[str] | None,
        subjects: list[str | None] | None,
        at: tuple[int, int] = (0, 0),
    ) -> int:
        """Learn samples x (B, J), y (B,) of the batch ``at`` (epoch, batch); returns how many were offered before."""
        if self.path is not None and ids is None:
            raise ValueError(
                "a store needs an id for each sample: batches (x, y, ids), e.g. of torchlssvm.lightning.Indexed(dataset)"
            )
        if ranks.is_summed(self.head) and self.path is None:
            return self._learn(x, y, ids, subjects)
        several = ranks.several()
        parts = ranks.gather((x.cpu(), y.cpu(), ids, subjects)) if several else [(x, y, ids, subjects)]
        parts = [(part[0].to(x.device), part[1].to(x.device), *part[2:]) for part in parts]
        if self.path is not None:
            return ranks.on_first(lambda: self._store(parts, at))
        return sum(self._learn(*part) for part in parts)

    def _learn(self, x: Tensor, y: Tensor, ids: list[str] | None, subjects: list[str | None] | None) -> int:
        """Without a store: the samples that are new go into the head, as an event."""
        if ids is None:
            ranks.agree_on_grid(self.head, x)
            if len(x):
                self.corrector.complete = False
                self.head.add(x, y)
                self._tell(None, x, y)
            return 0
        self._settle()  # what a run left behind that was stopped: an event that is decided keeps nothing out
        new = self.offered.new(ids)
        learned, y = self._screen(x, y, ids, subjects, new)
        ranks.agree_on_grid(self.head, x[learned])
        if learned:
            event = addition(x, y, ids, subjects, learned)
            outcome = self.corrector.apply_now([event])[0]
            if outcome.status != "applied":
                raise ValueError(f"samples cannot be added: {outcome.reason}")
            self.offered.record(event.ids, event.event_id)
            self._tell(list(event.ids), event.x, event.y)
        self._settle()
        return len(ids) - len(new)

    def _settle(self) -> None:
        """Apply pending events that are answered; ranks that hold shares do it where they add up."""
        if self.path is not None or not (ranks.several() and ranks.is_summed(self.head)):
            self.corrector.settle()

    def _screen(
        self, x: Tensor, y: Tensor, ids: list[str], subjects: list[str | None] | None, new: list[int]
    ) -> tuple[list[int], Tensor]:
        """Of the places ``new``, those that no pending event keeps out, and the labels that events for subjects give them."""
        pending = self.corrector.pending
        if not len(pending):
            return new, y
        learned = []
        for k in new:
            found = pending.of(ids[k], None if subjects is None else subjects[k])
            remover = self.corrector.remover(found, ids[k], x[k], y[k])
            if remover is not None:
                pending.keep_out(remover, ids[k])
                self.offered.record([ids[k]], remover.event.event_id)
                self.kept_out += 1
            else:
                y = with_labels(y, k, found)
                learned.append(k)
            pending.touched.update(p.note for p in found if not p.standing)
        return learned, y

    def _store(self, parts: list[Any], at: tuple[int, int]) -> int:
        """With a store: the samples of all ranks that are new, and how far the run is, in one transaction."""
        store, cursor = self.store, self.cursor
        assert store is not None
        self._settle()  # as above; not between two parts, which are not learned yet
        left_out = self.forgetful and cursor is not None and cursor.passed(*at)
        events, skipped = [], 0
        for x, y, ids, subjects in parts:
            self.offered.held(i for i in ids if i in store)
            new = self.offered.new(ids)
            if left_out:
                self.left_out += len(new)
                new = []
            skipped += len(ids) - len(new)
            learned, y = self._screen(x, y, ids, subjects, new)
            if learned:
                events.append(addition(x, y, ids, subjects, learned))
                self.offered.record(events[-1].ids, events[-1].event_id)  # first: taken back if it is not applied
        if cursor is not None:
            self.cursor = cursor.after(*at)
        notes = {} if self.cursor is None or self.cursor == cursor else self.cursor.note()
        notes |= self.corrector.pending.changed_notes()
        if events or notes:
            store.apply(events, notes=notes)
        for event in events:
            self._tell(list(event.ids), event.x, event.y)
        self._settle()
        return skipped

    def _tell(self, ids: list[str] | None, x: Tensor, y: Tensor) -> None:
        for observer in self.observers:
            observer(ids, x.detach().cpu(), y.detach().cpu())

    def level(self) -> None:
        """All ranks hold the same: what each learned is added up, or taken over from the first one."""
        if not ranks.several():
            return
        if self.path is not None:
            self._take_over()
        elif ranks.is_summed(self.head):
            ranks.level(self.head)
            self.meet()

    def end_pass(self) -> None:
        """All samples of an epoch have come by: apply what waited for that, where one rank does it alone."""
        if self.path is not None:
            ranks.on_first(lambda: self.corrector.settle(final=True))
        elif not ranks.several():
            self.corrector.settle(final=True)

    def unanswered(self, over: bool) -> list[str]:
        """The events that still wait, in words, on all ranks; ``over``: what stands for this run ends with it."""

        def work() -> list[str]:
            pending = self.corrector.pending
            if over:
                pending.end_run()
            return [str(p) for p in pending.unanswered]

        return ranks.on_first(work)

    def meet(self) -> None:
        """All ranks know what each of them was offered."""
        corrector = self.corrector
        states = ranks.gather((corrector.held, corrector.complete, self.offered.hashes, corrector.pending.kept_out()))
        corrector.held = {name: value for held, *_ in states for name, value in held.items()}
        corrector.complete = all(complete for _, complete, *_ in states)
        self.offered.hashes = set().union(*(hashes for _, _, hashes, _ in states))
        corrector.pending.merge([kept_out for *_, kept_out in states])

    # -- what goes into a checkpoint -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Primitives and tensors; with a store nothing, it is all there."""
        if self.path is not None:
            return {}
        return {"corrector": self.corrector.state_dict(), "offered": self.offered.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        if self.path is None and state:
            self.corrector.load_state_dict(state["corrector"])
            self.offered.load_state_dict(state["offered"])


def with_labels(y: Tensor, k: int, found: list[Pending]) -> Tensor:
    """Labels y (B,) with those of sample k as the events that stand for its subject say."""
    for pending in found:
        if pending.standing and isinstance(pending.event, Relabel):
            y = y.clone()
            y[k] = pending.event.y.to(y)
    return y


def addition(x: Tensor, y: Tensor, ids: list[str], subjects: list[str | None] | None, new: list[int]) -> Add:
    """The event that adds the samples at the places ``new``."""
    keep = torch.tensor(new, device=x.device)
    owners = None if subjects is None else [subjects[k] for k in new]
    return Add(ids=[ids[k] for k in new], x=x[keep], y=y[keep], subject=owners)
