"""How ``LSSVMModule`` learns features: each sample once, on one rank or several, with or without a store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchlssvm.backbone_hash import fingerprint
from torchlssvm.corrections.corrector import Corrector
from torchlssvm.corrections.head_samples import HeadSamples
from torchlssvm.corrections.seen_samples import SeenSamples, begin_run, may_have_forgotten, resume_run
from torchlssvm.events import Add, check_text
from torchlssvm.features.description import describe_network
from torchlssvm.lightning import ranks
from torchlssvm.sample_adapter import SampleAdapter
from torchlssvm.store import SampleStore
from torchlssvm.store.database import NETWORK_NOTE

T = TypeVar("T")

log = logging.getLogger("torchlssvm.lightning")


class Learner:
    """A head, its corrector, and the samples it has seen.

    There are two ways to learn on several ranks. If the head has a grid and no store, each rank learns its own share, and
    :meth:`synchronize` adds up the shares. With a store, and for any other head, the first rank learns all samples, and the
    other ranks copy its state.
    """

    def __init__(self, head: Any):
        self.head = head
        self.path: str | None = None
        self.observers: list[Any] = []  # called with (ids, x, y) of samples that were learned here
        self._connect(None)

    def _connect(self, store: SampleStore | None) -> None:
        self.seen = SeenSamples(store)
        self.corrector = Corrector(self.head, store, self.seen)

    @property
    def store(self) -> SampleStore | None:
        """The store, while it is open."""
        return self.corrector.store

    @property
    def empty(self) -> bool:
        """True if the head holds no samples."""
        return SampleAdapter(self.head).count == 0

    @property
    def shared_out(self) -> bool:
        """True if there are several ranks and each learns its own share."""
        return self.path is None and ranks.are_several() and ranks.is_summed(self.head)

    @property
    def named(self) -> HeadSamples:
        """The samples of a head without a store."""
        assert isinstance(self.corrector.samples, HeadSamples)
        return self.corrector.samples

    # -- the store -----------------------------------------------------------------------------------------------------

    def open(self, path: str, backbone: nn.Module, classes: list[str] | None = None, **options: Any) -> None:
        """Open or create the store on the first rank, for the features of this network and the names of the classes.

        ``options``: of :class:`~torchlssvm.store.SampleStore`.
        """
        if self.path is not None:
            return

        def work() -> None:
            if not self.empty:  # a checkpoint was loaded before: the store takes precedence
                SampleAdapter(self.head).clear()
            store = SampleStore(path, head=self.head, fingerprint=fingerprint(backbone), **options)
            if store.note(NETWORK_NOTE) is None:
                store.set_note(NETWORK_NOTE, describe_network(backbone))
            if classes is not None and not store.classes:
                store.name_classes(classes)
            elif classes is not None and store.classes[: len(classes)] != classes:  # some may have been added since
                known = store.classes
                store.close()
                raise ValueError(f"the classes of the store at {path} are {known}, not {classes}")
            self._connect(store)

        ranks.on_first(work)
        self.path = str(path)
        if not ranks.is_first():
            self._connect(None)

    def restore(self) -> None:
        """Restore the head from the store, on all ranks."""
        if self.path is not None:
            ranks.on_first(lambda: None if self.store is None else self.store.restore())
            ranks.copy_from_first(self.head)

    def begin(self, run: str | None) -> str:
        """Begin a run, or resume the one of this name; returns its name, on all ranks."""

        def work() -> str:
            store = self.store
            if store is not None and run is not None:
                resume_run(store, run)
            if not self.shared_out:
                self.corrector.apply_waiting()
            if store is not None and may_have_forgotten(store):
                listed = "" if store.suppression.path is None else ", except for those erased on request"
                log.warning(
                    "samples were erased from %s, and the store no longer knows which: they are learned again if the data "
                    "set still has them%s",
                    store.path,
                    listed,
                )
            return run or begin_run(store)

        name = ranks.on_first(work)
        self.seen.key = ranks.share(self.seen.key)
        return name

    def close(self) -> None:
        """Close the store; the head stays as it is."""
        if self.store is not None:
            self.store.close()
        if self.path is not None:
            self._connect(None)
            self.path = None

    # -- learning ------------------------------------------------------------------------------------------------------

    def learn(self, x: Tensor, y: Tensor, ids: list[str] | None, subjects: list[str | None] | None) -> int:
        """Learn samples x (B, J), y (B,); return the number of samples that were seen before."""
        if self.path is not None and ids is None:
            raise ValueError(
                "a store needs an id for each sample: batches (x, y, ids), e.g. of torchlssvm.lightning.Indexed(dataset)"
            )
        if ids is not None:
            ids = [check_text(i, "an id") for i in ids]
        if subjects is not None:
            subjects = [None if s is None else check_text(s, "subject") for s in subjects]
        parts = [(x, y, ids, subjects)]
        if self.shared_out or not ranks.are_several():
            return self._learn(parts)
        gathered = ranks.gather((x.cpu(), y.cpu(), ids, subjects))
        parts = [(part[0].to(x.device), part[1].to(x.device), *part[2:]) for part in gathered]
        return ranks.on_first(lambda: self._learn(parts))

    def _learn(self, parts: list[Any]) -> int:
        """Learn the new samples of batches, and apply the events that waited for them. With a store, this is one change."""
        if self.store is None and len(parts) > 1:
            return sum(self._learn([part]) for part in parts)
        events, skipped = [], 0
        for x, y, ids, subjects in parts:
            if ids is None:
                self._learn_unnamed(x, y)
                continue
            if self.store is not None:
                self._compare_held(self.store, x, y, ids, subjects)
            new = self.seen.new(ids)
            skipped += len(ids) - len(new)
            learned = self.corrector.leave_out_unusable(x, ids, subjects, new)
            if self.shared_out:
                ranks.agree_on_grid(self.head, x[learned], y[learned])
            if learned:
                keep = torch.tensor(learned, device=x.device)
                owners = None if subjects is None else [subjects[k] for k in learned]
                events.append(Add(ids=[ids[k] for k in learned], x=x[keep], y=y[keep], subject=owners))
                if self.store is not None:  # first: taken back if the event is not applied
                    self.seen.record(events[-1].ids, events[-1].event_id)
        self.seen.record(self.corrector.unusable)
        try:
            self.corrector.learn(events, settle=not self.shared_out)
        except BaseException:
            for event in events:
                self.seen.take_back(event.ids)
            raise
        for event in events:
            self.seen.record(event.ids, event.event_id)
            kept = [k for k, i in enumerate(event.ids) if i not in self.corrector.suppressed]
            for observer in self.observers if kept else []:
                observer([event.ids[k] for k in kept], event.x[kept].detach().cpu(), event.y[kept].detach().cpu())
        return skipped

    def _compare_held(
        self, store: SampleStore, x: Tensor, y: Tensor, ids: list[str], subjects: list[str | None] | None
    ) -> None:
        """Raise ValueError if the store holds another sample under one of the ids, and record those that it holds as seen."""
        held = [k for i, k in {i: k for k, i in enumerate(ids)}.items() if i in store]
        if held:
            owners = None if subjects is None else [subjects[k] for k in held]
            store.without_held(Add([ids[k] for k in held], x[held], y[held], owners), corrected=True)
            self.seen.record(ids[k] for k in held)

    def _learn_unnamed(self, x: Tensor, y: Tensor) -> None:
        """Learn samples without ids."""
        ranks.agree_on_grid(self.head, x, y)
        if len(x):
            self.named.complete = False
            self.head.add(x, y)
            for observer in self.observers:
                observer(None, x, y)

    def synchronize(self) -> None:
        """Bring all ranks to the same state by adding up the learned shares, or by copying the state of the first rank."""
        if not self.shared_out:
            ranks.copy_from_first(self.head)
        else:
            ranks.add_up(self.head)
            states = ranks.gather((self.named.hashes, self.named.complete, self.seen.hashes))
            self.named.hashes = {name: value for held, *_ in states for name, value in held.items()}
            self.named.complete = all(complete for _, complete, _ in states)
            self.seen.hashes = set().union(*(hashes for *_, hashes in states))
            if ranks.share(len(self.corrector.queue)):
                change_on_first(self.corrector, self.corrector.apply_waiting, stored=False)

    def end_pass(self) -> None:
        """Apply the events that waited for the end of the epoch, if one rank applies them alone."""
        if not self.shared_out:
            ranks.on_first(lambda: self.corrector.apply_waiting(final=True))

    def unanswered(self, over: bool) -> list[str]:
        """Describe the events that still wait, on all ranks; ``over``: the run has ended, and no event stays on watch."""

        def work() -> list[str]:
            queue = self.corrector.queue
            if over:
                queue.end_run()
            return [str(p) for p in queue.unanswered]

        return ranks.on_first(work)

    # -- what goes into a checkpoint -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State as primitives and tensors. It is empty with a store, which keeps the state itself."""
        if self.path is not None:
            return {}
        return {"corrector": self.corrector.state_dict(), "offered": self.seen.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        if self.path is None and state:
            self.corrector.load_state_dict(state["corrector"])
            self.seen.load_state_dict(state["offered"])


def change_on_first(corrector: Corrector, work: Callable[[], T], stored: bool) -> T:
    """Change a head on the first rank, and bring the other ranks, whose heads are equal, to its new state."""
    try:
        return ranks.on_first(work)
    finally:
        if stored or not ranks.is_summed(corrector.head):
            ranks.copy_from_first(corrector.head)
        elif ranks.are_several():
            ranks.add_up(corrector.head)
            state = ranks.share(corrector.state_dict())
            if not ranks.is_first():
                corrector.load_state_dict(state)
