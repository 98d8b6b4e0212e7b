"""The head of a store, kept consistent with the stored rows.

The head can get out of date: another process may write to the store, a call may be interrupted, or somebody may set options of
the head directly. It is therefore compared with the database before each use and, if necessary, restored from a snapshot or
from the rows.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchlssvm.errors import StoreError
from torchlssvm.functional.modes import exactly
from torchlssvm.store.database import Database
from torchlssvm.store.head_adapter import HeadAdapter, LinearAdapter
from torchlssvm.store.journal import Journal
from torchlssvm.store.sample_table import ROWS_PER_BATCH, SampleTable
from torchlssvm.store.snapshots import Snapshots

log = logging.getLogger("torchlssvm.store")

PUBLISHING_SECONDS = 1.0
"""Least time between two publications. Each takes about as long as an erasure, so it would slow down a burst of erasures."""


class LiveHead:
    """The head that a store updates through an adapter, and the journal position that the head corresponds to.

    Attributes:
        adapter: the adapter of the head; None if the store of a kernel machine was opened without the machine.
        position: the last journal position that the head is known to match.
        stale: True while a change of the head may be incomplete. The head is then restored before it is used.
        recovery: a description of how the head was last restored.
    """

    def __init__(self, path: Path, db: Database, table: SampleTable, journal: Journal, snapshot_rows: int):
        """``snapshot_rows`` is the number of changed rows after which the statistics are saved."""
        self.path, self.db, self.table, self.journal = path, db, table, journal
        self.snapshots = Snapshots(path)
        self.adapter: HeadAdapter | None = None
        self.position, self.stale, self.recovery = 0, True, "nothing to do"
        self._published_at = float("-inf")
        self._seen = -1  # the database's change counter when this handle last read it
        self._options: dict[str, Any] | None = None  # options that were set, when the head was last up to date
        self._snapshot_rows, self._snapshot_position, self._rows_since_snapshot = snapshot_rows, -1, 0

    # -- changes by the store ------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[HeadAdapter]:
        """Change rows, records, head and options in one transaction. The head is up to date when the context begins.

        After an error everything is rolled back, and a head that had already changed is restored from the rows.
        """
        adapter, begun = self.required(), False
        with self.db.held(), adapter.lock:  # readers of the head wait
            try:
                with self.db.transaction():
                    self.prepare()
                    begun = self.stale = True  # until rows and head are known to agree
                    yield adapter
                    self.save_options()
                    state = self.db.get("state")
                adapter.note(state["digest"])
                self.position, self.stale = state["position"], False
            except BaseException as error:
                if begun:
                    self._take_back(adapter, error)
                raise

    def _take_back(self, adapter: HeadAdapter, error: BaseException) -> None:
        """Restore the head after a rollback, if it has changed. If this fails, it is restored at its next use."""
        self._options = None
        try:
            self.table.load_codec()
            self.stale = adapter.touched
            if self.stale:
                log.info("%s: the head is restored from the store after a %s", self.path, type(error).__name__)
                with self.db.view():
                    self.follow()
        except Exception:  # the first error is raised
            log.exception("%s: the head could not be restored yet", self.path)

    def prepare(self) -> HeadAdapter:
        """Bring the head up to date under the write lock, before a change. StoreError if the head was changed directly."""
        adapter = self.required()
        with adapter.lock:  # reading the head inside the lock does not trigger an update
            touched = not self.stale and adapter.touched
        if touched:
            raise StoreError(
                "the head was changed behind the store's back: samples are added and removed through store.apply only. "
                "store.restore() restores the head from the store. Nothing was changed."
            )
        return self.follow()

    def required(self) -> HeadAdapter:
        """Return the adapter. Raises StoreError if there is no head."""
        if self.adapter is None:
            raise StoreError(
                f"the store at {self.path} was made with a {self.db.get('head')['type']}: open it with one as head"
            )
        return self.adapter

    def step_over(self, position: int) -> None:
        """Advance to a position whose journal entry changed no sample, if the head matched the position before it."""
        if self.position == position - 1:
            self.position = position

    # -- changes by others ---------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Bring the head up to date before it is used. The head itself calls this method.

        If another thread of this process is using the store at the moment, the head is not updated, so that it does not change
        while that thread works with it. A head is never updated once its store is closed, nor in a forked process.
        """
        if not self.db.usable or not self.db.lock.acquire(blocking=False):
            return
        try:
            if self.stale or self.db.changes() != self._seen:
                with self.db.view():
                    self.follow()
        finally:
            self.db.lock.release()

    def follow(self) -> HeadAdapter:
        """Bring the head up to date with the open view or transaction."""
        adapter, changes = self.required(), self.db.changes()
        self.stale = self.stale or adapter.torn
        if not self.stale and changes == self._seen:
            return adapter
        with adapter.lock:  # readers wait, and the head does not check whether it is up to date
            if self.stale or self.db.get("state")["position"] != self.position:
                trusted, self.stale = not self.stale, True
                self.recovery = self._recover(adapter, trusted)
            if isinstance(adapter, LinearAdapter):
                self._warn_of_lost_options(adapter)
                adapter.set_options(self.db.get("head"))
                adapter.restore_chosen(self.db.get("chosen", None))
                self._options = adapter.options_set()
            self.stale = False
        self._seen = changes
        return adapter

    def _warn_of_lost_options(self, adapter: LinearAdapter) -> None:
        """Warn if options were set on the head since it was last up to date, and the store has others."""
        stored = self.db.get("head")
        for name, value in adapter.options_set().items():
            if self._options is not None and value != self._options.get(name) and value != stored[name]:
                warnings.warn(
                    f"{name}={value!r}, set on the head of {self.path}, is lost: another handle has written to the store, "
                    f"and the options in the store count ({name}={stored[name]!r}). Set {name} again",
                    stacklevel=2,
                )

    def take_options(self, names: Sequence[str]) -> None:
        """Set these options of the head, and its choices from data, to the values in the store."""
        with self.db.view():
            adapter, config = self.follow(), self.db.get("head")
            stored = {name: config[name] for name in names if name in config}
            if isinstance(adapter, LinearAdapter) and adapter.set_options(stored):
                adapter.restore_chosen(self.db.get("chosen", None))

    def discard_options(self) -> None:
        """Read the store's options again at the next use, because the last change may not have been written."""
        self._seen, self._options = -1, None

    @exactly
    def _recover(self, adapter: HeadAdapter, trusted: bool) -> str:
        """Restore the samples of the head; return a description of what was done.

        If samples were only added since the last known position, the method starts from the head itself (``trusted``: it is as
        the store left it) or from sums that a writer has published, and adds the new rows. Otherwise it sums all rows.
        """
        self.table.load_codec()
        if isinstance(adapter, LinearAdapter):
            more = self.db.get("head")["num_classes"] - adapter.head.num_classes
            if more > 0:
                adapter.add_classes(more)
        state = self.db.get("state")
        position, digest = state["position"], state["digest"]
        was, self.position = self.position, position
        if len(self.table) != state["samples"]:
            raise self.db.damaged(f"it holds {len(self.table)} rows, not {state['samples']}")
        done = None
        if isinstance(adapter, LinearAdapter) and adapter.exact:
            if trusted and not adapter.empty:
                done = self._roll_forward(adapter, was, "the head")
            for path in reversed(self.snapshots.paths()):
                done = done or self._load_snapshot(adapter, path)
        if done is None:
            adapter.clear()
            for rows in self.table.batches():
                adapter.add_rows(rows, self.table.codec)
            if adapter.digest() != digest:
                raise self.db.damaged("its rows do not give the digest that was recorded")
            done = (
                f"rebuilt the head from {state['samples']} rows at position {position}"
                if position
                else "the store is new"
            )
        adapter.note(digest)
        log.info("%s: %s", self.path, done)
        return done

    def _load_snapshot(self, adapter: LinearAdapter, path: Path) -> str | None:
        """Restore from published sums and the rows added since; return a description, or None if the sums cannot be used."""
        found = self.snapshots.read(path)
        if found is None:
            return None
        at = found["position"]
        if not 0 <= at <= self.position or self.journal.chain_at(at).hex() != found["chain"]:
            return None
        try:
            adapter.load(found["statistics"], self.table.batches(until=at), self.table.codec)
        except Exception:  # the tensors may have any shape and type, so the rows are used instead
            return None
        self._snapshot_position = at
        return self._roll_forward(adapter, at, f"the snapshot at position {at}")

    def _roll_forward(self, adapter: LinearAdapter, at: int, start: str) -> str | None:
        """Add the rows that were added after a position; return a description, or None if the digest does not match."""
        if self.journal.last_erasure() > at:
            return None
        added = 0
        for rows in self.table.batches(after=at) if at < self.position else ():
            adapter.add_rows(rows, self.table.codec)
            added += len(rows)
        if adapter.digest() != self.db.get("state")["digest"]:
            return None
        return f"rolled {start} forward to {self.position} by {added} rows" if added else f"loaded {start}"

    # -- saving --------------------------------------------------------------------------------------------------------

    def changed_options(self) -> dict[str, Any]:
        """Records of the head's options and of the choices made from data that differ from those in the store."""
        adapter = self.required()
        if not isinstance(adapter, LinearAdapter):
            return {}
        now = {"head": adapter.config(), "chosen": adapter.chosen()}
        return {name: value for name, value in now.items() if value != self.db.get(name, None)}

    def save_options(self) -> None:
        """Write the head's options and the choices made from data, inside a transaction."""
        for name, value in self.changed_options().items():
            self.db.put(name, value)
        if isinstance(self.adapter, LinearAdapter):
            self._options = self.adapter.options_set()

    def publish(self, changed: int, erased: bool) -> None:
        """Save the statistics for other processes, after an erasure and whenever enough rows have changed.

        An erasure always deletes the sums that were saved before it. New sums are not always saved: a small store saves none,
        because other processes can sum its rows faster, and a burst of erasures saves at most one state per second. A process
        that finds no sums for a state sums the rows instead.
        """
        self._rows_since_snapshot += changed
        due = self._rows_since_snapshot >= self._snapshot_rows
        if erased or due:
            with self.db.transaction():
                many = self.db.get("state")["samples"] >= ROWS_PER_BATCH
                if due or (many and time.monotonic() > self._published_at + PUBLISHING_SECONDS):
                    self.write_snapshot()
                    self._published_at = time.monotonic()
                else:
                    self.snapshots.remove(self.snapshots.paths())
                    self._snapshot_position = -1

    def write_snapshot(self) -> None:
        """Save the statistics beside the store, unless they are saved or out of date. The caller holds the write lock."""
        adapter = self.adapter
        if not isinstance(adapter, LinearAdapter) or not adapter.exact or self.stale:
            return
        state = self.db.get("state")
        if self._snapshot_position == self.position or state["position"] != self.position or adapter.touched:
            return
        self.snapshots.write(self.position, bytes.fromhex(state["chain"]), state["digest"], adapter.state())
        self._snapshot_position, self._rows_since_snapshot = self.position, 0

    def keep(self) -> None:
        """Before the store closes, write options that were set, and write a snapshot to make the next opening fast.

        Raises StoreError if the options could not be written.
        """
        if self.adapter is None or self.stale:
            return
        changed: dict[str, Any] = {}
        try:
            if self.db.changes() == self._seen:
                changed = self.changed_options()
            elif isinstance(self.adapter, LinearAdapter):  # another process has written, and its options count
                self._warn_of_lost_options(self.adapter)
            with self.db.transaction():
                if changed and self.db.changes() == self._seen:
                    self.save_options()
                try:
                    self.write_snapshot()
                except OSError as error:
                    log.warning("%s: closed without a snapshot, opening it will take longer: %s", self.path, error)
        except StoreError as error:
            if changed:
                raise type(error)(
                    f"{self.path} is closed and every event is kept, but not the options that were set on its head: {error}"
                ) from error
            log.info("%s: closed without a snapshot: %s", self.path, error)
