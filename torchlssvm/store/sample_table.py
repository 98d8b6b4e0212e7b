"""The table of samples: finding, reading, writing and erasing rows, and encoding features and targets as bytes.

If the head has a grid, its features are integers. They are stored little-endian with the fewest bytes per number (1 to 4) that
fit the whole row; the length of the row shows how many. This width never depends on other rows, because it would otherwise
reveal them after their erasure. Without a grid, or if the head normalizes rows before its grid (``normalize``), features are
stored as float32 or float64 numbers.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchlssvm.audit.certificate import NONCE_BYTES
from torchlssvm.errors import RemovalError, StoreError
from torchlssvm.files import DATABASE_FILE
from torchlssvm.functional.grid import FixedPoint, grid_from_json, grid_to_json
from torchlssvm.functional.threads import PASS_WORK, threads_for
from torchlssvm.store.database import Database, checksum, rows_in
from torchlssvm.store.journal import commitments

ROWS_PER_BATCH = 1024
"""Rows read or written at a time: 16 MB of 2,048 features, and few enough queries that their cost does not show."""

Rows: TypeAlias = list[tuple[Any, ...]]
"""Rows of the table as SQLite gives them, some columns of each."""


@dataclass(frozen=True)
class Sample:
    """One sample: x (J,), y () or (K,), the time of addition (seconds since 1970), and the event that added it, if known."""

    id: str
    subject: str | None
    y: Tensor
    x: Tensor
    added: float
    position: int | None = None


@dataclass(frozen=True)
class StoredRows:
    """Some samples of a store: x (B, J), y (B,) or (B, K), and all other fields as lists of length B."""

    seq: list[int]
    ids: list[str]
    subjects: list[str | None]
    y: Tensor
    x: Tensor
    added: list[float]
    nonces: list[bytes]
    positions: list[int] = field(default_factory=list)  # the positions of the events that last wrote the rows

    def __len__(self) -> int:
        return len(self.seq)

    def __iter__(self) -> Iterator[Sample]:
        return map(Sample, self.ids, self.subjects, self.y, self.x, self.added)

    @property
    def samples(self) -> tuple[list[str], Tensor, Tensor]:
        """Ids, features and targets, in the form that a :class:`~torchlssvm.sample_adapter.SampleAdapter` takes."""
        return self.ids, self.x, self.y

    @property
    def commitments(self) -> list[bytes]:
        """The commitment that the journal holds for each sample."""
        return commitments(self.nonces, self.ids)


@dataclass
class Codec:
    """Converts features and targets to bytes and back. Without a grid, or with ``plain``, features are stored unchanged."""

    J: int
    K: int
    grid: FixedPoint | None = None
    target_grid: FixedPoint | None = None
    plain: bool = False

    @property
    def steps(self) -> FixedPoint | None:
        """The grid on which features are stored; None if they are stored unchanged."""
        return None if self.plain else self.grid

    def encode(self, x: Tensor) -> list[memoryview]:
        """Encode features x (B, J) as one bytes-like object for each row."""
        if self.steps is None:
            wide = x.dtype == torch.float64
            array = x.to("cpu", torch.float64 if wide else torch.float32).contiguous().numpy()
            return split_rows(array.astype("<f8" if wide else "<f4", copy=False))
        with threads_for(PASS_WORK * x.numel()):
            q = self.steps.integers(x).to("cpu").contiguous().numpy().astype("<i4", copy=False)
        if not q.size:
            return split_rows(q)
        largest = np.maximum(q.max(1), -1 - q.min(1))  # (B,): -128 still fits in one byte
        widths = 1 + (largest[:, None] >= (1 << 7, 1 << 15, 1 << 23)).sum(1)
        out = [memoryview(b"")] * len(q)
        for width in np.unique(widths).tolist():
            index = np.flatnonzero(widths == width)
            for i, row in zip(
                index.tolist(), split_rows(narrowed(q if len(index) == len(q) else q[index], width)), strict=True
            ):
                out[i] = row
        return out

    def decode(self, blobs: Sequence[bytes]) -> Tensor:
        """Decode the features (B, J): float64 for features on a grid, otherwise the stored type."""
        sizes = {len(b) for b in blobs}
        if len(sizes) != 1:
            x = torch.empty(len(blobs), self.J, dtype=torch.float64)
            for size in sizes:
                index = [i for i, b in enumerate(blobs) if len(b) == size]
                x[index] = self.decode([blobs[i] for i in index]).to(torch.float64)
            return x
        size = sizes.pop()
        allowed = (4, 8) if self.steps is None else (1, 2, 3, 4)
        if self.J < 1 or size % self.J or size // self.J not in allowed:
            raise StoreError(f"a row of {size} bytes does not hold {self.J} features: the store is damaged")
        width, data = size // self.J, b"".join(blobs)
        if self.steps is None:
            floats = np.frombuffer(data, "<f8" if width == 8 else "<f4").reshape(-1, self.J)
            return torch.from_numpy(floats.astype(floats.dtype.newbyteorder("=")))
        if width == 3:
            padded, three = np.zeros((len(blobs), self.J, 4), np.uint8), np.frombuffer(data, np.uint8)
            for k in range(3):
                padded[:, :, k + 1] = three[k::3].reshape(-1, self.J)
            q = padded.view("<i4")[:, :, 0] >> 8  # an arithmetic shift preserves the sign
        else:
            q = np.frombuffer(data, f"<i{width}").reshape(-1, self.J)
        with threads_for(PASS_WORK * q.size):
            return self.steps.dequantize(torch.from_numpy(q.astype(np.int32)))

    def labels_and_targets(self, y: Tensor) -> tuple[list[int] | None, list[bytes] | None]:
        """Encode y: labels as integers, targets as the float64 numbers that the head summed."""
        if y.ndim == 1 and not y.is_floating_point() and self.K > 1:
            return y.to(torch.int64).tolist(), None
        values = y.reshape(len(y), -1)
        values = values.to(torch.float64) if self.target_grid is None else self.target_grid.snap(values)
        return None, [bytes(b) for b in split_rows(values.cpu().contiguous().numpy().astype("<f8", copy=False))]

    def y(self, labels: Sequence[int | None], targets: Sequence[bytes | None]) -> Tensor:
        """Decode the result of :meth:`labels_and_targets`."""
        if all(t is None for t in targets):
            if None in labels:
                raise StoreError("a row has neither a label nor targets: the store is damaged")
            return torch.tensor(labels, dtype=torch.int64)
        data = b"".join(t or b"" for t in targets)
        if len(data) != 8 * len(targets) * self.K:
            raise StoreError(f"a row does not hold {self.K} targets: the store is damaged")
        values = np.frombuffer(data, "<f8").reshape(-1, self.K)
        return torch.from_numpy(values.astype(np.float64))


def narrowed(q: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """The low bytes of little-endian 32-bit integers: q (B, J) -> (B, J, width), or q itself if width is 4."""
    if width == 4:
        return q
    packed, four = np.empty((*q.shape, width), np.uint8), q.view(np.uint8).reshape(*q.shape, 4)
    for k in range(width):  # copying byte by byte is four times as fast as copying all at once
        packed[:, :, k] = four[:, :, k]
    return packed


def split_rows(array: np.ndarray[Any, Any]) -> list[memoryview]:
    """The bytes of each row of a contiguous array, without copying them."""
    size = array.nbytes // max(1, len(array))
    view = array.reshape(-1).view(np.uint8).data
    return [view[i : i + size] for i in range(0, size * len(array), size)] if size else [view] * len(array)


SAMPLE_COLUMNS = "seq, id, subject, label, target, position, added, nonce, checksum, features"
SAMPLE_COLUMN_TYPES: tuple[Any, ...] = (int, str, str | None, int | None, bytes | None, int, float, bytes, int, bytes)


class SampleTable:
    """The samples of one store."""

    def __init__(self, db: Database):
        self.db = db
        self._form: tuple[Any, Codec] = (
            None,
            Codec(1, 1),
        )  # of the rows: the record last read or written, and its meaning
        self.on_read: Callable[[int], None] | None = None

    @property
    def codec(self) -> Codec:
        """The form in which rows are stored, as read by :meth:`load_codec`."""
        return self._form[1]

    def adopt_codec(self, codec: Codec) -> None:
        """Change and record the form in which rows are stored. The table must have no rows."""
        if codec == self.codec and self._form[0] is not None:
            return
        grids = {name: grid_to_json(grid) for name, grid in (("grid", codec.grid), ("target_grid", codec.target_grid))}
        record = {"features": codec.J, "targets": codec.K, "plain": codec.plain} | grids
        self.db.put("rows", record)
        self._form = record, codec

    def load_codec(self) -> None:
        """Read the form in which rows are stored, because another process may have changed it."""
        found = self.db.get("rows")
        if found == self._form[0]:
            return
        try:
            grid, target_grid = (grid_from_json(found[name]) for name in ("grid", "target_grid"))
        except (IndexError, OverflowError, TypeError, ValueError) as error:
            raise self.db.damaged(f"the grid of its rows cannot be read: {error}") from None
        self._form = found, Codec(found["features"], found["targets"], grid, target_grid, found["plain"])

    # -- finding and reading -------------------------------------------------------------------------------------------

    def _scan(self, columns: str, size: int = ROWS_PER_BATCH, condition: str = "", *values: int) -> Iterator[Rows]:
        """All rows in batches, in order. The first column must be seq."""
        last = -1
        sql = f"SELECT {columns} FROM samples WHERE seq > ?{condition} ORDER BY seq LIMIT {size}"
        while found := self.db.all(sql, (last, *values)):
            last = self._ordered([last, *(row[0] for row in found)])[-1]
            yield found

    def _select(self, columns: str, key: str, wanted: Sequence[Any]) -> Rows:
        """The rows whose column ``key`` has one of the wanted values, in any order."""
        return list(rows_in(self.db.all, f"SELECT {columns} FROM samples WHERE {key}", wanted))

    def _raw(self, seqs: Sequence[int], subject: str | None = None) -> Rows:
        """Read and check the columns of rows by number. If a subject is given, all rows must belong to it."""
        raw = {row[0]: row for row in self._select(SAMPLE_COLUMNS, "seq", seqs)}
        missing = [s for s in seqs if s not in raw]
        if missing:
            raise self.db.damaged(f"row {missing[0]} is not there, or it was changed meanwhile")
        if subject is not None and any(row[2] != subject for row in raw.values()):
            raise self.db.damaged("an index points to the wrong row")
        return self._checked([raw[s] for s in seqs])

    def __len__(self) -> int:
        row = self.db.one("SELECT count(*) FROM samples")
        return int(row[0]) if row else 0

    @property
    def empty(self) -> bool:
        """True if there is no row."""
        return self.db.one("SELECT 1 FROM samples LIMIT 1") is None

    def find(self, ids: Sequence[str] | None = None, subject: str | None = None) -> list[int]:
        """The rows of ids, in the order of the ids, or of a subject, in the order of addition; RemovalError if unknown."""
        if ids is None:
            assert subject is not None
            found = self.of_subject(subject)
            if not found:
                raise RemovalError(f"the store holds no sample of the subject {subject!r}. Nothing was changed.")
            return found
        where = self.held(ids)
        for sample in ids:
            if sample not in where:
                self._check_absent("id", sample)
                raise RemovalError(f"the store holds no sample with the id {sample!r}. Nothing was changed.")
        return [where[sample] for sample in ids]

    def held(self, ids: Sequence[str]) -> dict[str, int]:
        """The rows of the given ids that are in the table."""
        return dict(self._select("id, seq", "id", ids))

    def count(self, wanted: set[bytes]) -> int:
        """Count the commitments whose samples are in the table. This reads all rows."""
        parts = self._scan("seq, id, nonce")
        return sum(c in wanted for part in parts for c in commitments([r[2] for r in part], [r[1] for r in part]))

    def _check_absent(self, column: str, value: str) -> None:
        """Raise StoreError if a scan of all rows finds a value that the index misses, because erasures rely on the index."""
        if self.db.one(f"SELECT 1 FROM samples NOT INDEXED WHERE {column} = ?", (value,)):
            raise self.db.damaged("an index misses a row")

    def ids(self, subject: str | None = None, label: int | None = None) -> list[str]:
        """The ids of all samples of a subject, with a label, or both, in the order they were added."""
        parts: Iterable[Rows]
        if subject is None:
            parts = (self._checked(found) for found in self._scan(SAMPLE_COLUMNS))
        else:
            seqs = self.of_subject(subject)
            starts = range(0, len(seqs), ROWS_PER_BATCH)
            parts = (self._raw(seqs[start : start + ROWS_PER_BATCH], subject) for start in starts)
        return [row[1] for part in parts for row in part if label is None or row[3] == label]

    def of_subject(self, subject: str) -> list[int]:
        """The numbers of a subject's rows, in order."""
        sql = "SELECT seq FROM samples WHERE subject = ? ORDER BY seq"
        found = self._ordered([r[0] for r in self.db.all(sql, (subject,))])
        known = self.db.one("SELECT samples FROM subjects WHERE subject = ?", (subject,))
        if len(found) != (known[0] if known else 0):
            raise self.db.damaged("the index of subjects disagrees with their counts")
        if not found:
            self._check_absent("subject", subject)
        return found

    def _ordered(self, seqs: list[int]) -> list[int]:
        """Raise StoreError unless rows are in order. SQLite does not detect a page that repeats one row and omits another."""
        if not all(isinstance(s, int) for s in seqs) or any(b <= a for a, b in itertools.pairwise(seqs)):
            raise self.db.damaged("its rows are not in order")
        return seqs

    def subjects(self) -> dict[str, int]:
        """Each subject and the number of its samples."""
        known = self.db.all("SELECT subject, samples FROM subjects ORDER BY subject")
        sql = "SELECT subject, count(*) FROM samples WHERE subject IS NOT NULL GROUP BY subject ORDER BY subject"
        if known != self.db.all(sql):
            raise self.db.damaged("the index of subjects disagrees with their counts")
        return dict(known)

    def labels(self) -> dict[int, int]:
        """Each label and the number of its samples."""
        sql = "SELECT label, count(*) FROM samples WHERE label IS NOT NULL GROUP BY label ORDER BY label"
        return dict(self.db.all(sql))

    def read(self, seqs: Sequence[int], ids: Sequence[str] | None = None, subject: str | None = None) -> StoredRows:
        """Read rows by number, in the given order. Their ids or subject must be those by which an index found them."""
        rows = self._decode(self._raw(seqs, subject))
        if ids is not None and rows.ids != list(ids):
            raise self.db.damaged("an index points to the wrong row")
        return rows

    def batches(self, after: int = -1, size: int = ROWS_PER_BATCH, until: int | None = None) -> Iterator[StoredRows]:
        """All rows in batches, optionally only those written by events after a position or up to a position.

        Each batch is read in its own view. If the caller has opened a view, all batches are of the same state.
        """
        condition = " AND position > ?" + " AND position <= ?" * (until is not None)
        scan = self._scan(SAMPLE_COLUMNS, size, condition, after, *([] if until is None else [until]))
        while True:
            with self.db.view():
                self.load_codec()
                found = next(scan, None)
                if found is None:
                    return
                if self.on_read is not None:
                    self.on_read(len(found))
                rows = self._decode(self._checked(found))
            yield rows

    def names(self) -> Iterator[tuple[list[str], list[str | None]]]:
        """Ids and subjects of all rows, in batches. Features are not read."""
        for found in self._scan("seq, id, subject"):
            yield [row[1] for row in found], [row[2] for row in found]

    def _checked(self, found: Rows) -> Rows:
        blobs = [row[9] if isinstance(row[9], bytes) else b"" for row in found]
        for row, blob in zip(found, blobs, strict=True):
            if not isinstance(row[9], bytes) or row[8] != checksum(row[:8], blob):
                raise self.db.damaged(f"row {row[0]} does not have its checksum")
            if not all(map(isinstance, row, SAMPLE_COLUMN_TYPES)) or len(row[7]) != NONCE_BYTES:
                raise self.db.damaged(f"row {row[0]} holds values of other types")
        return found

    def _decode(self, found: Rows) -> StoredRows:
        seqs, ids, subjects, labels, targets, positions, added, nonces, _, blobs = map(list, zip(*found, strict=True))
        y, x = self.codec.y(labels, targets), self.codec.decode(blobs)
        return StoredRows(seqs, ids, subjects, y, x, added, nonces, positions)

    # -- writing -------------------------------------------------------------------------------------------------------

    def insert(
        self, ids: Sequence[str], subjects: Sequence[str | None], x: Tensor, y: Tensor, position: int
    ) -> list[bytes]:
        """Write new rows in batches; return their nonces. Raises ValueError if an id already exists."""
        nonces: list[bytes] = []
        now = time.time()
        last = self.db.one("SELECT max(seq) FROM samples")
        first = ((last or (None,))[0] or 0) + 1

        def rows(part: slice) -> Iterator[tuple[Any, ...]]:
            """Zip whole columns, so that Python loops over columns instead of rows."""
            labels, targets = self.codec.labels_and_targets(y[part])
            blobs, secret = self.codec.encode(x[part]), os.urandom(NONCE_BYTES * len(ids[part]))
            fresh = [secret[i : i + NONCE_BYTES] for i in range(0, len(secret), NONCE_BYTES)]
            nothing = [None] * len(fresh)
            same = [position] * len(fresh), [now] * len(fresh)
            seqs = range(first + part.start, first + part.start + len(fresh))
            columns = (seqs, ids[part], subjects[part], labels or nothing, targets or nothing, *same, fresh)
            sums = list(map(checksum, zip(*columns, strict=True), blobs))
            nonces.extend(fresh)
            return zip(*columns, sums, blobs, strict=True)

        sql = f"INSERT INTO samples ({SAMPLE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        try:
            for start in range(0, len(ids), ROWS_PER_BATCH):
                self.db.many(sql, rows(slice(start, start + ROWS_PER_BATCH)))
        except StoreError as error:
            if not isinstance(error.__cause__, sqlite3.IntegrityError):
                raise
            known = next(
                (i for i in ids if self.db.one("SELECT 1 FROM samples WHERE id = ? AND position < ?", (i, position))),
                "",
            )
            raise ValueError(
                f"the id {known!r} is in the store already: use Relabel or Replace, or Remove it first. Nothing was changed."
            ) from None
        self._count(subjects, 1)
        return nonces

    def erase(self, rows: StoredRows) -> None:
        """Delete rows together with their nonces."""
        self.db.many("DELETE FROM samples WHERE seq = ?", ((s,) for s in rows.seq))
        self._count(rows.subjects, -1)

    def rewrite(self, rows: StoredRows, x: Tensor | None, y: Tensor | None, position: int) -> None:
        """Write new features or targets to rows. Id, subject and nonce stay the same."""
        blobs = self.codec.encode(rows.x if x is None else x)
        labels, targets = self.codec.labels_and_targets(rows.y if y is None else y)
        nothing, same = [None] * len(rows), [position] * len(rows)
        new = (labels or nothing, targets or nothing, same)
        records = zip(rows.seq, rows.ids, rows.subjects, *new, rows.added, rows.nonces, strict=True)
        changed = zip(*new, map(checksum, records, blobs), blobs, rows.seq, strict=True)
        self.db.many(
            "UPDATE samples SET label = ?, target = ?, position = ?, checksum = ?, features = ? WHERE seq = ?", changed
        )

    def renumber(self) -> None:
        """Number the rows 1 to n, inside a transaction: a gap would show where a sample was. Rows before it are kept."""
        numbered = "SELECT seq, row_number() OVER (ORDER BY seq) AS number FROM samples"
        row = self.db.one(f"SELECT seq, number FROM ({numbered}) WHERE seq != number LIMIT 1")
        if row is None:
            return
        gap, first = row
        for part in self._scan(SAMPLE_COLUMNS, ROWS_PER_BATCH, " AND seq >= ?", gap):
            moved = [(n, *row[1:8]) for n, row in enumerate(self._checked(part), first)]
            first += len(part)
            changed = ((new[0], checksum(new, old[9]), old[0]) for new, old in zip(moved, part, strict=True))
            self.db.many("UPDATE samples SET seq = ?, checksum = ? WHERE seq = ?", changed)

    def _count(self, subjects: Iterable[str | None], sign: int) -> None:
        counts = Counter(s for s in subjects if s is not None)
        self.db.many(
            "INSERT INTO subjects VALUES (?, ?) ON CONFLICT (subject) DO UPDATE SET samples = samples + excluded.samples",
            ((s, sign * n) for s, n in counts.items()),
        )
        if sign < 0:
            self.db.many("DELETE FROM subjects WHERE subject = ? AND samples = 0", ((s,) for s in counts))


class StoreDataset(Dataset[tuple[Tensor, Tensor]]):
    """A torch dataset of (x, y) of every sample that the store held when the dataset was created.

    Reading a sample that was erased since raises RemovalError. Each process opens its own connection, so a DataLoader may use
    any number of workers.
    """

    def __init__(self, path: Path, ids: list[str]):
        self.path, self.ids = path, ids
        self._table: SampleTable | None = None
        self._owner = 0  # the id of the process that opened the connection

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return a whole batch at once. DataLoader calls this method."""
        if self._table is None or self._owner != os.getpid():
            self._table = SampleTable(Database(self.path / DATABASE_FILE, False, readonly=True))
            self._owner = os.getpid()
        wanted = [self.ids[i] for i in indices]
        with self._table.db.view():
            self._table.load_codec()
            rows = self._table.read(self._table.find(wanted), wanted)
        return list(zip(rows.x, rows.y, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_owner": 0, "_table": None}
