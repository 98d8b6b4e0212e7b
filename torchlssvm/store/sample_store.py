"""``SampleStore``: samples, their journal and their head in one folder."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeAlias, overload

import torch
from torch import Tensor

from torchlssvm.analysis.label_errors import LabelErrors, from_scores
from torchlssvm.audit.certificate import Certificate, Opening
from torchlssvm.audit.keys import sign
from torchlssvm.audit.receipt import ErasureReceipt
from torchlssvm.canonical_json import loads
from torchlssvm.errors import StoreBusyError, StoreDiskError, StoreError, SuppressedWarning, TorchLSSVMError
from torchlssvm.events import (
    CPU,
    Add,
    Event,
    EventBase,
    Remove,
    check_free_text,
    check_ids,
    check_text,
    new_event_id,
)
from torchlssvm.files import DATABASE_FILE, refuse_in_store, sync_folder
from torchlssvm.functional.checks import as_tensor, truth
from torchlssvm.functional.grid import grid_from_json
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.threads import threads_for
from torchlssvm.linear.data_choices import ChoiceState, DataChoices
from torchlssvm.linear.diagnostics.uncertainty import calibrate_on
from torchlssvm.linear.discriminant_rule import choose_rule, has_open_rule
from torchlssvm.linear.kinds import HEAD_TYPES
from torchlssvm.linear.labelled_batches import class_numbers, more_classes
from torchlssvm.linear.linear_head import targets_of
from torchlssvm.statistics.statistics import ROW_OPTIONS
from torchlssvm.store.certificate_issuer import CertificateIssuer
from torchlssvm.store.database import NOTE_PREFIX, WAITING_NOTE_PREFIX, WITNESS_FILE, Database
from torchlssvm.store.erasure.erasure import Erasure, erase
from torchlssvm.store.erasure.requests import READMISSION_PREFIX, KeptReceipts, Requests, name_list
from torchlssvm.store.erasure.suppression import KEY_VARIABLE, Suppression
from torchlssvm.store.head_adapter import (
    SETTABLE_OPTIONS,
    HeadAdapter,
    LinearAdapter,
    adapter_for,
    check_size,
    head_from,
)
from torchlssvm.store.journal import Entry, Journal, commitments_held, now
from torchlssvm.store.live_head import LiveHead
from torchlssvm.store.sample_table import ROWS_PER_BATCH, Sample, SampleTable, StoreDataset, StoredRows
from torchlssvm.store.snapshots import LEFTOVERS, Witness
from torchlssvm.store.transaction import EventResult, Transaction
from torchlssvm.wording import counted, listed

log = logging.getLogger("torchlssvm.store")

CALIBRATE_RECORD = "calibrate"
"""Record of a store that recalibrates with each event: how the calibration is made."""

Groups: TypeAlias = str | Mapping[str, Any] | None
"""Samples that are left out together: "subject", or a dict from ids to groups."""


@dataclass(frozen=True)
class Preview:
    """The effect that events would have. Accuracies are None if you pass no labels, or if no sample would remain."""

    samples: int
    remaining: int
    flips: int | None
    accuracy_before: float | None
    accuracy_after: float | None


@dataclass(frozen=True)
class Compaction:
    """Result of :meth:`SampleStore.compact`: removed snapshots, and known checkpoints that still contain erased samples."""

    position: int
    removed: list[str]
    checkpoints: list[str]

    def __repr__(self) -> str:
        outside = f", erased samples may still be in {listed(self.checkpoints)}" if self.checkpoints else ""
        return f"Compaction(position={self.position}, {counted(len(self.removed), 'snapshot')} removed{outside})"


class SampleStore:
    """Keep samples with ids and subjects in a folder, together with a head that always matches them.

    ``SampleStore(path, head=head)`` creates a store with an empty head, or opens an existing store and restores the head. When
    you open an existing store, you may omit ``head`` unless it is a kernel machine. Use the store as a context manager, or
    call :meth:`close`. All changes of a call are durable when the call returns. Features are stored as the head summed them,
    so that they can be removed exactly.

    Args:
        path: a folder.
        head: an :class:`~torchlssvm.LSSVMHead`, a :class:`~torchlssvm.MarginHead`, or a kernel machine.
        fingerprint: hash of the network that computes the features (:mod:`torchlssvm.backbone_hash`). The store then refuses
            features of any other network.
        readonly: open for reading only, e.g. while another process writes.
        timeout: seconds to wait for another writer.
        snapshot_rows: number of changed rows after which the statistics are saved. Closing and compacting the store also save
            them.
        accept_rollback: open the store even if it may have lost acknowledged events. The journal records this.
        device: device of the head, if you pass no head.
        suppression_list: file that prevents samples erased on request from being added again
            (:class:`~torchlssvm.store.SuppressionList`). The file is created if it does not exist. The store uses the list from
            then on. Several stores may share a list.
        suppression_key: key of the list, as 32 bytes, 64 hex digits or a file. Default: the environment variable
            ``TORCHLSSVM_SUPPRESSION_KEY``. Without the key, a store with a list refuses to add and remove samples.
        erased: what to do with an Add of samples that were erased on request: ``"refuse"`` the whole event, or ``"skip"`` these
            samples. An ``LSSVMModule`` skips them by default, because its data set may still contain them.

    >>> import tempfile, torch
    >>> from torchlssvm import LSSVMHead, FixedPoint
    >>> from torchlssvm.events import Add, Remove
    >>> folder = tempfile.mkdtemp()
    >>> store = SampleStore(folder, head=LSSVMHead(8, 2, grid=FixedPoint(8.0)))
    >>> x, y = torch.randn(6, 8), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> done = store.apply(Add(ids=list("abcdef"), x=x, y=y, subject=["u1", "u1", "u2", "u2", "u2", "u3"]))
    >>> store.apply(Remove(subject="u2")).samples
    3
    >>> never = LSSVMHead(8, 2, grid=FixedPoint(8.0)).add(x[[0, 1, 5]], y[[0, 1, 5]])
    >>> store.head.digest() == never.digest(), len(store)
    (True, 3)
    >>> store.close()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        head: Any = None,
        *,
        fingerprint: str | None = None,
        readonly: bool = False,
        timeout: float = 30.0,
        snapshot_rows: int = 65536,
        accept_rollback: bool = False,
        device: torch.device | str | None = None,
        suppression_list: str | os.PathLike[str] | None = None,
        suppression_key: Any = None,
        erased: str = "refuse",
    ):
        self.path = check_folder(path)
        self.readonly = readonly
        self.keeps_calibration = False
        """Default of ``keep`` in :meth:`calibrate`."""
        self._source = fingerprint
        self._witness = Witness(self.path / WITNESS_FILE)
        self._db = self._open_database(head is not None and not readonly, timeout)
        try:
            self._journal, self.table = Journal(self._db), SampleTable(self._db)
            self.suppression = Suppression(self._db, self.table, suppression_key, erased)
            self.requests = Requests(self._db, self.table, self._journal, self._journalize)
            self.receipts = KeptReceipts(self._db, self._journal)
            self.live = LiveHead(self.path, self._db, self.table, self._journal, snapshot_rows)
            self.certificates = CertificateIssuer(self._db, self.table, self._journal, self.live.snapshots)
            if head is not None:
                self.live.adapter = adapter_for(head)
            self._finish_creation()
            told = self._witness.read()  # read before the view, which then includes every acknowledged event
            with self._db.view():
                lost = self._check_start(told)
                if lost is not None and not accept_rollback:
                    raise StoreError(lost)
                self._start_head(device)
            if lost is not None and not readonly:
                log.warning("%s Accepted: the journal notes it.", lost)
                self._journalize(f"rollback-{new_event_id()}", "rollback", [], lambda: None)
            self._keep_head(self)
            self.returned: list[str] = []
            """Ids of samples that are held although they were erased on request, as found when the store was opened."""
            if suppression_list is not None:
                self.use_suppression_list(suppression_list)
            self._warn_of_returned()
        except BaseException:
            self._db.close()
            raise

    # -- opening and closing -------------------------------------------------------------------------------------------

    def _open_database(self, create: bool, timeout: float) -> Database:
        file = self.path / DATABASE_FILE
        if not file.exists():
            if not create:
                raise StoreError(f"there is no store at {self.path}: give a head to create one")
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise StoreError(f"{self.path} is not empty and not a store: nothing was written there")
            refuse_in_store(self.path)
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self.path.chmod(0o700)  # keep other users of this machine out, even if the folder existed before
            except OSError as error:  # not every file system supports this
                log.warning("%s: others may be able to read the store: %s", self.path, error)
            database = Database(file, True, timeout)
            sync_folder(self.path)
            sync_folder(self.path.parent)
            return database
        return Database(file, create, timeout, self.readonly)

    def _finish_creation(self) -> None:
        """Write the records that every store has, if they do not exist."""
        adapter = self.live.adapter
        if self._db.get("state", None) is not None:
            return
        if adapter is None or self.readonly:
            raise StoreError(f"the store at {self.path} was never finished: give a head to create it")
        if not adapter.empty:
            raise StoreError(
                "the head already has samples, which are not in the store: pass an empty head, and add the samples to "
                "the store"
            )
        if isinstance(adapter, LinearAdapter) and not adapter.exact and adapter.head.scale is not None:
            raise StoreError(
                f"a head with grid=None and scale={adapter.head.scale!r} takes no removals, so nothing could be erased: use a "
                "grid"
            )
        if isinstance(adapter, LinearAdapter):
            check_size(adapter.config())  # or the store could not be opened again
        with self._db.transaction():
            if self._db.get("state", None) is not None:  # another process was faster
                return
            self._db.put("head", adapter.config())
            self._db.put("chosen", adapter.chosen() if isinstance(adapter, LinearAdapter) else None)
            self._db.put("fingerprint", self._source or "")  # never absent: damage must not unbind the store
            self._db.put("created", now())
            self._db.put("compacted", 0)
            self.table.adopt_codec(adapter.codec())
            self._journal.start(adapter.digest())
        self._witness.create()

    def _check_start(self, told: tuple[int, bytes] | None) -> str | None:
        """Raise StoreError unless the journal ends where the state says; return a text if acknowledged events may be lost."""
        state = self._db.get("state")
        position = state["position"]
        last = self._db.one("SELECT max(position) FROM journal")
        if ((last or (None,))[0] or 0) != position or self._journal.chain_at(position).hex() != state["chain"]:
            raise StoreError(f"{self._db.path} is damaged: the journal does not end where the state says")
        if position:
            self._journal.entries(position - 1)
        if told is None and position == 0:
            return None
        if told is not None and told[0] <= position and self._journal.chain_at(told[0]) == told[1]:
            return None
        said = "is missing or damaged" if told is None else f"says that event {told[0]} was acknowledged"
        return (
            f"{self.path} is at event {position}, and {self._witness.path} {said}: the log may have been cut short, or an "
            "older copy put in its place. Samples erased since may be back. Open it with accept_rollback=True to go on."
        )

    def _start_head(self, device: torch.device | str | None) -> None:
        """Create the head, or check the one that was passed. Restore it unless this handle is read-only."""
        bound, config = self.fingerprint, self._db.get("head")
        if self._source is not None and bound not in (None, self._source):
            raise ValueError(
                f"the store at {self.path} is bound to the network with the fingerprint {bound!r}, not {self._source!r}. The "
                "fingerprint covers the weights, the preprocessing, and the layers, views and feature map of the features. If "
                "the store was made with a network by name, pass attach the same name"
            )
        self.table.load_codec()
        given = self.live.adapter
        if given is None:
            if config["type"] in HEAD_TYPES:
                self.live.adapter = adapter_for(head_from(config, device))
                if not self.readonly:
                    self.live.follow()
            return
        self._check_adapter(config, given)
        own = given.config()
        chooses = isinstance(given, LinearAdapter) and given.head._choices.rho_is_open
        self.live.follow()
        if isinstance(given, LinearAdapter) and not chooses:  # a rule for rho that has not been applied yet gives way
            given.set_options(own)

    def _check_adapter(self, config: dict[str, Any], adapter: HeadAdapter) -> None:
        mine = adapter.config()
        if adapter.empty and mine.get("num_classes", 0) < config["num_classes"] and self._journal.grew:
            mine["num_classes"] = config["num_classes"]  # the head gets the classes added since when it is restored
        for name in dict.fromkeys(("type", "in_features", "num_classes", *ROW_OPTIONS, *config)):
            if name not in SETTABLE_OPTIONS and mine.get(name) != config.get(name):
                empty = self._db.get("state")["position"] == 0
                raise ValueError(
                    f"the head does not fit the store at {self.path}: {name} is {_readable(mine.get(name))}, "
                    f"not {_readable(config.get(name))}"
                    + (". The store is empty: delete its folder to make it with other options" if empty else "")
                )
        if not adapter.empty and adapter.digest() != self._db.get("state")["digest"]:
            raise StoreError("the head holds samples that are not those of the store: give an empty head, or none")

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._db.closed

    def close(self) -> None:
        """Write options that were set on the head and a snapshot, and close the files. Without this call, no event is lost.

        Raises StoreError if the options cannot be written. The files are closed even then.
        """
        if self.closed:
            return
        with self._db.held():
            try:
                if not self.readonly:
                    self.live.keep()
            finally:
                self._keep_head(None)
                self._db.close()

    def _keep_head(self, keeper: SampleStore | None) -> None:
        """Make the head check before each use that it is up to date, until the store is closed."""
        if isinstance(self.live.adapter, LinearAdapter):
            self.live.adapter.head._keeper = keeper

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    # -- the head ------------------------------------------------------------------------------------------------------

    @property
    def head(self) -> Any:
        """The live head. Change its samples only with :meth:`apply`.

        You may keep a reference to a linear head until the store is closed, because the head applies the changes of other
        processes before each use. A kernel machine does not, so read this property again to get these changes.
        """
        with self.view():
            return self.live.follow().head

    def catch_up(self) -> None:
        """Bring the head up to date before it is used. The head itself calls this method."""
        self.live.catch_up()

    @property
    def head_position(self) -> int:
        """The journal position of the live head, which is behind :attr:`position` if another process has written since."""
        return self.position if self.live.stale and not self.closed else self.live.position

    def restore(self) -> str:
        """Restore the head from the store after the head was changed directly; return a description of what was done."""
        with self.view():
            self.live.stale = True
            _ = self.head
            return self.live.recovery

    def relearn(self, machine: Any) -> Any:
        """Clear a machine and train it on all rows of the store."""
        adapter = adapter_for(machine)
        with self.view():
            adapter.clear()
            for rows in self.batches():
                adapter.add_rows(rows, self.table.codec)
        return machine

    # -- reading -------------------------------------------------------------------------------------------------------

    def view(self) -> AbstractContextManager[None]:
        """Return a context (``with store.view():``) that reads one position consistently while other processes write.

        Inside the context you cannot write. Other threads wait, and no other process can finish a compaction.
        """
        return self._db.view()

    @property
    def position(self) -> int:
        """The number of events applied so far."""
        return int(self._db.get("state")["position"])

    @property
    def compacted(self) -> int:
        """The journal position of the last completed :meth:`compact`."""
        return int(self._db.get("compacted"))

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the network whose features the store accepts, or None if the store is not bound to a network."""
        return self._db.get("fingerprint") or None

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.table)

    def __contains__(self, sample_id: object) -> bool:
        """True if there is a sample with this id."""
        try:
            wanted = check_text(sample_id, "an id")
        except ValueError:
            return False
        return wanted in self.table.held([wanted])

    def __iter__(self) -> Iterator[Sample]:
        """All samples, one by one, in the order they were added."""
        for rows in self.batches():
            yield from rows

    def batches(self, size: int = ROWS_PER_BATCH) -> Iterator[StoredRows]:
        """Yield all samples in batches, with features as the head summed them."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be an int >= 1, got {size!r}")
        return self.table.batches(size=size)

    def get(self, ids: Any) -> StoredRows:
        """Return the samples with the given ids, in the order of these ids."""
        wanted = check_ids(ids)
        with self.view():
            self.table.load_codec()
            return self.table.read(self.table.find(wanted), wanted)

    def find(self, subject: str | None = None, label: int | str | None = None) -> list[str]:
        """Return the ids of all samples of a subject, with a label, or both, in the order in which they were added.

        Pass the label as a class number or a class name.
        """
        with self.view():
            head = self._db.get("head")
            targets = head.get("targets")
            if label is not None and targets is not None:
                raise ValueError(
                    f"samples are found by a label if they have one class each; this store has {targets!r}"
                )
            number = self.labels(label)
            if number is not None and (isinstance(number, bool) or number not in range(head["num_classes"])):
                raise ValueError(f"label must be the name of a class or in 0..{head['num_classes'] - 1}; got {label!r}")
            return self.table.ids(None if subject is None else check_text(subject, "subject"), number)

    def has_applied(self, event_id: str) -> bool:
        """True if an event with this id is in the journal."""
        return self._journal.of(event_id) is not None

    def recorded_id(self, event_id: str) -> str:
        """Return the keyed hash under which the journal, certificates and receipts record an event id."""
        return self._journal.recorded_id(event_id)

    def subjects(self) -> dict[str, int]:
        """Return a dict that maps each subject to the number of its samples."""
        with self.view():
            return self.table.subjects()

    def dataset(self) -> StoreDataset:
        """Return the samples as a torch dataset of (x, y), for a DataLoader with any number of workers."""
        with self.view():
            return StoreDataset(self.path, [i for ids, _ in self.table.names() for i in ids])

    def notes(self, prefix: str = "") -> dict[str, Any]:
        """Return the notes written with :meth:`set_note` as a dict, sorted by name.

        Pass ``prefix`` to get only the notes whose names begin with the prefix.
        """
        with self.view():
            return {prefix + name: value for name, value in self._db.records(NOTE_PREFIX + prefix).items()}

    def note(self, name: str) -> Any:
        """Return one note, or None if it is not set."""
        return self._db.get(NOTE_PREFIX + name, None)

    def set_note(self, name: str, value: Any) -> None:
        """Store a JSON value under a name. Pass None to delete the note. Raises ValueError if the value is not JSON.

        Do not store personal data in notes. The only exception is an event that waits for its samples
        (``corrections.waiting_events``).
        """
        self.update_note(name, lambda _: value)

    def update_note(self, name: str, change: Callable[[Any], Any]) -> Any:
        """Set a note to ``change(current value)``, atomically. The current value is None if the note is not set."""
        with self._db.transaction():
            value = change(self.note(name))
            self._put_note(name, value)
            return value

    def _put_note(self, name: str, value: Any) -> None:
        """Write a note inside a transaction. ValueError for a value that could not be read again, e.g. NaN."""
        try:
            loads(json.dumps(value, sort_keys=True))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the note {name!r} must be a JSON value: {error}. Nothing was changed.") from None
        self._db.put(NOTE_PREFIX + name, value)

    def history(self) -> list[Entry]:
        """Check the hash chain of the journal, and return all events so far, oldest first."""
        return self._journal.entries()

    def stats(self) -> dict[str, Any]:
        """Return facts about the store as primitives."""
        with self.view():
            self.table.load_codec()
            state, codec = self._db.get("state"), self.table.codec
            grid, head = codec.grid, self._db.get("head")
            rho = head.get("rho")
            chosen = DataChoices.from_json((self._db.get("chosen", None) or {}).get("made", {}), None)
            return {
                "path": str(self.path),
                "samples": len(self),
                "subjects": len(self.subjects()),
                "labels": {str(label): count for label, count in self.table.labels().items()},
                "head": head["type"],
                "targets": head.get("targets", "classes"),
                "features": codec.J,
                "classes": codec.K,
                "resolution": None if grid is None else grid.resolution,
                "limit": None if grid is None else grid.max_value,
                "rho": None if rho is None else str(chosen.listed(rho).get("rho", f"{rho!r}, as given")),
                "rule": str(chosen.made["rule"]) if "rule" in chosen.made else head.get("rule"),
                "events": state["position"],
                "digest": state["digest"],
                "fingerprint": self.fingerprint,
                "compacted_at": self.compacted,
                "returned": len(self.returned),
                "bytes": sum(file_sizes(self.path)),
                "created": self._db.get("created"),
            }

    # -- questions about all samples -----------------------------------------------------------------------------------

    def _linear(self, what: str) -> Any:
        head = self.head
        if not isinstance(self.live.adapter, LinearAdapter):
            raise StoreError(f"{what} needs a store with a linear head; this one has a {type(head).__name__}")
        return head

    @exactly
    def leave_one_out(self, pairs: str = "votes", groups: Groups = None) -> tuple[list[str], Tensor, Tensor]:
        """Return ids, leave-one-out scores (n, K) and labels (n,) or targets (n, K) of all samples, in the order added.

        Rows of the same person or image are similar, so if only one of them is left out, the head still knows the others, and
        the scores are too good. Pass ``groups`` to leave out such rows together.

        Args:
            pairs: see :meth:`torchlssvm.LSSVMHead.leave_one_out`.
            groups: ``"subject"``, or a dict that maps ids to groups. Samples without a group are left out one by one. Without
                groups, a UserWarning is issued if rows of one subject are similar.
        """
        with self.view():
            if groups is None:
                self._warn_if_alike()
            return self._left_out(self._linear("leave_one_out"), pairs, groups)

    def _warn_if_alike(self) -> None:
        """Warn if rows of one subject are less than half as far apart as rows of different subjects with the same label.

        Neighbouring rows, in the order of their subjects, are compared at 1,024 positions that are chosen at random.
        """
        named = [row for batch in self.table.names() for row in zip(*batch, strict=True) if row[1] is not None]
        if len(named) < 20:
            return
        named.sort(key=lambda row: str(row[1]))
        places = random.Random(0).sample(range(len(named) - 1), min(1024, len(named) - 1))
        here, beside = (self.get([named[k + step][0] for k in places]) for step in (0, 1))
        if here.y.ndim != 1:
            return
        medians = []
        for shift, of_one in ((0, True), (len(places) // 2, False)):
            subjects = beside.subjects[shift:] + beside.subjects[:shift]
            fits = torch.tensor([(a == b) == of_one for a, b in zip(here.subjects, subjects, strict=True)])
            fits &= here.y == beside.y.roll(-shift)
            distances = (here.x - beside.x.roll(-shift, 0))[fits].double().norm(dim=1)
            medians.append(float(distances.median()) if len(distances) >= 10 else math.nan)
        if medians[0] < 0.5 * medians[1]:
            warnings.warn(
                "rows of one subject are alike in this store, so leave-one-out scores are too good: use groups='subject'",
                stacklevel=4,
            )

    def _left_out(self, head: Any, pairs: str, groups: Groups) -> tuple[list[str], Tensor, Tensor]:
        """Ids, leave-one-out scores and labels of all samples in the open view or transaction."""
        place: dict[str, int] = {}
        scores = [torch.zeros(0, head.num_classes, dtype=torch.float64, device=head.device)]
        labels = [torch.zeros(0, dtype=torch.int64, device=head.device)]
        # Weights that follow the counts, or are for several labels, need solves in each batch, so batches are large: 128 MB.
        weight = getattr(head, "class_weight", None)
        solves = isinstance(weight, str) or (weight is not None and targets_of(head) == "multilabel")
        size = max(ROWS_PER_BATCH, 2**24 // head.in_features if solves else 0)
        options = {"pairs": pairs} if head.multiclass == "ovo" else {}
        for rows, numbers in self._grouped_batches(groups, size):
            x, y = rows.x.to(head.device), rows.y.to(head.device)
            scores.append(head.leave_one_out(x, y, groups=numbers, **options))
            labels.append(y)
            place |= {name: k for k, name in enumerate(rows.ids, len(place))}
        ids = [name for names, _ in self.table.names() for name in names]
        order = torch.tensor([place[name] for name in ids], dtype=torch.int64, device=head.device)
        return ids, torch.cat(scores)[order], torch.cat(labels[1:] or labels)[order]

    def _grouped_batches(self, groups: Groups, size: int) -> Iterator[tuple[StoredRows, Tensor | None]]:
        """All samples in batches of about ``size`` that contain whole groups, with the group number of each row (B,)."""
        if groups is None:
            yield from ((rows, None) for rows in self.batches(size))
            return
        if isinstance(groups, Mapping):
            groups = {check_text(i, "an id"): group for i, group in groups.items()}
            try:
                set(groups.values())
            except TypeError as error:
                raise ValueError(f"a group must be a text, a number or another hashable value: {error}") from None
        elif groups != "subject":
            raise ValueError(f"groups must be 'subject' or a dict from ids to groups; got {groups!r}")
        members: dict[Any, list[str]] = {}
        for ids, subjects in self.table.names():
            for i, subject in zip(ids, subjects, strict=True):
                group = groups.get(i) if isinstance(groups, Mapping) else subject
                members.setdefault(i if group is None else ("group", group), []).append(i)
        batch: list[list[str]] = []
        for names in [*members.values(), None]:
            if batch and (names is None or sum(map(len, batch)) + len(names) > size):
                numbers = torch.arange(len(batch)).repeat_interleave(torch.tensor([len(group) for group in batch]))
                yield self.get([i for group in batch for i in group]), numbers
                batch = []
            batch += [] if names is None else [names]

    def label_errors(self, groups: Groups = None) -> LabelErrors:
        """Rank samples by how suspicious their labels are. Inspect them, then call ``apply(found.events(10))``.

        Pass ``groups`` as for :meth:`leave_one_out`.
        """
        ids, scores, labels = self.leave_one_out("least", groups)
        labels = labels.bool() if self.head.targets == "multilabel" else labels
        return from_scores(scores, labels, ids, classes=self.classes or None)

    def calibrate(self, method: str | None = None, *, keep: bool | None = None, groups: Groups = None) -> None:
        """Calibrate the head's probabilities on leave-one-out scores of all samples, and store the result.

        Args:
            method: see :meth:`torchlssvm.LSSVMHead.calibrate`.
            keep: recalibrate with each event, which then reads all rows. If False, an event invalidates the calibration, and
                ``predict_proba`` raises an error until you calibrate again. Certificates state whether the calibration is kept.
                Default: True for a store that ``attach`` opened, otherwise False.
            groups: see :meth:`leave_one_out`. With ``keep``, only ``"subject"`` is allowed.
        """
        self._check_writable()
        keep = self.keeps_calibration if keep is None else keep
        if keep and groups not in (None, "subject"):
            raise ValueError("a calibration that is kept has groups=None or groups='subject'")
        if groups is None:
            with self.view():
                self._warn_if_alike()

        def change(head: Any) -> None:
            _, scores, labels = self._left_out(head, "votes", groups)
            calibrate_on(head, scores, labels, method, grouped=groups is not None)
            self._db.put(CALIBRATE_RECORD, {"method": method, "groups": groups} if keep else None)

        self._set_option(change, choose_rho=False)

    def _calibrate_again(self) -> None:
        """Recalibrate inside a transaction, if the calibration is kept. With too few samples, it becomes invalid."""
        kept = self._db.get(CALIBRATE_RECORD, None)
        adapter = self.live.adapter
        if kept is None or not isinstance(adapter, LinearAdapter):
            return
        head = adapter.head
        if head._choices.state_of("calibration") is ChoiceState.CURRENT:
            return
        try:
            _, scores, labels = self._left_out(head, "votes", kept["groups"])
            calibrate_on(head, scores, labels, kept["method"], grouped=kept["groups"] is not None)
        except (RuntimeError, ValueError, TorchLSSVMError) as error:
            log.warning("%s: the calibration could not be made again: %s", self.path, error)

    def refresh(self) -> float | None:
        """Choose rho again if it is chosen automatically and samples have changed since the last choice; store and return rho.

        With ``rule="auto"``, the method also chooses between least squares and the discriminant, by leave-one-out accuracy. If
        the store keeps a calibration, the method calibrates again. You rarely need to call it yourself, because every command
        calls it at its end and :meth:`certificate` calls it first. In a store that cannot be written, nothing changes, and
        ``choices`` reports that rho is older than the samples.
        """
        adapter = self.live.adapter
        if not isinstance(adapter, LinearAdapter):
            return None
        kept = self._db.get(CALIBRATE_RECORD, None) is not None
        chooses = adapter.head._choices.rho_rule is not None or has_open_rule(adapter.head)
        if not self.readonly and (kept or chooses):
            try:
                self._set_option(lambda head: None)
            except (StoreBusyError, StoreDiskError) as error:
                log.warning("%s: rho is not chosen again: %s", self.path, error)
        return adapter.head.rho

    def set_rho(self, value: float | str) -> float:
        """Set rho of the head, store it, and return the value in use.

        Pass a number, or a rule that chooses rho from the samples: ``"gcv"`` for an :class:`~torchlssvm.LSSVMHead`, ``"kfold"``
        or ``"loo"`` for a :class:`~torchlssvm.MarginHead`. Other writers wait while rho is chosen.
        """
        if value in ("kfold", "loo"):
            self._set_option(lambda head: head.select_rho(method=value))
        else:
            self._set_option(lambda head: setattr(head, "rho", value))
        return float(self.head.rho)

    def set_class_weight(self, value: Any) -> None:
        """Set the class weights of the head (None, "balanced", "complement" or numbers (K,)) and store them."""
        self._set_option(lambda head: setattr(head, "class_weight", value))

    def recalibrate(self) -> None:
        """Recalibrate if the calibration is kept and samples have changed since."""
        if not self.readonly and self._db.get(CALIBRATE_RECORD, None) is not None:
            self._set_option(lambda head: None, choose_rho=False)

    def _set_option(self, change: Callable[[Any], Any], choose_rho: bool = True) -> None:
        """Change an option of the head, choose rho again if it has a rule, and store both."""
        self._check_writable()
        with self._db.held():
            head = self._linear("options")
            try:
                with self.live.changing():
                    change(head)
                    if choose_rho:
                        head._refresh_rho()
                        choose_rule(head, lambda: ((rows.x, rows.y, None) for rows in self.batches(ROWS_PER_BATCH)))
                    self._calibrate_again()
            except BaseException:
                self.live.discard_options()
                raise

    # -- classes -------------------------------------------------------------------------------------------------------

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in label order; empty if the classes have no names."""
        return list(self._db.get("classes", []))

    def labels(self, names: Any) -> Any:
        """Convert class names to labels: ``store.apply(Relabel(ids=["a"], y=store.labels(["cat"])))``.

        Numbers are returned unchanged. Raises ValueError, with similar names, for an unknown class, and for any name with
        ``targets="multilabel"`` or ``"regression"``.
        """
        return class_numbers(names, self.classes, self._db.get("head").get("targets", "classes"))

    def name_classes(self, names: Sequence[str] | Callable[[list[str]], Sequence[str]]) -> None:
        """Name the classes, in label order. You may pass fewer names than there are classes.

        Pass a list of names, or a function that maps the current names to the new names and is called atomically.
        """
        self._check_writable()
        with self._db.transaction():
            self.table.load_codec()
            given = names(self.classes) if callable(names) else names
            checked = [check_text(name, "a class") for name in given]
            if len(set(checked)) < len(checked) or len(checked) > self.table.codec.K:
                raise ValueError(f"give {self.table.codec.K} different names, or fewer; got {checked}")
            self._db.put("classes", checked)

    def add_classes(self, classes: int | Sequence[str], event_id: str | None = None) -> None:
        """Add classes, given as names or as a number. The journal records the change.

        Afterwards the digest equals that of a head that had all classes from the start. Raises ValueError if the samples have
        float targets, because the number of target columns is fixed, and StoreError for a kernel machine.
        """
        self._check_writable()
        event = check_text(event_id or new_event_id(), "event_id")
        with self._db.held():
            adapter = self.live.required()
            if not isinstance(adapter, LinearAdapter):
                raise StoreError("classes are added to a linear head only")
            with self._db.transaction(), adapter.lock:
                self.live.prepare()
                if adapter.head.statistics.kind == "values" or adapter.head.targets != "classes":
                    raise ValueError(
                        "samples with several labels or numbers have a fixed number of columns in a store: make a new one and "
                        "add the samples there. Nothing was changed."
                    )
                if self._journal.of(event) is not None:
                    raise ValueError(f"the id {event!r} was used before in the journal. Nothing was changed.")
                k, names = more_classes(classes, self.classes, self.table.codec.K)
                trial = adapter.copy()  # a head cannot lose classes again: its own change comes last
                trial.add_classes(k)
                self._journal.append([(event, "classes", [])], trial.digest())
                self._db.put("head", trial.config())
                self._db.put("chosen", trial.chosen())
                if names is not None:
                    self._db.put("classes", [check_text(name, "a class") for name in names])
                self.table.adopt_codec(replace(self.table.codec, K=self.table.codec.K + k))
                self.live.discard_options()  # the next look at the store takes the new classes over
            _ = self.head
            self._acknowledge(erased=True)
            self.recalibrate()

    # -- changing ------------------------------------------------------------------------------------------------------

    @overload
    def apply(
        self, events: Event, notes: Any = ..., request: Any = ..., keep_receipt: bool = ..., recalibrate: bool = ...
    ) -> EventResult: ...
    @overload
    def apply(
        self,
        events: Iterable[Event],
        notes: Any = ...,
        request: Any = ...,
        keep_receipt: bool = ...,
        recalibrate: bool = ...,
    ) -> list[EventResult]: ...
    def apply(
        self,
        events: Event | Iterable[Event],
        notes: Mapping[str, Any] | None = None,
        request: str | None = None,
        keep_receipt: bool = False,
        recalibrate: bool = True,
    ) -> EventResult | list[EventResult]:
        """Apply one or more events to the samples and the head, all or none. The change is durable when the call returns.

        An event that was already applied changes nothing, and its result says so. Threads may share a store; they take turns,
        and readers of the head wait during a change. After an interrupt, either all or none of the events are applied. If you
        do not know which, apply them again with the same event ids.

        Args:
            events: an event, or several.
            notes: notes to write in the same transaction (see :meth:`set_note`).
            request: id of the request (:attr:`requests`) that Remove events belong to. If the store uses a suppression list,
                the samples are entered in the list before they are erased.
            keep_receipt: keep the nonces of Remove events until compaction, for :meth:`write_receipt`. The nonces of a request
                are always kept.
            recalibrate: set to False for many calls in a row, and call :meth:`recalibrate` after the last one.

        An error leaves the samples and the head unchanged. Raises RemovalError for an unknown id or subject, ValueError or
        GridError for samples that the head refuses, ValueError for a used event id with different content or with samples that
        were added again since, StoreError if the head was changed directly, StoreBusyError while another process writes, and
        StoreDiskError if the disk is full.
        """
        given = as_events(events)
        self._check_writable()
        whole = {event.event_id: event.subject for event in given if isinstance(event, Remove) and event.ids is None}
        if request is not None and not all(isinstance(event, Remove) for event in given):
            raise ValueError("a request goes with Remove events only")
        with self._db.held():
            with self.live.changing() as adapter:
                if any(isinstance(event, Add | Remove) for event in given):
                    self.suppression.opened()  # raises without the key
                if request is not None:
                    named = [i for event in given if isinstance(event, Remove) for i in event.ids or ()]
                    self.requests.check_erasure(request, whole.values(), named)
                work = self._transaction(adapter)
                results = work.apply(given)
                if work.erased:
                    self.requests.forget_texts(work.erased)
                for name, value in (notes or {}).items():
                    self._put_note(name, value)
                if request is not None or keep_receipt:
                    self.receipts.keep(work.done, request)
                if request is not None:
                    self.requests.note_erasure(request, work.done)
                    removed = [i for done in work.done for i in done.nonces]
                    self.suppression.enter(removed, [whole[e.event_id] for e in work.done if e.event_id in whole])
                digest = work.finish()
                if work.done and recalibrate:
                    self._calibrate_again()
            if work.done:
                erased = any(done.kind != "add" for done in work.done)
                self._acknowledge(sum(done.samples for done in work.done), erased)
        answers = [replace(result, digest=digest) if result.applied else result for result in results]
        return answers[0] if isinstance(events, EventBase) else answers

    def _transaction(self, adapter: HeadAdapter) -> Transaction:
        return Transaction(self.table, self._journal, adapter, self.suppression, self._source)

    def _check_writable(self) -> None:
        if self.readonly:
            raise StoreError(f"the store at {self.path} was opened for reading only")

    def _acknowledge(self, changed: int = 0, erased: bool = False) -> None:
        """Write the end of the journal to the witness and publish changed sums. Errors are logged: the events are durable."""
        state = self._db.get("state")
        try:
            self._witness.write(state["position"], bytes.fromhex(state["chain"]))
            if changed or erased:
                self.live.publish(changed, erased)
        except (OSError, StoreError) as error:
            log.warning("%s: the events are applied, but a file beside them is not written: %s", self.path, error)

    def without_held(self, event: Add, corrected: bool = False) -> Add | None:
        """Return the samples of an Add that the store does not hold yet, or None if the store holds all of them.

        A sample whose id is in the store is compared with the stored row, which stays unchanged. Features may differ by 1e-3 of
        the largest value of the row (TF32 has 10 bits) plus one step of the grid, because a network computes slightly different
        values in another batch. Raises ValueError with the first id whose features, label or subject differ. With
        ``corrected``, the label of a sample that was relabelled may differ, and a sample that was replaced may differ in all.
        """
        held = self.table.held(event.ids)
        if not held:
            return event
        known = [k for k, i in enumerate(event.ids) if i in held]
        rows, codec = self.get([event.ids[k] for k in known]), self.table.codec
        x, here = event.x[known].to("cpu", torch.float64), rows.x.to(torch.float64)
        step = 0.0 if codec.steps is None else codec.steps.resolution
        other_x = ~((x - here).abs().amax(1) <= step + 1e-3 * here.abs().amax(1)) if x.shape == here.shape else None
        last = {position: self._journal.at(position) for position in set(rows.positions)} if corrected else {}
        mine, theirs = (
            labels or targets or [] for labels, targets in map(codec.labels_and_targets, (event.y[known].cpu(), rows.y))
        )
        for at, k in enumerate(known):
            written = last.get(rows.positions[at])
            if written is not None and written.kind == "replace":
                continue
            differs = ["features"] if other_x is None or other_x[at] else []
            if mine[at] != theirs[at] and not (written is not None and written.kind == "relabel"):
                differs.append("label")
            if rows.subjects[at] != event.subjects[k]:
                differs.append("subject")
            if differs:
                raise ValueError(
                    f"the id {event.ids[k]!r} is in the store already and differs in {' and '.join(differs)}: relabel, replace "
                    "or remove it, or give the new sample another id. Nothing was changed."
                )
        new = [k for k, i in enumerate(event.ids) if i not in held]
        if not new:
            return None
        ids, subjects = [event.ids[k] for k in new], [event.subjects[k] for k in new]
        return Add(ids, event.x[new], event.y[new], subjects, event.fingerprint, event.event_id)

    def preview(self, events: Event | Iterable[Event], x: Any = None, y: Any = None) -> Preview:
        """Try events without keeping them, to count the predictions that would change and to compare accuracies.

        The events change a copy of the head, in a transaction that is rolled back.

        Args:
            events: an event, or several.
            x: (B, J), the points to predict. With ``targets="multilabel"``, each label of a point counts as a prediction. Not
                allowed with ``targets="regression"``, which has no accuracy.
            y: (B,) or (B, K), the labels of these points, for the accuracies.
        """
        given = as_events(events)
        self._check_writable()
        with self._db.held():
            self.live.required()
            self._db.begin()
            try:
                adapter = self.live.prepare()
                if x is not None and targets_of(adapter.head) == "regression":
                    raise ValueError(
                        'preview compares classes or labels on x, and targets="regression" has neither: omit x'
                    )
                before = predictions(adapter, x)
                trial = adapter.copy()
                work = self._transaction(trial)
                work.apply(given)
                work.finish()
                after = predictions(trial, x)
                samples, remaining = sum(done.samples for done in work.done), len(self.table)
            finally:
                self._db.roll_back()
                self.table.load_codec()
        flips = None
        if x is not None:
            flips = len(x) if before is None or after is None else int((before != after).sum())
        return Preview(samples, remaining, flips, *(accuracy(p, y, targets_of(adapter.head)) for p in (before, after)))

    # -- requests, receipts, and samples that stay erased ----------------------------------------------------------------

    def _journalize(self, event_id: str, kind: str, commitments: list[bytes], write: Callable[[], None]) -> None:
        """Append a journal entry that changes no sample, and write records in the same transaction."""
        self._check_writable()
        with self._db.held():
            with self._db.transaction():
                if self._journal.of(event_id) is not None:
                    raise ValueError(f"the id {event_id!r} was used before in the journal. Nothing was changed.")
                state = self._journal.append([(event_id, kind, commitments)], self._db.get("state")["digest"])
                write()
            self.live.step_over(state["position"])
            self._acknowledge()

    def use_suppression_list(self, path: str | os.PathLike[str]) -> list[str]:
        """Use a suppression list from now on; return the ids of samples in the store that are on the list.

        The file is created if it does not exist. A store cannot switch to a different list, but if you moved the file, call
        this method with the new path.
        """
        self._check_writable()
        with self._db.held():
            if self.suppression.path != str(Path(path).absolute()):
                with self._db.transaction():
                    self.suppression.bind(path)
            self.returned = self.suppression.compare(note=True)
            return self.returned

    def _warn_of_returned(self) -> None:
        """Warn of samples in the store that are on the suppression list.

        The samples are compared with the list only if the key is given, and only if the list has changed since the last
        comparison in which no sample was on it.
        """
        try:
            held = [] if self.suppression.compared else self.suppression.compare(note=not self.readonly)
        except (StoreError, ValueError) as error:
            told, held = f"cannot be compared with its suppression list ({error}).", []
        else:
            told = f"holds {counted(len(held), 'sample')} erased on request, the first is {held[0]!r}." if held else ""
        if told:
            warnings.warn(
                f"{self.path} {told} An old copy may have been put back, or an erasure was interrupted: torchlssvm "
                "suppression apply, or store.erase_returned(), erases these samples again.",
                SuppressedWarning,
                stacklevel=3,
            )
        self.returned = held

    erase = erase

    def erase_returned(self, **files: Any) -> Erasure | None:
        """Erase samples that are on the suppression list, after you restored an old copy of the store.

        Returns None if there are no such samples. ``files`` are ``receipt``, ``compact``, ``certificate`` and ``key``, as for
        :meth:`erase`. Raises StoreError without the key of the list.
        """
        self._check_writable()
        held = self.suppression.compare(note=True)
        done = self.erase(ids=held, **files) if held else None
        self.returned = self.suppression.compare(note=True) if held else []
        return done

    def readmit(self, subjects: Any = (), ids: Any = (), *, reason: str) -> int:
        """Remove names from the suppression list, so that the samples may be added again; return the number of names.

        Pass all names of a person, because an erasure by subject puts the subject and the ids of all its samples on the list.
        The journal records keyed hashes of the names under the kind "readmit". Raises ValueError if a name is not on the list.
        """
        owners, samples = name_list(subjects, "subject"), name_list(ids, "an id")
        if not owners and not samples:
            raise ValueError("name at least one subject or id")
        if not reason:
            raise ValueError("a return needs a reason: it is kept with the entry of the journal")
        check_free_text(reason, "reason", [*owners, *samples])
        with self._db.held():
            used, tags = self.suppression.required(), self.suppression.tags(samples, owners)
            missing = len(set(tags) - used.find(tags))
            if missing:
                raise ValueError(
                    f"{missing} of {len(tags)} names are not on the suppression list. Nothing was changed."
                )
            event_id = f"readmission-{new_event_id()}"
            note = {"time": now(), "reason": reason, "names": len(tags)}
            self._journalize(event_id, "readmit", tags, lambda: self._db.put(READMISSION_PREFIX + event_id, note))
            used.withdraw(tags)
            return len(tags)

    def receipt(self, event_ids: str | Sequence[str]) -> ErasureReceipt:
        """Return the receipt of erasures, all of one request or of none. Raises StoreError after a compaction removed it."""
        event_ids = [self.recorded_id(event_id) for event_id in name_list(event_ids, "event_ids")]
        with self.view():
            belongs = {record["request"] for e, record in self.receipts.all().items() if e in event_ids}
            if len(belongs) > 1:
                raise ValueError(
                    "these erasures do not all belong to one request. Write a separate receipt for each request or event "
                    "(receipt --request R, receipt --event E)"
                )
            name = next(iter(belongs), None)
            if name is None:
                return self.receipts.make(event_ids, None)
            request = self.requests.get(name)
            recorded = request.for_receipt(self.recorded_id(request.id), self.requests.still_held(request))
            return self.receipts.make(event_ids, recorded)

    def write_receipt(
        self, event_ids: str | Sequence[str], path: str | os.PathLike[str], earlier: ErasureReceipt | None = None
    ) -> ErasureReceipt:
        """Write the receipt of erasures to a new file outside the store, and record that it was written.

        If the file contains a receipt of the same request, pass it as ``earlier``. The file is then replaced with a receipt of
        both.
        """
        own = self.receipt(event_ids)
        made = own if earlier is None else own.with_earlier(earlier)
        made.save(path, overwrite=earlier is not None)
        sync_folder(Path(path).absolute().parent)
        with self._db.transaction():
            self.receipts.mark_written(event["event_id"] for event in own.events)
        return made

    # -- erasing the bytes ---------------------------------------------------------------------------------------------

    def compact(self) -> Compaction:
        """Destroy the remaining bytes of erased samples in all files of the store.

        A compaction:

        - removes the kept receipts, and raises StoreError if one of them has not been written to a file;
        - replaces the names in requests with commitments, and destroys the keys of commitments to earlier states;
        - deletes the notes of events that were applied and watch their subject until a run ends;
        - chooses rho again if it is chosen automatically, because erased samples have influenced the old value;
        - renumbers the rows, rewrites the database, empties the log and saves the statistics;
        - removes older snapshots, the ``*.until-compaction`` files of other modules, and unfinished files that a crash left.

        Raises StoreBusyError while a reader is open, because the log cannot be emptied then. Until a compaction succeeds,
        certificates contain ``compacted: false``.
        """
        self._check_writable()
        with self._db.held(), threads_for(0):
            self.live.required()
            self.refresh()
            with self.live.changing():
                self.receipts.clear()
                self.requests.forget_names()
                for name, note in self.notes(WAITING_NOTE_PREFIX).items():
                    if isinstance(note, dict) and note.get("on_watch"):  # it was applied, and names the subject
                        self._put_note(name, None)
                self._journal.destroy_openings()
                self.table.renumber()
            self._db.run("VACUUM")
            if not self._db.truncate_log():
                raise StoreBusyError(
                    f"{self.path} is not compacted: a reader has it open and keeps the log, which may hold erased samples. "
                    "Close it and compact again."
                )
            position = self.live.position
            with self._db.transaction():
                if self._db.get("state")["position"] != position:
                    raise StoreBusyError(
                        f"{self.path} is not compacted: another process wrote meanwhile. Compact again."
                    )
                old = self.live.snapshots.names_before(position)
                self.live.write_snapshot()
                left = [p for pattern in LEFTOVERS for p in self.path.glob(pattern)]
                self.live.snapshots.remove([p for p in (*(self.path / name for name in old), *left) if p.exists()])
                self._db.put("compacted", position)
                self.requests.note_compaction()
            if isinstance(self.live.adapter, LinearAdapter):
                self.head.refresh()  # updated weights contain rounding errors of erased samples
            return Compaction(position, old, self.certificates.checkpoints_before(position))

    # -- backup --------------------------------------------------------------------------------------------------------

    def backup(self, path: str | os.PathLike[str]) -> Path:
        """Copy the store at one position to a new folder, while this and other processes continue to use the store.

        The copy still contains samples that you erase later. Certificates of later erasures therefore name the copy for as long
        as it exists. Restore it only with :meth:`from_backup`, which erases those samples again.
        """
        target = check_folder(path)
        if os.path.lexists(target):
            raise StoreError(f"{target} exists already, and a backup never overwrites a folder")
        refuse_in_store(target)
        target.mkdir(mode=0o700, parents=True)
        try:
            with self._db.held():
                self._db.copy_to(target / DATABASE_FILE)
            with contextlib.closing(Database(target / DATABASE_FILE, False)) as copy:
                state = copy.get("state")
            witness = Witness(target / WITNESS_FILE)
            witness.create()
            witness.write(state["position"], bytes.fromhex(state["chain"]))
            sync_folder(target)
            if not self.readonly:
                self.register_checkpoint(target, state["position"])
        except BaseException:
            shutil.rmtree(target)  # no incomplete copy stays, and the call can be repeated
            raise
        return target

    @classmethod
    def from_backup(
        cls,
        backup: str | os.PathLike[str],
        path: str | os.PathLike[str],
        *,
        suppression_key: Any = None,
        suppression_list: str | os.PathLike[str] | None = None,
        **files: Any,
    ) -> tuple[Path, Erasure | None]:
        """Create a store in a new folder from a backup, and erase the samples that were erased on request since the backup.

        Args:
            backup: a folder that :meth:`backup` wrote. It is not changed.
            path: the new folder.
            suppression_key: the key of the suppression list. A backup of a store with a list is refused without the key.
            suppression_list: the path of the list, if the list was moved.
            files: ``receipt``, ``compact``, ``certificate`` and ``key``, as for :meth:`erase`, for the repeated erasure.

        Returns: the new folder, and the erasure that was repeated, or None if there was nothing to erase.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SuppressedWarning)  # what the warning asks for is done here
            with cls(backup, readonly=True, suppression_key=suppression_key) as old:
                if old.suppression.path is not None and not old.suppression.has_key:
                    raise StoreError(f"{backup} uses a suppression list: pass its key, to keep erased people out")
                if old.suppression.path is None and old.suppression.has_key and suppression_list is None:
                    raise StoreError(
                        f"a suppression key is given, and {backup} has no suppression list or is older than it: give the list "
                        "with suppression_list= or --list, to keep erased people out. If there is no list, restore without the "
                        f"key, and unset {KEY_VARIABLE}."
                    )
                target = old.backup(path)
            try:
                with cls(target, suppression_key=suppression_key, suppression_list=suppression_list) as store:
                    again = store.erase_returned(**files) if store.suppression.path is not None else None
            except BaseException:
                shutil.rmtree(target)
                raise
        return target, again

    # -- certificates and their verification ---------------------------------------------------------------------------

    def register_checkpoint(self, path: Any, position: int | None = None) -> None:
        """Record that a file contains the current head. Certificates list the file if it is older than an erasure.

        If the file contains an earlier state of the head, pass the journal ``position`` of that state.
        """
        self.certificates.register(path, self.head_position if position is None else position)

    def certificate(
        self, event_id: str | Sequence[str], key: Any = None, choices: dict[str, str] | None = None
    ) -> Certificate:
        """Issue a certificate of one or more events, for the current state of the store.

        Pass an Ed25519 key (see :func:`torchlssvm.audit.private_key`) as ``key`` to sign the certificate. Pass other choices
        that you made from data as ``choices``, e.g. ``{"calibration": "made again", "landmarks": "unchanged"}``.
        """
        self.refresh()
        wanted = dict.fromkeys(self.recorded_id(name) for name in name_list(event_id, "event_id"))
        with self.view():
            self._db.check_place()
            adapter = self.live.follow()
            if adapter.touched:
                raise StoreError("the head was changed behind the store's back: store.restore() brings it back")
            requests = [request.for_certificate() for request in self.requests.answered_by(wanted)]
            certificate = self.certificates.issue(wanted, adapter.head, choices or {}, requests)
        return certificate if key is None else sign(certificate, key)

    def opening(self, position: int | None = None) -> Opening | None:
        """Return the opening of the commitment to a state, by default the current one; None if the opening is destroyed.

        Give the opening only to a verifier who must check a head without the store, because anybody who has the opening and
        the remaining samples can test guesses about samples that are erased later (:class:`~torchlssvm.audit.Opening`).
        """
        with self.view():
            at = self.position if position is None else position
            if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at <= self.position:
                raise ValueError(f"position must be an integer from 0 to {self.position}; got {position!r}")
            key = self._journal.opening(at)
            return None if key is None else Opening(self._journal.chain_at(at).hex(), key.hex())

    def check_structure(self) -> None:
        """Let SQLite check the whole file. Raises StoreError if a page, a row or an index is damaged."""
        self._db.check_structure()

    def recompute(self, entries: Sequence[Entry] | None = None, fast: bool = False) -> tuple[int, str | None]:
        """Recompute the sums of all rows; return the number of rows and the digest.

        Raises StoreError unless the rows are exactly the samples that the journal records as added and not removed since, and
        the id and nonce of each row match a different commitment. Pass ``entries``, the result of :meth:`history`, if you
        already have it. ``fast`` does not sum the rows again but compares the sums of the head with the rows by Freivalds'
        test, and raises StoreError if they differ.
        """
        with self.view(), torch.inference_mode(False), torch.no_grad():
            self._db.check_structure()
            held = commitments_held(self.history() if entries is None else entries)
            count, digest, batches = len(held), None, self._committed_rows(held)
            adapter = self.live.follow() if fast else self.live.adapter
            self.table.load_codec()
            if isinstance(adapter, LinearAdapter):
                digest = adapter.check_sums(batches) if fast else adapter.sum_anew(batches, self.table.codec)
            for _ in batches:  # the machine has no sums; reading the rows still checks them
                continue
            if held:
                raise StoreError(f"{counted(len(held), 'sample')} of the journal not found among the rows")
            return count, digest

    def _committed_rows(self, held: set[bytes]) -> Iterator[StoredRows]:
        """Yield all rows, and remove their commitments from ``held``. Raises StoreError for a row without a commitment."""
        for rows in self.table.batches():
            found = rows.commitments
            if not held.issuperset(found):
                k = next(k for k, commitment in enumerate(found) if commitment not in held)
                raise StoreError(
                    "a sample that was erased is among the rows, or an id or nonce was altered: "
                    f"row {rows.seq[k]} is not in the journal"
                )
            held.difference_update(found)
            yield rows


def check_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a store. Raises StoreError for an address such as s3://bucket."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):
        raise StoreError(f"a store must be a local folder, but {os.fspath(path)} is an address. Nothing was written.")
    return Path(path)


def as_events(events: Event | Iterable[Event]) -> list[Event]:
    """Return the events as a list. Raises ValueError if an item is not an event."""
    given = [events] if isinstance(events, EventBase) else list(events)
    for event in given:
        if not isinstance(event, EventBase):
            raise ValueError(f"apply takes Add, Remove, Relabel and Replace events, got {type(event).__name__}")
    return given


def file_sizes(folder: Path) -> Iterator[int]:
    """The sizes of a folder's files, which other processes may add and remove at the same time."""
    for path in folder.iterdir():
        try:
            if path.is_file():
                yield path.stat().st_size
        except FileNotFoundError:
            continue


@torch.no_grad()
def predictions(adapter: HeadAdapter, x: Any) -> Tensor | None:
    """Predicted classes; None if there are no inputs, or the head is empty."""
    if x is None or adapter.empty:
        return None
    found: Tensor = adapter.head.predict(x if isinstance(x, Tensor) else as_tensor(x, "x", CPU))
    return found


def accuracy(predicted: Tensor | None, y: Any, targets: str) -> float | None:
    """The fraction of correct predictions; None without predictions or labels. ValueError for labels of another shape."""
    if predicted is None or y is None:
        return None
    return float((predicted == truth(y, predicted, targets)).double().mean())


def _readable(option: Any) -> str:
    """An option of a head as an error message shows it: a grid as the FixedPoint it stands for."""
    try:
        return repr(grid_from_json(option) if isinstance(option, list) else option)
    except (ValueError, TypeError, IndexError):  # a list of something else
        return repr(option)
