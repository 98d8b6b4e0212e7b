"""``SampleStore``: applying events, looking ahead, compacting."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from torchlssvm.errors import StoreBusyError, StoreError, TorchLSSVMError
from torchlssvm.events import CPU, Event, EventBase
from torchlssvm.functional.checks import as_tensor
from torchlssvm.store.certifying import Certifying
from torchlssvm.store.head_adapter import ByIds, Linear
from torchlssvm.store.snapshots import UNTIL_COMPACTION
from torchlssvm.store.transaction import Receipt, Work, receipt_of

log = logging.getLogger("torchlssvm.store")

REFUSALS = (ValueError, TypeError, TorchLSSVMError)
"""What head and store raise for what they do not take, before or after a change but never in the middle of one."""


@dataclass(frozen=True)
class Preview:
    """What events would do. Accuracies are None without labels, or when no sample would be left."""

    samples: int
    remaining: int
    flips: int | None
    accuracy_before: float | None
    accuracy_after: float | None


@dataclass(frozen=True)
class Compaction:
    """What :meth:`SampleStore.compact` did: snapshots it removed, and known checkpoints that hold what was erased."""

    position: int
    removed: list[str]
    checkpoints: list[str]


class SampleStore(Certifying):
    """Samples with ids and subjects, kept as the head summed them, and the head itself, always in step.

    ``SampleStore(path, head=head)`` creates a store with an empty head, or opens it and restores the head (which may be left
    out then, unless it is a kernel machine). A context manager; everything is durable when a call returns.

    Args:
        path: a folder.
        head: an :class:`~torchlssvm.LSSVMHead`, or a kernel machine.
        fingerprint: the network the features come from (:mod:`torchlssvm.backbone_hash`). A store is bound to it and
            refuses features of another one.
        readonly: for reading beside a writer.
        timeout: seconds to wait for another writer.
        snapshot_rows: statistics are saved after so many changed rows, and when the store is closed or compacted.
        accept_loss: open a store that has lost events it had acknowledged.
        device: of a head restored without being given.

    >>> import tempfile, torch
    >>> from torchlssvm import LSSVMHead, FixedPoint
    >>> from torchlssvm.events import Add, Remove
    >>> folder = tempfile.mkdtemp()
    >>> store = SampleStore(folder, head=LSSVMHead(8, 2, grid=FixedPoint(8.0)))
    >>> x, y = torch.randn(6, 8), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> receipt = store.apply(Add(ids=list("abcdef"), x=x, y=y, subject=["u1", "u1", "u2", "u2", "u2", "u3"]))
    >>> store.apply(Remove(subject="u2")).samples
    3
    >>> never = LSSVMHead(8, 2, grid=FixedPoint(8.0)).add(x[[0, 1, 5]], y[[0, 1, 5]])
    >>> store.head.digest() == never.digest(), len(store)
    (True, 3)
    >>> store.close()
    """

    # -- changing ------------------------------------------------------------------------------------------------------

    @overload
    def apply(
        self, events: Event, notes: Mapping[str, Any] | None = None, kept_out: Mapping[str, Sequence[str]] | None = None
    ) -> Receipt: ...
    @overload
    def apply(
        self,
        events: Iterable[Event],
        notes: Mapping[str, Any] | None = None,
        kept_out: Mapping[str, Sequence[str]] | None = None,
    ) -> list[Receipt]: ...
    def apply(
        self,
        events: Event | Iterable[Event],
        notes: Mapping[str, Any] | None = None,
        kept_out: Mapping[str, Sequence[str]] | None = None,
    ) -> Receipt | list[Receipt]:
        """Apply one event or several to the samples and the head: all or nothing, durable when this returns.

        ``notes`` are written with them (see :meth:`set_note`): both are there afterwards, or neither. ``kept_out``: for the id
        of a Remove, samples that came by and were not added because of it; the journal counts them among its samples.

        An event that was applied before changes nothing, and its receipt says so; its id with other content, or with samples
        that are there again, is a ValueError. Errors leave everything as it was: RemovalError for an unknown id or subject,
        ValueError or GridError for samples the head refuses, StoreError for a head that was changed behind the store's back,
        StoreBusyError while another writer is at work, StoreDiskError for a disk that is full.

        Threads may share a store: they take turns, and whoever reads the head meanwhile waits. After an interrupt the events
        are applied or not, as with any other error; repeat them with their event ids.
        """
        given = checked(events)
        with self._db.held():
            machine = self._writable()
            self._db.begin()
            with machine.lock:
                work: Work | None = None
                try:
                    work = self._begin(machine)
                    self._stale = self._torn = True  # until rows and head are known to agree again
                    results = [work.do(event, (kept_out or {}).get(event.event_id, ())) for event in given]
                    digest, chain = self._finish(work)
                    options = self._save_options(machine) if work.done else self._options
                    for name, value in (notes or {}).items():
                        self._put_note(name, value)
                    self._db.commit()
                except BaseException as error:
                    self._take_back(machine, work, error)
                    raise
                self._position, self._options = work.position, options
                machine.note()
                self._stale = self._torn = False
            if work.done:
                self._committed(work, chain)
            receipts = [
                self._repeated(event, result) if isinstance(result, int) else receipt_of(result, digest)
                for event, result in zip(given, results, strict=True)
            ]
            return receipts[0] if isinstance(events, EventBase) else receipts

    def _writable(self) -> Linear | ByIds:
        if self.readonly:
            raise StoreError(f"the store at {self.path} was opened for reading only")
        _ = self._machine or self.head
        assert self._machine is not None
        return self._machine

    def _begin(self, machine: Linear | ByIds) -> Work:
        """Under the write lock: bring the head in step, and refuse one that somebody else has changed."""
        if not self._stale and machine.touched:
            raise StoreError(
                "the head was changed behind the store's back: samples are added and removed through store.apply only. "
                "store.restore() brings the head back to what the store says. Nothing was changed."
            )
        self._table.load_codec()
        self._follow(machine)
        return Work(self._table, self._journal, machine, self._position, self._source)

    def _finish(self, work: Work) -> tuple[str | None, bytes]:
        """Write the journal and the state; returns the digest and the end of the chain."""
        state = self._db.get("state")
        if not work.done:
            return state["digest"], bytes.fromhex(state["chain"])
        digest = work.machine.digest()
        chain = work.write_journal(digest)
        change = {"add": 1, "remove": -1}
        samples = state["samples"] + sum(
            change.get(type(done.event).__name__.lower(), 0) * (len(done.ids) - done.absent) for done in work.done
        )
        self._put_state(work.position, digest, samples, chain)
        return digest, chain

    def _committed(self, work: Work, chain: bytes) -> None:
        """The events are durable. What fails from here on is only for speed, or for later: it is logged, not raised."""
        self._rows_since += sum(len(done.ids) for done in work.done)
        try:
            self._witness.write(work.position, chain)
            if self._rows_since >= self._snapshot_rows:
                with self._db.transaction():
                    self._snapshot()
        except (OSError, StoreError) as error:
            log.warning(
                "%s: the events are applied, but not all files beside the database are written: %s", self.path, error
            )

    def _take_back(self, machine: Linear | ByIds, work: Work | None, error: BaseException) -> None:
        """Bring rows and head back to what is committed: step by step after a refusal, else from the rows.

        Whatever is not a refusal may have come in the middle of a change, and the head is not asked.
        """
        if work is None:
            self._db.roll_back()
            return
        undone = isinstance(error, REFUSALS) and work.undo()
        self._db.roll_back()
        try:
            state = self._db.get("state")
            if undone and state["position"] == self._position and self._in_step(machine, state):
                machine.note()
                self._stale = self._torn = False
                return
            log.warning("%s: the head is restored from the store after %r", self.path, error)
            _ = self.head
        except Exception:  # the first error is raised; the head is restored when it is next asked for
            log.exception("%s: the head could not be restored yet", self.path)

    def _repeated(self, event: Event, position: int) -> Receipt:
        entry = self._journal.at(position)
        assert entry is not None
        return Receipt(event.event_id, entry.kind, position, False, entry.samples, None)

    def preview(self, events: Event | Iterable[Event], x: Any = None, y: Any = None) -> Preview:
        """What events would do, without doing it: on given data, how many predictions would flip, and the accuracy.

        x: (B, J); y: (B,) labels. Works on a copy of the head, inside a transaction that is rolled back.
        """
        given = checked(events)
        with self._db.held():
            machine = self._writable()
            self._db.begin()
            try:
                self._begin(machine)
                before = predictions(machine, x)
                trial = machine.copy()
                work = Work(self._table, self._journal, trial, self._position, self._source)
                for event in given:
                    work.do(event)
                after = predictions(trial, x)
                samples, remaining = sum(len(done.ids) for done in work.done), len(self._table)
            finally:
                self._db.roll_back()
                self._table.load_codec()
        flips = None
        if x is not None:
            flips = len(x) if before is None or after is None else int((before != after).sum())
        return Preview(samples, remaining, flips, accuracy(before, y), accuracy(after, y))

    # -- erasing the bytes ---------------------------------------------------------------------------------------------

    def compact(self) -> Compaction:
        """Make sure that what was erased is in no file of the store any more.

        Destroys the key of the HMACs of earlier digests, rewrites the database without its gaps, empties the log, saves the
        statistics, and removes older snapshots and whatever others keep in the folder until then. An open reader keeps the log
        from being emptied: that is a StoreBusyError, and certificates say ``compacted: false`` until a compaction went through.
        """
        with self._db.held():
            machine = self._writable()
            with self._db.transaction():
                self._begin(machine)
                self._journal.new_key(self._position)
                options = self._save_options(machine)
            self._options = options
            self._db.run("VACUUM")
            if not self._db.truncate_log():
                raise StoreBusyError(
                    f"{self.path} is not compacted: a reader has it open and keeps the log, which may hold erased samples. "
                    "Close it and compact again."
                )
            position = self._position
            with self._db.transaction():
                if self._db.get("state")["position"] != position:
                    raise StoreBusyError(
                        f"{self.path} is not compacted: another process wrote meanwhile. Compact again."
                    )
                old = [p for p in self._snapshots.paths() if self._snapshots.position(p) < position]
                self._snapshot()
                told = sorted(self.path.glob(f"*{UNTIL_COMPACTION}"))
                self._snapshots.remove([p for p in [*old, *told] if p.exists()])
                self._db.put("compacted", position)
            return Compaction(position, [p.name for p in old], self._checkpoints_before(position))


def checked(events: Event | Iterable[Event]) -> list[Event]:
    """The events as a list."""
    given = [events] if isinstance(events, EventBase) else list(events)
    for event in given:
        if not isinstance(event, EventBase):
            raise ValueError(f"apply takes Add, Remove, Relabel and Replace events, got {type(event).__name__}")
    return given


@torch.no_grad()
def predictions(machine: Linear | ByIds, x: Any) -> Tensor | None:
    """Predicted classes, or None when there is nothing to predict from."""
    if x is None or machine.empty:
        return None
    return machine.head.predict(x if isinstance(x, Tensor) else as_tensor(x, "x", CPU))


def accuracy(predicted: Tensor | None, y: Any) -> float | None:
    """The share of predictions that are right."""
    if predicted is None or y is None:
        return None
    labels = y.cpu() if isinstance(y, Tensor) else as_tensor(y, "y", CPU)
    return float((predicted.cpu() == labels).double().mean())
