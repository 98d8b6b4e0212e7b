"""A suppression list: a file that records who was erased on request, readable only with its key.

An entry is HMAC-SHA-256(key, "torchlssvm-suppression-1" || 0 || kind || 0 || name), where kind is "id" or "subject". Without
the key, nobody can test a guess against an entry. The name is in Unicode's form NFC, so that the same name typed on another
machine gives the same entry. The order of the file does not reveal the order of erasures. Several stores may share a list,
which is kept outside the store, so that restoring an old copy of the store does not restore an old list.

A store that uses a list has a record "suppression". The record names the list, and its field ``head`` is the end of the list's
chain of changes when the store last wrote to it. The store can thus detect a different list or an older copy. The field
``clean`` is the end of the chain when no sample of the store was on the list. Samples added later are compared with the list
when they are added. All samples are therefore compared again only if the list has changed since. This happens if an old copy of
the store was restored, an erasure was interrupted, or another store made entries.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import sqlite3
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from torchlssvm.audit.documents import write_private
from torchlssvm.errors import StoreBusyError, StoreError, SuppressedError
from torchlssvm.events import Add
from torchlssvm.files import refuse_in_store, replacement
from torchlssvm.functional.checks import one_of
from torchlssvm.store.database import Database, rows_in, store_error
from torchlssvm.store.sample_table import SampleTable
from torchlssvm.untrusted import check_regular, read_regular

KEY_VARIABLE = "TORCHLSSVM_SUPPRESSION_KEY"
"""The environment variable with the key, as 64 hex digits or as the path of its file."""

KEY_FORMAT = "torchlssvm-suppression-key-1"
KEY_DIGITS = re.compile("[0-9a-fA-F]{64}")
"""A key: 32 bytes, as many as SHA-256 has."""

LIST_FORMAT = "torchlssvm-suppression-1"
LIST_APPLICATION_ID = 0x746C7370
"""The letters "tlsp": they mark an SQLite file as a suppression list."""

LIST_TABLES = """
CREATE TABLE list (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE entries (tag BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE heads (head BLOB PRIMARY KEY) WITHOUT ROWID;
"""


def new_suppression_key(path: str | os.PathLike[str]) -> Path:
    """Write a new key to a file that only its owner can read. FileExistsError if it exists, ValueError inside a store."""
    write_private(path, f"{KEY_FORMAT} {secrets.token_hex(32)}\n".encode())
    return Path(path)


def suppression_key(given: Any = None) -> bytes | None:
    """Read a key from 32 bytes, 64 hex digits, a file or (default) TORCHLSSVM_SUPPRESSION_KEY; None if that is not set."""
    if given is None:
        given = os.environ.get(KEY_VARIABLE) or None
        if given is None:
            return None
    if isinstance(given, bytes) and len(given) == 32:
        return given
    if isinstance(given, str) and KEY_DIGITS.fullmatch(given):
        return bytes.fromhex(given)
    if not isinstance(given, str | os.PathLike):
        raise ValueError("a suppression key is 32 bytes, 64 hex digits or a file with them")
    refuse_in_store(Path(given))
    try:
        name, _, digits = read_regular(given, 4096).decode("ascii").strip().partition(" ")
    except UnicodeDecodeError:
        name = digits = ""
    if name != KEY_FORMAT or not KEY_DIGITS.fullmatch(digits):
        raise ValueError(f"{os.fspath(given)} holds no suppression key: torchlssvm keygen --suppression FILE makes one")
    return bytes.fromhex(digits)


class SuppressionList:
    """The entries of one file, read and written with the controller's key. The file is closed between two calls.

    Args:
        path: the file, which :meth:`create` creates.
        key: 32 bytes (:func:`~torchlssvm.store.suppression_key`). A wrong key raises StoreError.

    >>> import tempfile
    >>> listed = SuppressionList.create(Path(tempfile.mkdtemp()) / "erased.list", bytes(32))
    >>> tags = [listed.tag("subject", "u42"), listed.tag("id", "photo-7")]
    >>> _, head = listed.enter(tags[:1])
    >>> len(listed), [tag in listed.find(tags) for tag in tags], listed.extends(head)
    (1, [True, False], True)
    """

    def __init__(self, path: str | os.PathLike[str], key: bytes):
        self.path, self._key = Path(path).absolute(), key
        with self._connected() as connection:
            found = dict(connection.execute("SELECT name, value FROM list").fetchall())
        if found.get("format") != LIST_FORMAT or not {"list", "check", "head", "sum"} <= set(found):
            raise StoreError(f"{self.path} is damaged, or a suppression list of another version")
        if not hmac.compare_digest(found["check"], self._check_value()):
            raise StoreError(
                f"this is not the key of the suppression list {self.path}: the list cannot be read with it"
            )
        self.name: str = found["list"]
        """The random name of the list, by which a store knows it."""

    @classmethod
    def create(cls, path: str | os.PathLike[str], key: bytes) -> SuppressionList:
        """Create an empty list. Raises StoreError if the file exists, and ValueError if the path is inside a store."""
        place = Path(path).absolute()
        refuse_in_store(place)
        if os.path.lexists(place):
            raise StoreError(f"{place} exists already, and a suppression list is never overwritten")
        made = cls.__new__(cls)
        made._key = key
        values = {"format": LIST_FORMAT, "list": secrets.token_hex(16), "check": made._check_value()}
        with replacement(place, private=True) as made.path, made._connected(new=True) as connection:
            connection.execute(f"PRAGMA application_id = {LIST_APPLICATION_ID}")
            connection.executescript(LIST_TABLES)
            start = made._link(b"", "", [values["list"].encode()])
            rows = (values | {"head": start.hex(), "sum": "0"}).items()
            connection.executemany("INSERT INTO list VALUES (?, ?)", rows)
            connection.execute("INSERT INTO heads VALUES (?)", (start,))
        return cls(place, key)

    @staticmethod
    def head_of(path: str | os.PathLike[str]) -> bytes:
        """The end of the chain of changes of a list. The key is not needed to read it."""
        found = SuppressionList.__new__(SuppressionList)
        found.path = Path(path).absolute()
        return found.head

    @contextlib.contextmanager
    def _connected(self, new: bool = False) -> Iterator[sqlite3.Connection]:
        """Open the file for one operation. SQLite's errors are raised as StoreErrors that name the file."""
        try:
            check_regular(self.path)
        except ValueError as error:
            raise StoreError(f"{error}: this is no suppression list") from None
        if not self.path.exists():
            raise StoreError(
                f"the suppression list {self.path} is missing, and without it nobody can tell who was erased. Put it back, "
                "or pass its new path: torchlssvm suppression use STORE --list FILE"
            )
        try:
            uri = f"{self.path.as_uri()}?mode=rw"
            with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)) as connection:
                connection.execute("PRAGMA synchronous = EXTRA")  # FULL does not sync the folder when a log is deleted
                connection.execute("PRAGMA secure_delete = ON")
                connection.execute("PRAGMA trusted_schema = OFF")
                if not new and connection.execute("PRAGMA application_id").fetchone()[0] != LIST_APPLICATION_ID:
                    raise StoreError(f"{self.path} is no suppression list")
                yield connection
        except sqlite3.Error as error:
            raise store_error(error, self.path, "suppression list") from error

    def _check_value(self) -> str:
        return hmac.digest(self._key, f"{LIST_FORMAT}\0check".encode(), "sha256").hex()

    def tag(self, kind: str, name: str) -> bytes:
        """The entry for an id or a subject."""
        text = f"{LIST_FORMAT}\0{kind}\0{unicodedata.normalize('NFC', name)}"
        return hmac.digest(self._key, text.encode(), "sha256")

    # -- reading -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        with self._connected() as connection:
            return int(connection.execute("SELECT count(*) FROM entries").fetchone()[0])

    @property
    def head(self) -> bytes:
        """The end of the chain of changes. Each link is an HMAC of a change and of the link before it."""
        with self._connected() as connection:
            return bytes.fromhex(self._value(connection, "head"))

    def _value(self, connection: sqlite3.Connection, name: str) -> str:
        return str(connection.execute("SELECT value FROM list WHERE name = ?", (name,)).fetchone()[0])

    def extends(self, head: bytes) -> bool:
        """True if the chain once ended in ``head``. This is never true of an older copy, even if it got new entries."""
        with self._connected() as connection:
            return connection.execute("SELECT 1 FROM heads WHERE head = ?", (head,)).fetchone() is not None

    def _link(self, head: bytes, change: str, tags: Iterable[bytes]) -> bytes:
        """The end of the chain after entries are added ("+") or withdrawn ("-")."""
        return hmac.digest(self._key, b"".join([f"{LIST_FORMAT}\0{change}\0".encode(), head, *sorted(tags)]), "sha256")

    def find(self, tags: Sequence[bytes]) -> set[bytes]:
        """Return the given entries that are on the list."""
        with self._connected() as connection:
            return {row[0] for row in rows_in(connection.execute, "SELECT tag FROM entries WHERE tag", tags)}

    def check_structure(self) -> None:
        """Raise StoreError if the file is truncated, a page is damaged, or an entry is missing or altered."""
        with self._connected() as connection:
            connection.execute("BEGIN")  # read one consistent state, even while another process writes
            found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
            same = sum_of(row[0] for row in connection.execute("SELECT tag FROM entries")) == int(
                self._value(connection, "sum")
            )
            pages, size = (connection.execute(f"PRAGMA page_{name}").fetchone()[0] for name in ("count", "size"))
            whole = self.path.stat().st_size == pages * size
        if found != "ok" or not whole or not same:
            raise StoreError(
                f"{self.path} is damaged: {'its entries are not those that were made' if whole else 'it is cut short'}; "
                f"structure: {found}. Restore an undamaged copy."
            )

    @property
    def mark(self) -> tuple[int, int, int]:
        """A value that changes whenever the file is changed or replaced."""
        found = self.path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

    # -- writing -------------------------------------------------------------------------------------------------------

    def enter(self, tags: Iterable[bytes]) -> tuple[bytes, bytes]:
        """Add entries, which are durable when this returns; return :attr:`head` before and after."""
        return self._change("INSERT OR IGNORE INTO entries VALUES (?)", 1, tags)

    def withdraw(self, tags: Iterable[bytes]) -> tuple[bytes, bytes]:
        """Remove entries from the list; return :attr:`head` before and after."""
        return self._change("DELETE FROM entries WHERE tag = ?", -1, tags)

    def _change(self, sql: str, sign: int, tags: Iterable[bytes]) -> tuple[bytes, bytes]:
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            changed = [tag for tag in tags if connection.execute(sql, (tag,)).rowcount]
            before = head = bytes.fromhex(self._value(connection, "head"))
            if changed:
                head = self._link(head, "+" if sign > 0 else "-", changed)
                connection.execute("INSERT INTO heads VALUES (?)", (head,))
                total = sum_of(changed, sign, int(self._value(connection, "sum")))
                values = [(head.hex(), "head"), (str(total), "sum")]
                connection.executemany("UPDATE list SET value = ? WHERE name = ?", values)
            connection.execute("COMMIT")
            return before, head


