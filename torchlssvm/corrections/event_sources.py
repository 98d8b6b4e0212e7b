"""Read corrections from a growing file, a queue or any iterable, and record corrections that fail.

Reading a source never waits. A source remembers its position as the number ``cursor``, which is saved in checkpoints.
``seek(cursor)`` returns to that position, so that events read after the checkpoint are read again:

>>> from torchlssvm.events import Remove
>>> source = as_source([Remove(ids=["a"]), Remove(ids=["b"]), Remove(ids=["c"])])
>>> len(source.read(2)), source.cursor
(2, 2)
>>> source.seek(1)
>>> [item.event.ids for item in source.read(10)]
[('b',), ('c',)]
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import queue
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from torchlssvm.audit.documents import write_private
from torchlssvm.errors import StoreError
from torchlssvm.events import Event, EventBase, from_primitives, to_primitives
from torchlssvm.files import append, refuse_in_store
from torchlssvm.store.journal import now

__all__ = ["DeadLetters", "FileSource", "Item", "IterableSource", "QueueSource", "Source", "as_source"]

log = logging.getLogger("torchlssvm.corrections")

IDENTIFYING_BYTES = 4096
"""Bytes before the cursor by which a file is recognized: several lines."""


@dataclass(frozen=True)
class Item:
    """One item read from a source: an event, or the ``raw`` input and the ``reason`` why it is not an event."""

    event: Event | None
    raw: Any = None
    reason: str = ""


class Source(Protocol):
    """Source of events for a :class:`~torchlssvm.corrections.corrector.Corrector`."""

    cursor: int

    def read(self, limit: int) -> list[Item]:
        """Read the items that have arrived, at most ``limit``, without waiting."""

    def seek(self, cursor: int) -> None:
        """Continue from an earlier ``cursor``."""


def as_item(value: Any) -> Item:
    """Make an item from an event, from a dict of primitives, or from invalid input."""
    if isinstance(value, EventBase):
        return Item(value)  # type: ignore[arg-type]
    try:
        return Item(from_primitives(value))
    except (ValueError, TypeError, RuntimeError) as error:
        return Item(None, value if isinstance(value, Mapping | str) else repr(value), str(error))


class FileSource:
    """Events as JSON, one per line, in a file that may still grow or that does not exist yet.

    A line is read once it ends with a newline. The cursor is the position in bytes. If the file is replaced or rewritten, as
    log rotation does, the new content is read from its start; events that were already applied are not applied again. Blank
    lines and lines that start with ``#`` are skipped, so you can edit the file by hand.

    A line without an ``event_id`` gets an id computed from its position and content, so each reading gives the same id.
    Because this id and ``identity`` stay in stores and checkpoints, they are hashes under a random key, without which nobody
    can test a guess about a line. The key is kept beside the file as ``<name>.key``. Keep it as long as you read the file, and
    delete it with the file. If the key cannot be written, each line needs an ``event_id``, and a file that is rewritten in
    place is not noticed.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.cursor = 0
        self.identity: str | None = None
        """Keyed hash of the last bytes before the cursor, by which the file is recognized; None if it is not known."""
        self._key: bytes | None = None

    def read(self, limit: int) -> list[Item]:
        """Read the next complete lines. StoreError if the file is gone, or ends before the cursor."""
        items: list[Item] = []
        if not self.path.exists():
            if self.cursor:
                raise StoreError(f"{self.path} no longer exists, although {self.cursor} bytes of it were already read")
            return items
        with self.path.open("rb") as file:
            if self.identity is not None and self.identity != self._identify(file):
                log.warning("%s is another file than the one read before: it is read from its start", self.path)
                self.cursor = 0
            if os.fstat(file.fileno()).st_size < self.cursor:
                raise StoreError(f"{self.path} is shorter than the {self.cursor} bytes that were already read")
            start = self.cursor
            file.seek(start)
            while len(items) < limit:
                line = file.readline()
                if not line.endswith(b"\n"):
                    break
                if line.strip() and not line.lstrip().startswith(b"#"):
                    items.append(self._parse(line))
                self.cursor += len(line)
            if self.cursor != start:
                self.identity = self._identify(file)
        return items

    def _identify(self, file: BinaryIO) -> str:
        """Hash the last bytes before the cursor. Without a key, name the file on its disk instead."""
        start = max(0, self.cursor - IDENTIFYING_BYTES)
        file.seek(start)
        try:
            return self._hash(file.read(self.cursor - start))
        except StoreError:
            about = os.fstat(file.fileno())
            return f"{about.st_dev}:{about.st_ino}"

    def _hash(self, data: bytes) -> str:
        self._key = self._key or read_or_make_key(self.path)
        return hashlib.blake2b(data, digest_size=16, key=self._key).hexdigest()

    def _parse(self, line: bytes) -> Item:
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            return Item(None, line.decode("utf-8", "replace").rstrip(), f"not JSON: {error}")
        if isinstance(data, dict) and "event_id" not in data:
            data["event_id"] = self._hash(f"{self.cursor}:".encode() + line)
        return as_item(data)

    def seek(self, cursor: int) -> None:
        """Go to a position in bytes. Set ``identity`` afterwards if the file may have changed since."""
        self.cursor, self.identity = cursor, None


