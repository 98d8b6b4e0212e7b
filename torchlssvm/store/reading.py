"""Reading the samples and the history of a store. Nothing here keeps a cursor open, so a reader never holds up the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from torchlssvm.events import check_ids, check_text
from torchlssvm.store.database import Database
from torchlssvm.store.dataset import StoreDataset
from torchlssvm.store.journal import Entry, Journal
from torchlssvm.store.sample_table import BATCH, Rows, Table

NOTE, NOTE_END = "note/", "note0"
"""Notes are records of their own, with names between these two."""


@dataclass(frozen=True)
class Sample:
    """One sample of a store: x (J,), y () or (K,), and when it was added (seconds since 1970)."""

    id: str
    subject: str | None
    y: Tensor
    x: Tensor
    added: float


class Reading:
    """Read access of :class:`~torchlssvm.store.SampleStore`."""

    path: Path
    _db: Database
    _table: Table
    _journal: Journal

    def view(self) -> AbstractContextManager[None]:
        """``with store.view():`` what is read inside is of one position, whatever other processes write meanwhile.

        Other threads wait, and a compaction elsewhere cannot finish until it ends; nothing can be written inside.
        """
        return self._db.view()

    @property
    def position(self) -> int:
        """The number of events applied so far."""
        return int(self._db.get("state")["position"])

    @property
    def compacted(self) -> int:
        """The position up to which :meth:`SampleStore.compact` has gone."""
        return int(self._db.get("compacted"))

    @property
    def fingerprint(self) -> str | None:
        """The network whose features the store takes, if it is bound to one."""
        return self._db.get("fingerprint")  # type: ignore[no-any-return]

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._table)

    def __contains__(self, sample_id: object) -> bool:
        """Whether there is a sample with this id."""
        try:
            wanted = check_text(sample_id, "an id")
        except ValueError:
            return False
        return self._db.one("SELECT 1 FROM samples WHERE id = ?", (wanted,)) is not None

    def __iter__(self) -> Iterator[Sample]:
        """All samples, one by one, in the order they were added."""
        for rows in self.batches():
            for i in range(len(rows)):
                yield Sample(rows.ids[i], rows.subjects[i], rows.y[i], rows.x[i], rows.added[i])

    def batches(self, size: int = BATCH) -> Iterator[Rows]:
        """All samples in batches; x is what the head summed."""
        return self._table.batches(size=size)

    def watch(self, on_read: Callable[[int], None] | None) -> None:
        """Call a function with the number of samples of each batch that is read from now on, for a progress bar."""
        self._table.on_read = on_read

    def get(self, ids: Any) -> Rows:
        """Samples by their ids, in that order."""
        wanted = check_ids(ids)
        with self.view():
            self._table.load_codec()
            return self._table.read(self._table.find(wanted), wanted)

    def find(self, subject: str | None = None, label: int | None = None) -> list[str]:
        """The ids of all samples of a subject, with a label, or both, in the order they were added."""
        with self.view():
            return self._table.ids(None if subject is None else check_text(subject, "subject"), label)

    def count_of(self, subject: str) -> int:
        """The number of samples of a subject."""
        return self._table.count_of(subject)

    def has_applied(self, event_id: str) -> bool:
        """Whether an event with this id is in the journal."""
        return self._journal.of(event_id) is not None

    def subjects(self) -> dict[str, int]:
        """Each subject and the number of its samples."""
        with self.view():
            return self._table.subjects()

    def dataset(self) -> StoreDataset:
        """The samples as a torch dataset of (x, y), for a DataLoader with any number of workers."""
        return StoreDataset(self.path)

    def notes(self, prefix: str = "") -> dict[str, Any]:
        """What was written with :meth:`set_note`, by name, in their order; with a prefix, those whose names begin with it."""
        with self.view():
            names = self._db.all("SELECT name FROM meta WHERE name >= ? AND name < ? ORDER BY name", (NOTE, NOTE_END))
            found = [name for (name,) in names if name.startswith(NOTE + prefix)]
            return {name.removeprefix(NOTE): self._db.get(name) for name in found}

    def note(self, name: str) -> Any:
        """One note; None if there is none."""
        return self._db.get(NOTE + name, None)

    def set_note(self, name: str, value: Any) -> None:
        """Keep something of the caller's own beside the samples: any value of JSON; None takes it away.

        Not for data about people, but for as long as an event that names them waits (``corrections.pending_events``).
        """
        self.update_note(name, lambda _: value)

    def update_note(self, name: str, change: Callable[[Any], Any]) -> Any:
        """The same for a value made from the present one (None if there is none), while no other process can change it."""
        with self._db.transaction():
            value = change(self.note(name))
            self._put_note(name, value)
            return value

    def _put_note(self, name: str, value: Any) -> None:
        if value is None:
            self._db.delete(NOTE + name)
        else:
            self._db.put(NOTE + name, value)

    def history(self) -> list[Entry]:
        """Every event so far, oldest first, after checking the chain they form."""
        with self.view():
            self._journal.check()
            return list(self._journal.entries())
