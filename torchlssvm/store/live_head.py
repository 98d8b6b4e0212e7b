"""The head of a store, kept in step with its rows.

Another process may write to the store, a call may be interrupted, and somebody may set the head's options directly. So the head
is compared with the database before each use. If it is out of date, it is restored from a snapshot or from the rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchlssvm.errors import StoreError
from torchlssvm.functional.modes import exactly
from torchlssvm.store.database import Database
from torchlssvm.store.head_adapter import HeadAdapter, LinearAdapter
from torchlssvm.store.journal import Journal
from torchlssvm.store.sample_table import SampleTable
from torchlssvm.store.snapshots import Snapshots

log = logging.getLogger("torchlssvm.store")

QUICKLY_SUMMED_ROWS = 1024
"""Below this number of rows it takes less time to sum them than to write and read their sums, whatever their width."""

PUBLISHING_SECONDS = 1.0
"""Least time between two publications. Each takes about as long as an erasure, so it would slow down a burst of erasures."""


class LiveHead:
    """The head that a store drives through an adapter, and the position of the journal it stands at.

    Attributes:
        adapter: None for the store of a kernel machine that was opened without one.
        position: of the journal, which the head was last known to be at.
        stale: True while the head may be in the middle of a change: it is restored before it is used.
        own_options: True until the options of a head that was given to this handle are compared with the store's.
        recovery: how the head was last restored, in words.
    """

    def __init__(self, path: Path, db: Database, table: SampleTable, journal: Journal, snapshot_rows: int):
        """``snapshot_rows``: changed rows after which the statistics are saved."""
        self.path, self.db, self.table, self.journal = path, db, table, journal
        self.snapshots = Snapshots(path)
        self.adapter: HeadAdapter | None = None
        self.position, self.stale, self.recovery = 0, True, "nothing to do"
        self.own_options = False
        self._published_at = float("-inf")
        self._seen = -1  # the number of the database's changes when this handle last looked
        self._snapshot_rows, self._snapshot_position, self._rows_since_snapshot = snapshot_rows, -1, 0

    # -- changes by the store ------------------------------------------------------------------------------------------

    def prepare(self) -> HeadAdapter:
        """Bring the head in step under the write lock, for a change; StoreError if it was changed from outside."""
        adapter = self.required()
        with adapter.lock:  # a look at the head does not bring it up to date
            touched = not self.stale and adapter.touched
        if touched:
            raise StoreError(
                "the head was changed behind the store's back: samples are added and removed through store.apply only. "
                "store.restore() brings the head back to what the store says. Nothing was changed."
            )
        return self.follow()

    def required(self) -> HeadAdapter:
        """The adapter; StoreError if there is no head."""
        if self.adapter is None:
            raise StoreError(
                f"the store at {self.path} was made with a {self.db.get('head')['type']}: open it with one as head"
            )
        return self.adapter

    def step_over(self, position: int) -> None:
        """Advance to a position whose journal entry changed no sample, if the head was in step before it."""
        if self.position == position - 1:
            self.position = position

    # -- changes by others ---------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Bring the head up to date before it is used; the head itself asks for that.

        While another thread of this process works with the store, the head is as that thread found it. The head of a closed
        store, and in a forked process, no longer follows.
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
        """Bring the head in step with what the open view or transaction shows."""
        adapter, changes = self.required(), self.db.changes()
        self.stale = self.stale or adapter.torn
        if not self.stale and changes == self._seen:
            return adapter
        with adapter.lock:  # readers wait, and the head does not ask whether it is up to date
            if self.stale or self.db.get("state")["position"] != self.position:
                trusted, self.stale = not self.stale, True
                self._restore(adapter, trusted)
            self._take_options(adapter)
            self.stale = False
        self._seen = changes
        return adapter

    def _restore(self, adapter: HeadAdapter, trusted: bool) -> None:
        """Restore the samples of the head. ``trusted``: it is as the store left it at its position."""
        self.table.load_codec()
        if isinstance(adapter, LinearAdapter):
            more = self.db.get("head")["num_classes"] - adapter.head.num_classes
            if more > 0:
                adapter.add_classes(more)
        self.recovery = self._recover(adapter, trusted)

    def _take_options(self, adapter: HeadAdapter) -> None:
        """Adopt the store's options, and the choices made from data.

        The options of a head that was given to this handle count, and are written with the next change. Only a rho that is
        still to be chosen is the store's, once it holds samples.
        """
        if not (self.own_options and adapter.rho_is_open and self.position == 0):
            config = self.db.get("head")
            if not self.own_options or adapter.rho_is_open:
                adapter.set_options(config)
            adapter.restore_chosen(self.db.get("chosen", None))
            if isinstance(adapter, LinearAdapter) and adapter.config()["rho"] != config["rho"]:
                adapter.head._choices.made.pop("rho", None)  # the rho recorded as chosen is not in use
        self.own_options = False

    def take_options(self, names: Sequence[str]) -> None:
        """Set these options of the head, and its choices from data, to those of the store."""
        with self.db.view():
            adapter, config = self.follow(), self.db.get("head")
            if adapter.set_options({name: config[name] for name in names if name in config}):
                adapter.restore_chosen(self.db.get("chosen", None))

    def discard_options(self) -> None:
        """Read the store's options again at the next use, after a change that may not have been written."""
        self._seen = -1

    @exactly
    def _recover(self, adapter: HeadAdapter, trusted: bool) -> str:
        """Restore the head; returns what was done.

        If samples were only added since, it starts from the head itself or from the sums that a writer has published, and adds
        the new rows. If samples were removed or changed since, it sums all rows.
        """
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
        """Restore from published sums and the rows added since; None if they cannot be used, else what was done."""
        found = self.snapshots.read(path)
        if found is None:
            return None
        at = found["position"]
        if not 0 <= at <= self.position or self.journal.chain_at(at).hex() != found["chain"]:
            return None
        try:
            adapter.load(found["statistics"], self.table.batches(until=at), self.table.codec)
        except Exception:  # tensors of any shape and type: what they are is in doubt, and the rows are the truth
            return None
        self._snapshot_position = at
        return self._roll_forward(adapter, at, f"the snapshot at position {at}")

    def _roll_forward(self, adapter: LinearAdapter, at: int, start: str) -> str | None:
        """Add the rows that were added since a position; None unless that gives the digest, else what was done."""
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
        """Records of the head's options and of the choices made from data, where they differ from the store's."""
        adapter = self.required()
        now = {"head": adapter.config(), "chosen": adapter.chosen()}
        return {name: value for name, value in now.items() if value != self.db.get(name, None)}

    def save_options(self) -> None:
        """Write the head's options and the choices made from data, inside a transaction."""
        for name, value in self.changed_options().items():
            self.db.put(name, value)

    def publish(self, changed: int, erased: bool) -> None:
        """Save the statistics for others to follow: after an erasure, and when enough rows were changed.

        Sums from before an erasure are removed at once. For few rows nothing is published: summing them is faster. In a burst
        of erasures only some are published, and other processes sum the rows.
        """
        self._rows_since_snapshot += changed
        due = self._rows_since_snapshot >= self._snapshot_rows
        if erased or due:
            with self.db.transaction():
                many = self.db.get("state")["samples"] >= QUICKLY_SUMMED_ROWS
                if due or (many and time.monotonic() > self._published_at + PUBLISHING_SECONDS):
                    self.write_snapshot()
                    self._published_at = time.monotonic()
                else:
                    self.snapshots.remove(self.snapshots.paths())
                    self._snapshot_position = -1

    def write_snapshot(self) -> None:
        """Save the statistics beside the store, unless they are saved or not in step. Called under the write lock."""
        adapter = self.adapter
        if not isinstance(adapter, LinearAdapter) or not adapter.exact or self.stale:
            return
        state = self.db.get("state")
        if self._snapshot_position == self.position or state["position"] != self.position or adapter.touched:
            return
        self.snapshots.write(self.position, bytes.fromhex(state["chain"]), state["digest"], adapter.state())
        self._snapshot_position, self._rows_since_snapshot = self.position, 0

    def keep(self) -> None:
        """Write options that were set, before the store closes, and a snapshot, which only saves time.

        StoreError if the options could not be written.
        """
        if self.adapter is None or self.stale:
            return
        changed: dict[str, Any] = {}
        try:
            if self.db.changes() == self._seen:  # else others have written since, and theirs count
                changed = self.changed_options()
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
