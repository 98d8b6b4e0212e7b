"""A store's use of a suppression list: samples that were erased on request stay out.

The record "suppression" of a store names the list and the end of its chain of changes when the store last wrote to it
(``head``), so that another list, or an older copy, is noticed. ``clean`` is the end of the chain when no sample of the store
was on the list. What is added later is compared with the list. So all samples are compared only when the list has changed
since: an old copy of the store was put back, an erasure was interrupted, or another store has made entries. The record does
not hold the key.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from torchlssvm.errors import StoreBusyError, StoreError, SuppressedError
from torchlssvm.events import Add
from torchlssvm.store.database import Database
from torchlssvm.store.erasure.suppression_list import KEY_VARIABLE, SuppressionList, suppression_key
from torchlssvm.store.sample_table import SampleTable

if TYPE_CHECKING:
    from torchlssvm.store.transaction import AppliedEvent

SUPPRESSION_CHOICES = ("refuse", "skip")
"""How to treat an Add with erased samples: refuse the whole event, or skip those samples and learn the rest."""

SUPPRESSION_RECORD = "suppression"
"""Record of a store that uses a list."""


class Suppression:
    """The suppression list of one store, if it has one.

    Args:
        db, table: of the store.
        key: see :func:`~torchlssvm.store.erasure.suppression_list.suppression_key`.
        choice: "refuse" or "skip".
    """

    def __init__(self, db: Database, table: SampleTable, key: Any, choice: str):
        if choice not in SUPPRESSION_CHOICES:
            raise ValueError(f"erased must be one of {', '.join(map(repr, SUPPRESSION_CHOICES))}; got {choice!r}")
        self.db, self.table, self.choice = db, table, choice
        self._given = key
        self._checked: tuple[int, int, int] | None = None  # the file of the list when all of it was last read

    @property
    def path(self) -> str | None:
        """The file of the list; None if the store uses none."""
        record = self._record()
        return None if record is None else record["path"]

    @property
    def has_key(self) -> bool:
        """True if a key was given. The key is not checked."""
        return suppression_key(self._given) is not None

    def _record(self) -> Any:
        return self.db.get(SUPPRESSION_RECORD, None)

    def required(self) -> SuppressionList:
        """The list, as :meth:`opened` returns it; StoreError if the store uses none."""
        used = self.opened()
        if used is None:
            raise StoreError(f"{self.db.path.parent} uses no suppression list")
        return used

    def opened(self) -> SuppressionList | None:
        """The list, None if the store uses none; StoreError if its key is not given or wrong, or the list is an older copy."""
        record = self._record()
        if record is None:
            return None
        key = suppression_key(self._given)
        if key is None:
            raise StoreError(
                f"{self.db.path.parent} uses a suppression list, so nothing is added or erased without its key: give the key "
                f"(--suppression-key FILE, suppression_key=...) or set {KEY_VARIABLE}. Nothing was changed."
            )
        found = SuppressionList(record["path"], key)
        self._check_list(found, record)
        mark = found.mark
        if mark != self._checked:  # once for each state of the file: a damaged entry would let an erased sample in
            found.check_structure()
            self._checked = mark
        return found

    def bind(self, path: str | os.PathLike[str]) -> SuppressionList:
        """Use a list from now on, inside a transaction; it is made if it is not there. StoreError if another one is in use."""
        key, record = suppression_key(self._given), self._record()
        if key is None:
            raise StoreError(
                "a suppression list needs a key: torchlssvm keygen --suppression FILE makes one. Give it, or set "
                f"{KEY_VARIABLE}"
            )
        if record is None and not os.path.lexists(path):
            found = SuppressionList.create(path, key)
        else:
            found = SuppressionList(path, key)
        if record is not None:
            self._check_list(found, record)
        self._note(found, found.head, "" if record is None else record["clean"])
        return found

    def _check_list(self, found: SuppressionList, record: dict[str, str]) -> None:
        """StoreError if a list is not the one of the record, or lacks changes that the store has seen."""
        if found.name != record["list"]:
            raise StoreError(f"{found.path} is not the suppression list of {self.db.path.parent}, but another one")
        if not found.extends(bytes.fromhex(record["head"])):
            raise StoreError(
                f"{found.path} is an older copy of the suppression list of {self.db.path.parent}: entries are missing in it. "
                "Restore the newer copy."
            )

    def _note(self, used: SuppressionList, head: bytes, clean: str) -> None:
        record = {"path": str(used.path), "list": used.name, "head": head.hex(), "clean": clean}
        self.db.put(SUPPRESSION_RECORD, record)

    # -- keeping samples out -------------------------------------------------------------------------------------------

    def erased(self, ids: Sequence[str], subjects: Sequence[str | None]) -> list[bool]:
        """For each sample, True if its id or its subject was erased on request. All False if the store has no list."""
        used = self.opened()
        if used is None:
            return [False] * len(ids)
        by_id = [used.tag("id", i) for i in ids]
        by_subject = {s: used.tag("subject", s) for s in set(subjects) if s is not None}
        found = used.find([*by_id, *by_subject.values()])
        gone = {s for s, tag in by_subject.items() if tag in found}
        return [tag in found or s in gone for tag, s in zip(by_id, subjects, strict=True)]

    def screen(self, event: Add) -> tuple[Add | None, list[str]]:
        """An Add without the samples that were erased, and their ids; SuppressedError if such an event is to be refused."""
        out = self.erased(event.ids, event.subjects)
        left_out = [i for i, gone in zip(event.ids, out, strict=True) if gone]
        if not left_out:
            return event, []
        if self.choice == "refuse":
            raise SuppressedError(
                f"{len(left_out)} of {len(out)} samples were erased on request and stay erased, the first is {left_out[0]!r}. "
                "Leave them out, or let them be skipped (--erased skip, erased='skip'). torchlssvm readmit allows a lawful "
                "return. Nothing was changed."
            )
        keep = [k for k, gone in enumerate(out) if not gone]
        if not keep:
            return None, left_out
        ids, subjects = [event.ids[k] for k in keep], [event.subjects[k] for k in keep]
        return Add(ids, event.x[keep], event.y[keep], subjects, event.fingerprint, event.event_id), left_out

    def enter(self, done: Iterable[AppliedEvent]) -> None:
        """Enter removed samples in the list; the entries are on the disk when this returns.

        A removal by ids enters the ids; a removal by subject enters the subject and the ids of its samples. Called before the
        removals commit. If the commit fails, the entries stay: repeat the removals.
        """
        used = self.opened()
        if used is None:
            return
        tags: list[bytes] = []
        for removal in done:
            tags += [used.tag("id", i) for i in removal.ids]
            if removal.event.ids is None:
                tags.append(used.tag("subject", removal.event.subject))
        before, head = used.enter(tags)
        clean = self._record()["clean"]
        self._note(used, head, head.hex() if clean == before.hex() else clean)

    def held(self) -> list[str]:
        """The ids of samples that are held although they are on the list: an erasure was interrupted, or a copy put back."""
        found: list[str] = []
        for ids, subjects in self.table.names():
            found += [i for i, gone in zip(ids, self.erased(ids, subjects), strict=True) if gone]
        return found

    @property
    def compared(self) -> bool:
        """True if no sample was on the list when they were last compared, and the list has not changed since."""
        record = self._record()
        return record is None or SuppressionList.head_of(record["path"]).hex() == record["clean"]

    def compare(self, note: bool) -> list[str]:
        """Return :meth:`held`; StoreError without a list. ``note``: write down if no sample is held, which saves time later."""
        head, held = self.required().head, self.held()
        if note and not held:
            with contextlib.suppress(StoreBusyError), self.db.transaction():
                self.db.put(SUPPRESSION_RECORD, self._record() | {"clean": head.hex()})
        return held

    # -- lawful return -------------------------------------------------------------------------------------------------

    def tags(self, ids: Sequence[str], subjects: Sequence[str]) -> list[bytes]:
        """The entries of ids and subjects; StoreError without a list."""
        used = self.required()
        return [used.tag("id", i) for i in ids] + [used.tag("subject", s) for s in subjects]

    def names_listed(self, ids: Sequence[str], subjects: Sequence[str]) -> tuple[list[str], list[str]]:
        """Those of the ids and subjects that are on the list; StoreError without one."""
        tags = self.tags(ids, subjects)
        found = self.required().find(tags)
        on = [tag in found for tag in tags]
        return list(compress(ids, on)), list(compress(subjects, on[len(ids) :]))
