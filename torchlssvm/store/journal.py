"""The journal: a hash chain of all changes to a store that reveals nothing about the people in it.

An entry contains the id, kind, time and number of samples of an event. It also contains a commitment SHA-256(nonce || id) for
each sample, and an HMAC of the digest after the event. The commitments are sorted, so that they do not reveal the order of the
samples. The nonces are stored in the samples' rows and are deleted with them. People write names into event ids, or hashes of
names, so every id is recorded as a hash under a key of the store (:meth:`Journal.recorded_id`). Each position has its own HMAC
key, and compaction destroys the keys of past positions. An erasure therefore rewrites no entry, and afterwards nobody can use
the journal to test a guess about an erased sample. Certificates publish the HMAC.

    chain_p = SHA-256(chain_{p-1} || canonical JSON of {"commitments": SHA-256 of all of them as hex, "event_id", "kind",
              "mac": hex or null, "position": p, "samples", "time"}),      chain_0 = 32 zero bytes
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from torchlssvm.canonical_json import canonical
from torchlssvm.errors import StoreError
from torchlssvm.events import EVENT_CLASSES, check_text
from torchlssvm.store.database import Database

CHAIN_START = bytes(32)
"""Hash before the first entry: 32 zero bytes."""

ERASING_KINDS = [kind for kind, event in EVENT_CLASSES.items() if event.erases]
CHANGING_KINDS = [*EVENT_CLASSES, "classes"]
"""Kinds of entries that change samples, or the classes they belong to; others note something, such as a request."""


def opening_name(position: int) -> str:
    """The name of the record that holds the key of a position. The names sort in the order of the positions."""
    return f"opening/{position:020d}"


JOURNAL_COLUMNS = "position, event_id, kind, time, samples, commitments, mac, chain"


def commitments(nonces: Iterable[bytes], ids: Iterable[str]) -> list[bytes]:
    """SHA-256(nonce || id) of each sample. Without the nonce of 32 random bytes it reveals nothing about the id."""
    return [hashlib.sha256(nonce + i.encode()).digest() for nonce, i in zip(nonces, ids, strict=True)]


@dataclass(frozen=True, repr=False)
class Entry:
    """One event as recorded in the journal."""

    position: int
    event_id: str
    kind: str
    time: str
    samples: int
    commitments: bytes
    mac: bytes | None
    chain: bytes

    def __repr__(self) -> str:
        """Show everything but the commitments and hashes, which take a line for each sample."""
        return (
            f"Entry(position={self.position}, event_id={self.event_id!r}, kind={self.kind!r}, time={self.time!r}, "
            f"samples={self.samples})"
        )

    def link(self, previous: bytes) -> bytes:
        """Return the chain hash of this entry, given the hash of the previous entry."""
        body = {
            "position": self.position,
            "event_id": self.event_id,
            "kind": self.kind,
            "time": self.time,
            "samples": self.samples,
            "commitments": hashlib.sha256(self.commitments).hexdigest(),
            "mac": None if self.mac is None else self.mac.hex(),
        }
        return hashlib.sha256(previous + canonical(body)).digest()

    @property
    def commitment_bytes(self) -> list[bytes]:
        """The commitments, sorted."""
        return [self.commitments[i : i + 32] for i in range(0, len(self.commitments), 32)]

    @property
    def commitment_list(self) -> list[str]:
        """The commitments as hex, sorted."""
        return [commitment.hex() for commitment in self.commitment_bytes]


def commitments_held(entries: Iterable[Entry]) -> set[bytes]:
    """The commitments to samples that were added and have not been removed since."""
    held: set[bytes] = set()
    for entry in entries:
        if entry.kind == "add":
            held.update(entry.commitment_bytes)
        elif entry.kind == "remove":
            held.difference_update(entry.commitment_bytes)
    return held


def now() -> str:
    """The time of an event: UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class Journal:
    """The journal of one store."""

    def __init__(self, db: Database):
        self.db = db
        self._id_key: bytes | None = None

    def recorded_id(self, event_id: str) -> str:
        """The id under which an event is recorded, 32 hex digits. The recorded id of a recorded id is itself.

        The first 20 digits are a keyed hash of the id, HMAC-SHA-256(key of the store, id). The last 12 are a checksum under
        the same key: the HMAC of a NUL character and the first 20 digits. Without the key, nobody can compute a valid
        checksum, so an id that a caller passes is never mistaken for a recorded id. The NUL, which no id may contain,
        separates the two uses of the key.
        """
        event_id = check_text(event_id, "event_id")
        if self._id_key is None:
            try:
                self._id_key = bytes.fromhex(self.db.get("state")["id_key"])
            except (KeyError, TypeError, ValueError):
                raise self.db.damaged("the key of its event ids cannot be read") from None
        name = event_id[:20]
        if event_id == name + self._hash("\0" + name)[:12]:
            return event_id
        name = self._hash(event_id)[:20]
        return name + self._hash("\0" + name)[:12]

    def _hash(self, text: str) -> str:
        assert self._id_key is not None
        return hmac.digest(self._id_key, text.encode(), "sha256").hex()

    def entries(self, after: int = 0) -> list[Entry]:
        """Return all entries after a position with a checked chain. A StoreError names the first missing or altered entry."""
        out: list[Entry] = []
        previous = self.chain_at(after)
        for row in self.db.all(f"SELECT {JOURNAL_COLUMNS} FROM journal WHERE position > ? ORDER BY position", (after,)):
            entry = self._entry(row)
            if entry.position != after + len(out) + 1:
                raise StoreError(f"{self.db.path}: entry {after + len(out) + 1} of the journal is missing")
            self._check_link(entry, previous)
            previous = entry.chain
            out.append(entry)
        return out

    def at(self, position: int) -> Entry | None:
        """The entry at a position."""
        row = self.db.one(f"SELECT {JOURNAL_COLUMNS} FROM journal WHERE position = ?", (position,))
        return None if row is None else self._entry(row)

    def of(self, event_id: str) -> Entry | None:
        """Return the entry of an event, or None if it was not applied. Raises StoreError if its chain hash is wrong."""
        recorded = self.recorded_id(event_id)
        row = self.db.one(f"SELECT {JOURNAL_COLUMNS} FROM journal WHERE event_id = ?", (recorded,))
        if row is None:
            return None
        entry = self._entry(row)
        self._check_link(entry, self.chain_at(entry.position - 1))
        return entry

    def _entry(self, row: tuple[object, ...]) -> Entry:
        types = (int, str, str, str, int, bytes, bytes | None, bytes)
        if not all(isinstance(v, t) for v, t in zip(row, types, strict=True)):
            raise self.db.damaged(f"entry {row[0]!r} of the journal cannot be read")
        return Entry(*row)  # type: ignore[arg-type]

    def chain_at(self, position: int) -> bytes:
        """The hash of the chain at a position."""
        entry = self.at(position) if position else None
        if position and entry is None:
            raise self.db.damaged(f"entry {position} of the journal is missing")
        return entry.chain if entry else CHAIN_START

    def append(self, events: Sequence[tuple[str, str, list[bytes]]], digest: str | None) -> dict[str, Any]:
        """Append an entry for each event and write the new end of the journal; return the new state.

        ``events`` are tuples (id, kind, commitments). The last entry gets the digest, as an HMAC.
        """
        state = dict(self.db.get("state"))
        for event_id, kind, samples in events:
            state["position"] += 1
            mac = self.commit(digest, state["position"]) if event_id == events[-1][0] else None
            if kind in EVENT_CLASSES:
                state["samples"] += EVENT_CLASSES[kind].growth * len(samples)
            name, together = self.recorded_id(event_id), b"".join(sorted(samples))
            entry = Entry(state["position"], name, kind, now(), len(samples), together, mac, b"")
            entry = replace(entry, chain=entry.link(bytes.fromhex(state["chain"])))
            self.db.run(
                f"INSERT INTO journal ({JOURNAL_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", vars(entry).values()
            )
            state["chain"] = entry.chain.hex()
        if events:
            state["digest"] = digest
            self.db.put("state", state)
        return state

    def _check_link(self, entry: Entry, previous: bytes) -> None:
        if entry.link(previous) != entry.chain or len(entry.commitments) != 32 * entry.samples:
            raise StoreError(f"{self.db.path}: entry {entry.position} of the journal was altered")

    def start(self, digest: str | None) -> None:
        """Begin the journal of a new store with the digest of its empty head."""
        state = {"position": 0, "digest": digest, "samples": 0, "chain": CHAIN_START.hex()}
        self.db.put("state", state | {"id_key": secrets.token_hex(32)})

    # -- digests, kept as keyed hashes ---------------------------------------------------------------------------------

    def commit(self, digest: str | None, position: int) -> bytes | None:
        """Compute the HMAC of the digest at a position under a new key. The store keeps the key until the state is past."""
        if digest is None:
            return None
        key = os.urandom(32)
        self.db.put(opening_name(position), {"key": key.hex()})
        return hmac.digest(key, digest.encode(), "sha256")

    def opening(self, position: int) -> bytes | None:
        """The key of a position; None if the key is destroyed or the head has no digest."""
        found = self.db.get(opening_name(position), None)
        return None if found is None else bytes.fromhex(found["key"])

    def last_change(self) -> int:
        """The last position at which samples changed. Later entries are of kinds that change no samples."""
        return self._last(CHANGING_KINDS)

    def last_erasure(self, until: int | None = None) -> int:
        """The last position, up to a given one, whose event removed, relabelled or replaced samples and thus old rows."""
        return self._last(ERASING_KINDS, until)

    @property
    def grew(self) -> bool:
        """True if classes were added."""
        return self._last(["classes"]) > 0

    def _last(self, kinds: Sequence[str], until: int | None = None) -> int:
        condition = "" if until is None else f" AND position <= {int(until)}"
        marks = ",".join("?" * len(kinds))
        row = self.db.one(f"SELECT max(position) FROM journal WHERE kind IN ({marks}){condition}", kinds)
        return (row or (None,))[0] or 0

    def destroy_openings(self) -> None:
        """Destroy the keys of all states except the current one."""
        before = self.last_change()
        self.db.run("DELETE FROM meta WHERE name >= ? AND name < ?", (opening_name(0), opening_name(before)))
