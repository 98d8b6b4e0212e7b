"""Opening a store: creating it, restoring its head, reading its samples, closing it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchlssvm.errors import StoreBusyError, StoreError, TorchLSSVMError
from torchlssvm.functional.modes import exactly
from torchlssvm.linear import LSSVMHead
from torchlssvm.store.codec import Codec
from torchlssvm.store.database import FILE, Database
from torchlssvm.store.head_adapter import SETTABLE, ByIds, Linear, head_from, machine_for
from torchlssvm.store.journal import START, Journal, now
from torchlssvm.store.reading import Reading
from torchlssvm.store.sample_table import Table
from torchlssvm.store.snapshots import Snapshots, Witness, sync_folder

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("torchlssvm.store")

WITNESS = "acknowledged"

Options: TypeAlias = tuple[dict[str, Any], dict[str, Any] | None]
"""The options of a head, and what was chosen from data, as the store keeps them."""


class StoreBase(Reading):
    """A folder with samples, their journal and their head. See :class:`~torchlssvm.store.SampleStore`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        head: Any = None,
        *,
        fingerprint: str | None = None,
        readonly: bool = False,
        timeout: float = 30.0,
        snapshot_rows: int = 65536,
        accept_loss: bool = False,
        device: torch.device | str | None = None,
    ):
        self.path = Path(path)
        self.readonly = readonly
        self.recovery = "nothing to do"
        self._timeout, self._snapshot_rows, self._device = timeout, snapshot_rows, device
        self._closed = False
        self._snapshots, self._witness = Snapshots(self.path), Witness(self.path / WITNESS)
        self._source = fingerprint
        self._machine: Linear | ByIds | None = None
        self._position, self._saved, self._rows_since = 0, -1, 0
        self._stale = True  # whether the head must be brought in step before it is used
        self._torn = False  # whether it may be in the middle of a change, so that not even its digest is believed
        self._options: Options | None = None  # as the store had them when this handle last looked
        self._seen = -1  # the number of the database's changes then
        self._db = self._open_file(head is not None and not readonly)
        try:
            self._journal = Journal(self._db)
            self._table = Table(self._db, Codec(1, 1))
            if head is not None:
                self._machine = self._own(head)
            self._finish_creation()
            told = self._witness.read()  # before the view: what was acknowledged by then is in it
            with self._db.view():
                self._start(None if accept_loss else told)
        except BaseException:
            self._db.close()
            raise

    # -- opening -------------------------------------------------------------------------------------------------------

    def _open_file(self, create: bool) -> Database:
        file = self.path / FILE
        if not file.exists():
            if not create:
                raise StoreError(f"there is no store at {self.path}: give a head to create one")
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise StoreError(f"{self.path} is not empty and not a store: nothing was written there")
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            database = Database(file, True, self._timeout)
            sync_folder(self.path)
            sync_folder(self.path.parent)
            return database
        return Database(file, create, self._timeout, self.readonly)

    def _own(self, head: Any) -> Linear | ByIds:
        """Drive a head from now on. The store has its rows: whatever a head keeps to recognize its samples is not needed."""
        return machine_for(head)

    def _start(self, told: tuple[int, bytes] | None) -> None:
        self._check_start(told)
        bound = self._db.get("fingerprint")
        if self._source is not None and bound not in (None, self._source):
            raise ValueError(
                f"the store at {self.path} is bound to the network with the fingerprint {bound!r}, not {self._source!r}"
            )
        config = self._db.get("head")
        if self._machine is None and config["type"] == LSSVMHead.__name__:
            self._machine = self._own(head_from(config, self._device))
        elif self._machine is not None:
            self._check_machine(config, self._machine)
        self._table.load_codec()
        if self._machine is not None and not self.readonly:
            self._reload(self._machine)

    def _finish_creation(self) -> None:
        """Write the records that every store has, if they are not there."""
        machine = self._machine
        if self._db.get("state", None) is not None:
            return
        if machine is None or self.readonly:
            raise StoreError(f"the store at {self.path} was never finished: give a head to create it")
        if not machine.empty:
            raise StoreError(
                "the head already holds samples, which the store knows nothing of: give an empty head and add them through "
                "the store"
            )
        with self._db.transaction():
            if self._db.get("state", None) is not None:  # another process was faster
                return
            self._db.put("head", machine.config())
            self._db.put("fingerprint", self._source)
            self._db.put("created", now())
            self._db.put("compacted", 0)
            self._journal.new_key(0)
            self._table.codec = machine.codec()
            self._table.save_codec()
            self._put_state(0, machine.digest(), 0, START)
        self._witness.write(0, START)

    def _put_state(self, position: int, digest: str | None, samples: int, chain: bytes) -> None:
        self._db.put("state", {"position": position, "digest": digest, "samples": samples, "chain": chain.hex()})

    def _check_start(self, told: tuple[int, bytes] | None) -> None:
        """The end of the journal agrees with the state, and what a caller was told is in there."""
        state = self._db.get("state")
        position = state["position"]
        last = self._db.one("SELECT max(position) FROM journal")
        if ((last or (None,))[0] or 0) != position or self._journal.chain_at(position).hex() != state["chain"]:
            raise StoreError(f"{self._db.path} is damaged: the journal does not end where the state says")
        if position:
            self._journal.check(position - 1)
        if told is None or told == (position, bytes.fromhex(state["chain"])):
            return
        if told[0] > position or self._journal.chain_at(told[0]) != told[1]:
            raise StoreError(
                f"{self.path} is at event {position}, but event {told[0]} was acknowledged: the log was cut short, or an older "
                "copy was put in its place. Samples erased since may be back. Open it with accept_loss=True to go on."
            )

    def _check_machine(self, config: dict[str, Any], machine: Linear | ByIds) -> None:
        mine = machine.config()
        for name, value in config.items():
            if name not in SETTABLE and mine.get(name) != value:
                raise ValueError(
                    f"the head does not fit the store at {self.path}: {name} is {mine.get(name)!r}, not {value!r}"
                )
        if not machine.empty and machine.digest() != self._db.get("state")["digest"]:
            raise StoreError("the head holds samples that are not those of the store: give an empty head, or none")

    # -- the head ------------------------------------------------------------------------------------------------------

    @property
    def head(self) -> Any:
        """The live head, in step with the store. Change it through :meth:`apply` only."""
        with self.view():
            if self._machine is None:
                raise StoreError(
                    f"the store at {self.path} was made with a {self._db.get('head')['type']}: open it with one as head"
                )
            self._follow(self._machine)
            return self._machine.head

    @property
    def machine(self) -> Linear | ByIds | None:
        """The head as the store drives it; a kernel machine's own ids of the samples are there."""
        return self._machine

    @property
    def head_position(self) -> int:
        """The position of the live head: the store's, unless somebody else has written since."""
        return self.position if self._stale and not self._closed else self._position

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def restore(self) -> str:
        """Bring the head back to what the store says, whatever was done to it; returns what was done."""
        with self.view():
            self._stale = True
            _ = self.head
            return self.recovery

    def _follow(self, machine: Linear | ByIds) -> None:
        """Bring the head in step with what the open view or transaction shows."""
        changes = self._db.changes()
        if not self._stale and changes == self._seen:
            return
        if self._stale or self._db.get("state")["position"] != self._position:
            self._reload(machine)
        else:
            self._take_options(machine)
        self._seen = changes

    def _reload(self, machine: Linear | ByIds) -> None:
        """Restore the head from the open view or transaction; while that lasts, and if it fails, the head is not believed."""
        with machine.lock:
            trusted = not self._torn
            self._stale = self._torn = True
            self._table.load_codec()
            self.recovery = self._recover(machine, trusted)
            self._take_options(machine, again=True)
            self._stale = self._torn = False

    def _take_options(self, machine: Linear | ByIds, again: bool = False) -> None:
        """Take over what other handles have set or chosen since this one last looked; ``again``: also what they had before.

        Where this handle has changed an option too and not written it, the store's is the newer one.
        """
        config, chosen = self._db.get("head"), self._db.get("chosen", None)
        known, mine = self._options, machine.config()
        if known is not None and config != known[0] and config != mine:
            if mine != known[0]:
                log.warning("%s: options set here were set by another process, too; the store's are taken", self.path)
            machine.set_options(config)
        if again or known is None or chosen != known[1]:
            machine.restore_chosen(chosen)
        self._options = (config, chosen)

    @exactly
    def _recover(self, machine: Linear | ByIds, trusted: bool) -> str:
        state = self._db.get("state")
        position, digest = state["position"], state["digest"]
        was = self._position
        self._position = position
        if len(self._table) != state["samples"]:
            raise StoreError(f"{self._db.path} is damaged: it holds {len(self._table)} rows, not {state['samples']}")
        if isinstance(machine, Linear) and machine.exact:
            if trusted and not machine.empty and self._in_step(machine, state):
                machine.note()
                return "the head was in step"
            for path in reversed(self._snapshots.paths()):
                done = self._from_snapshot(machine, path, position, digest)
                if done:
                    machine.note()
                    self._report(done, was != position and "loaded" not in done)
                    return done
        machine.clear()
        for rows in self._table.batches():
            machine.add_rows(rows, self._table.codec)
        if machine.digest() != digest:
            raise StoreError(f"{self._db.path} is damaged: its rows do not give the digest that was recorded")
        machine.note()
        done = (
            f"rebuilt the head from {state['samples']} rows at position {position}" if position else "the store is new"
        )
        self._report(done, machine.exact and position > 0)
        return done

    def _in_step(self, machine: Linear | ByIds, state: dict[str, Any]) -> bool:
        """Whether the head itself says that it is what the state says."""
        try:
            return machine.holds(state["digest"], state["samples"])
        except TorchLSSVMError as error:  # it was interrupted in the middle of a change
            log.info("%s: the head cannot be used as it is: %s", self.path, error)
            return False

    def _from_snapshot(self, machine: Linear, path: Path, position: int, digest: str) -> str | None:
        found = self._snapshots.read(path)
        if found is None:
            return None
        at = found["position"]
        if not 0 <= at <= position or self._journal.chain_at(at).hex() != found["chain"]:
            return None
        others = self._db.one("SELECT count(*) FROM journal WHERE position > ? AND kind <> 'add'", (at,))
        if others is None or others[0]:  # what was removed or changed since is no longer there to be subtracted
            return None
        try:
            machine.load(found["statistics"])
        except Exception:  # tensors of any shape and type: what they are is in doubt, and the rows are the truth
            return None
        if machine.digest() != found["digest"]:
            return None
        self._saved = at
        added = 0
        if at < position:
            for rows in self._table.batches(after=at):
                machine.add_rows(rows, self._table.codec)
                added += len(rows)
        if machine.digest() != digest:
            return None
        if at == position:
            return f"loaded the snapshot at position {at}"
        return f"rolled the snapshot at position {at} forward to {position} by {added} rows"

    def _report(self, done: str, unclean: bool) -> None:
        if unclean and not self._torn:
            log.warning("%s was not closed or was changed by another process: %s", self.path, done)
        else:
            log.info("%s: %s", self.path, done)

    # -- closing -------------------------------------------------------------------------------------------------------

    def _snapshot(self) -> None:
        """Save the statistics beside the store, unless they are saved or not in step. Called under the write lock."""
        machine = self._machine
        if not isinstance(machine, Linear) or not machine.exact or self._stale or self._saved == self._position:
            return
        state = self._db.get("state")
        if state["position"] != self._position or machine.touched:
            return
        self._snapshots.write(self._position, bytes.fromhex(state["chain"]), state["digest"], machine.state())
        self._saved, self._rows_since = self._position, 0

    def close(self) -> None:
        """Keep options that were set, write a snapshot, and close the files. No event is lost without it.

        StoreError if options that were set on the head cannot be written; the files are closed all the same.
        """
        if self._closed:
            return
        with self._db.held():
            self._closed = True
            try:
                if not self.readonly and self._machine is not None and not self._stale:
                    self._keep(self._machine)
            finally:
                self._db.close()

    def _keep(self, machine: Linear | ByIds) -> None:
        """Before closing: first what would be lost, then what only saves time."""
        trouble: StoreError | None = None
        if (machine.config(), machine.chosen()) != self._options:
            try:
                with self._db.transaction():
                    stored = (self._db.get("head"), self._db.get("chosen", None))
                    if self._db.get("state")["position"] == self._position and stored == self._options:
                        self._save_options(machine)
                    else:
                        log.warning("%s: others have written since; options set here are not kept", self.path)
            except StoreError as error:
                trouble = error
        try:
            with self._db.transaction():
                self._snapshot()
        except StoreBusyError:
            log.info("%s: another writer is at work, closed without a snapshot", self.path)
        except (OSError, StoreError) as error:
            log.warning("%s: closed without a snapshot, opening it will take longer: %s", self.path, error)
        if trouble is not None:
            raise type(trouble)(
                f"{self.path} is closed and every event is kept, but not the options that were set on its head: {trouble}"
            ) from trouble

    def _save_options(self, machine: Linear | ByIds) -> Options:
        """Write what this handle has changed; returns what the store has then, for when it is committed."""
        now, known = (machine.config(), machine.chosen()), self._options or (None, None)
        for name, value, old in zip(("head", "chosen"), now, known, strict=True):
            if value != old:
                self._db.put(name, value)
        return now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"