def read_or_make_key(path: Path) -> bytes:
    """Read the key for the hashes of a file, or create it. Raises StoreError if neither is possible."""
    place = path.with_name(path.name + ".key")
    try:
        with contextlib.suppress(FileExistsError):
            write_private(place, secrets.token_bytes(32))
        key = place.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{path} has lines without an event_id, and the key for those cannot be kept in {place}: {error}. Give each line "
            "an event_id, or make the folder writable"
        ) from error
    if len(key) != 32:
        raise StoreError(
            f"{place} holds {len(key)} bytes and not the key of 32 for lines without an event_id: put the "
            "key back, or delete the file if no such line was read so far"
        )
    return key


class QueueSource:
    """A ``queue.Queue`` or ``multiprocessing.Queue`` of events or dicts. The cursor counts the events taken.

    A queue cannot be read again. If the process is killed, events taken after the last checkpoint are lost, unless a store has
    recorded them or the sender sends them again. Sending an event again is safe, because each event id is applied once.
    """

    def __init__(self, events: Any):
        self.queue = events
        self.cursor = 0

    def read(self, limit: int) -> list[Item]:
        """Take the events that are in the queue now."""
        items: list[Item] = []
        while len(items) < limit:
            try:
                items.append(as_item(self.queue.get_nowait()))
            except queue.Empty:
                break
        self.cursor += len(items)
        return items

    def seek(self, cursor: int) -> None:
        """Set the count of events taken. The queue itself does not move."""
        self.cursor = cursor


class IterableSource:
    """Any iterable of events or dicts, read a few at a time. The cursor counts the events.

    A list can be read again from any position. A new iterator is advanced past the events that were read before.
    """

    def __init__(self, events: Iterable[Any]):
        self.events = events
        self.cursor = 0
        self._iterator: Iterator[Any] | None = None

    def read(self, limit: int) -> list[Item]:
        """Read the next events."""
        if self._iterator is None:
            self._iterator = itertools.islice(self.events, self.cursor, None)
        items = [as_item(value) for value in itertools.islice(self._iterator, limit)]
        self.cursor += len(items)
        return items

    def seek(self, cursor: int) -> None:
        """Continue after this number of events."""
        if self._iterator is None or cursor == self.cursor:
            self.cursor = cursor
        elif iter(self.events) is not self.events:
            self.cursor, self._iterator = cursor, None
        elif cursor > self.cursor:
            self._iterator = itertools.islice(self._iterator, cursor - self.cursor, None)
            self.cursor = cursor
        else:
            raise StoreError(f"an iterator cannot go back from event {self.cursor} to {cursor}: give a list or a file")


def as_source(given: Any) -> Source:
    """Return a source for a path, a queue or an iterable of events. A source is returned unchanged."""
    if isinstance(given, str | os.PathLike):
        return FileSource(given)
    if callable(getattr(given, "get_nowait", None)):
        return QueueSource(given)
    if all(hasattr(given, name) for name in ("read", "seek", "cursor")):
        return given  # type: ignore[no-any-return]
    if isinstance(given, Iterable) and not isinstance(given, Mapping | bytes):
        return IterableSource(given)
    raise ValueError(
        f"source must be a path to a JSONL file, a queue or an iterable of events; got {type(given).__name__}"
    )


class DeadLetters:
    """A JSONL file of events that could not be applied, each with time and reason.

    To retry, send a corrected event with a new id.

    If a resumed run refuses the same event again for the same reason, the file still contains it only once.
    """

    def __init__(self, path: str | os.PathLike[str]):
        refuse_in_store(path)  # the events name people
        self.path = Path(path)
        self._written: set[str] | None = None

    def write(self, item: Item, reason: str) -> None:
        """Append an event and the reason. Both are on the disk when the call returns."""
        letter = {"reason": reason, "event": item.raw if item.event is None else to_primitives(item.event)}
        key = json.dumps(letter, default=str)
        if self._written is None:
            self._written = self._read()
        if key in self._written:
            return
        self._written.add(key)
        line = json.dumps({"time": now(), **letter}, default=str)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append(self.path, line + "\n")

    def _read(self) -> set[str]:
        """Read the entries of the file without their times. A line truncated by a crash is skipped."""
        found: set[str] = set()
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []:
            try:
                letter = json.loads(line)
                found.add(json.dumps({"reason": letter["reason"], "event": letter["event"]}))
            except (ValueError, KeyError, TypeError):
                continue
        return found