def sum_of(tags: Iterable[bytes], sign: int = 1, start: int = 0) -> int:
    """The sum of all entries of 256 bits, which reveals a missing or altered entry."""
    return (start + sign * sum(int.from_bytes(tag, "big") for tag in tags)) % 2**256


SUPPRESSION_RECORD = "suppression"
"""Record of a store that uses a list."""


class Suppression:
    """The suppression list of one store, if it has one.

    Args:
        db, table: the parts of the store.
        key: see :func:`~torchlssvm.store.suppression_key`.
        choice: how to treat an Add with samples that were erased on request: "refuse" the whole event, or "skip" these samples.
    """

    def __init__(self, db: Database, table: SampleTable, key: Any, choice: str):
        self.db, self.table = db, table
        self.choice: str = one_of(choice, "erased", ("refuse", "skip"))
        self._given = key
        self._checked: tuple[int, int, int] | None = None  # the state of the list file when all of it was last read

    @property
    def path(self) -> str | None:
        """The file of the list; None if the store uses no list."""
        record = self._record()
        return None if record is None else record["path"]

    @property
    def has_key(self) -> bool:
        """True if a key was given. The key itself is not checked."""
        return suppression_key(self._given) is not None

    def _record(self) -> Any:
        return self.db.get(SUPPRESSION_RECORD, None)

    def required(self) -> SuppressionList:
        """Return the list like :meth:`opened`. Raises StoreError if the store uses no list."""
        used = self.opened()
        if used is None:
            raise StoreError(f"{self.db.path.parent} uses no suppression list")
        return used

    def opened(self) -> SuppressionList | None:
        """The list; None if the store uses no list. StoreError if its key is missing or wrong, or the list is an older copy."""
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
        if mark != self._checked:  # check each state of the file once: a damaged entry would admit an erased sample
            found.check_structure()
            self._checked = mark
        return found

    def bind(self, path: str | os.PathLike[str]) -> SuppressionList:
        """Use a list from now on, inside a transaction. A missing list is created. StoreError if a different list is in use."""
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
        """Raise StoreError if a list is not the recorded one, or lacks changes that the store has seen."""
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
        """Return an Add without erased samples, and their ids. SuppressedError if such events are to be refused."""
        out = self.erased(event.ids, event.subjects)
        left_out = [i for i, gone in zip(event.ids, out, strict=True) if gone]
        if not left_out:
            return event, []
        if self.choice == "refuse":
            error = SuppressedError(
                f"{len(left_out)} of {len(out)} samples were erased on request and stay erased, the first is {left_out[0]!r}. "
                "Leave them out, or let them be skipped (--erased skip, erased='skip'). torchlssvm readmit allows a lawful "
                "return. Nothing was changed."
            )
            error.ids = left_out
            raise error
        keep = [k for k, gone in enumerate(out) if not gone]
        if not keep:
            return None, left_out
        ids, subjects = [event.ids[k] for k in keep], [event.subjects[k] for k in keep]
        return Add(ids, event.x[keep], event.y[keep], subjects, event.fingerprint, event.event_id), left_out

    def enter(self, ids: Sequence[str], subjects: Sequence[str]) -> None:
        """Enter removed samples, and subjects that were removed completely. The entries are durable when this returns.

        This method is called before the removals commit. If the commit fails, the entries stay, and the removals must be
        repeated.
        """
        used = self.opened()
        if used is None:
            return
        before, head = used.enter(self.tags(ids, subjects))
        clean = self._record()["clean"]
        self._note(used, head, head.hex() if clean == before.hex() else clean)

    def held(self) -> list[str]:
        """The ids of stored samples that are on the list, after an interrupted erasure or the restoration of an old copy."""
        found: list[str] = []
        for ids, subjects in self.table.names():
            found += [i for i, gone in zip(ids, self.erased(ids, subjects), strict=True) if gone]
        return found

    @property
    def compared(self) -> bool:
        """True if no sample was on the list at the last comparison, and the list has not changed since."""
        record = self._record()
        return record is None or SuppressionList.head_of(record["path"]).hex() == record["clean"]

    def compare(self, note: bool) -> list[str]:
        """Return :meth:`held`. StoreError without a list. ``note`` records that no sample is held, which saves time later."""
        head, held = self.required().head, self.held()
        if note and not held:
            with contextlib.suppress(StoreBusyError), self.db.transaction():
                self.db.put(SUPPRESSION_RECORD, self._record() | {"clean": head.hex()})
        return held

    # -- lawful return -------------------------------------------------------------------------------------------------

    def tags(self, ids: Sequence[str], subjects: Sequence[str]) -> list[bytes]:
        """The entries for ids and subjects. Raises StoreError without a list."""
        used = self.required()
        return [used.tag("id", i) for i in ids] + [used.tag("subject", s) for s in subjects]

    def names_listed(self, ids: Sequence[str], subjects: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the given ids and subjects that are on the list. Raises StoreError without a list."""
        tags = self.tags(ids, subjects)
        found = self.required().find(tags)
        on = [tag in found for tag in tags]
        return list(compress(ids, on)), list(compress(subjects, on[len(ids) :]))
