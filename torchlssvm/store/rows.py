"""Samples as rows: how features become bytes, and how rows are found, read, written and erased.

On a grid a feature is an integer, stored in as few bytes (1 to 4, little-endian) as the batch it came with needs; the
length of a row says how many. Without a grid features are stored as the float32 or float64 numbers they are.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.errors import RemovalError, StoreError
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.store.database import Database, checksum

BATCH = 1024
NONCE = 32
LOOKUP = 500
"""Ids asked for in one query (SQLite allows 999 variables in old versions)."""


def commitment(nonce: bytes, sample_id: str) -> bytes:
    """SHA-256(nonce || id): says nothing about the id to whom the 32 random bytes are not known."""
    return hashlib.sha256(nonce + sample_id.encode()).digest()


@dataclass(frozen=True)
class Rows:
    """Some samples of a store: x (B, J), y (B,) or (B, K), and the rest as lists of length B."""

    seq: list[int]
    ids: list[str]
    subjects: list[str | None]
    y: Tensor
    x: Tensor
    added: list[float]
    nonces: list[bytes]

    def __len__(self) -> int:
        return len(self.seq)

    @property
    def commitments(self) -> list[bytes]:
        """What the journal holds for each sample."""
        return [commitment(n, i) for n, i in zip(self.nonces, self.ids, strict=True)]


@dataclass
class Codec:
    """Features and targets to bytes and back. Without a grid they are kept as they are."""

    J: int
    K: int
    grid: FixedPoint | None = None
    target_grid: FixedPoint | None = None

    def encode(self, x: Tensor) -> list[memoryview]:
        """One piece of memory for each row. x: (B, J)."""
        if self.grid is None:
            wide = x.dtype == torch.float64
            array = x.to("cpu", torch.float64 if wide else torch.float32).contiguous().numpy()
            return split(array.astype("<f8" if wide else "<f4", copy=False))
        steps = self.grid.integers(x).to("cpu").contiguous()
        low, high = (int(v) for v in torch.aminmax(steps)) if steps.numel() else (0, 0)
        largest, q = max(high, -low - 1), steps.numpy().astype("<i4", copy=False)  # -128 still fits one byte
        width = next(w for w in (1, 2, 3, 4) if largest < 1 << (8 * w - 1))
        if width < 4:  # of a little-endian number the low bytes come first
            packed, four = np.empty((*q.shape, width), np.uint8), q.view(np.uint8).reshape(*q.shape, 4)
            for k in range(width):  # byte by byte: four times as fast as all at once
                packed[:, :, k] = four[:, :, k]
            q = packed
        return split(q)

    def decode(self, blobs: Sequence[bytes]) -> Tensor:
        """The features (B, J) as the head summed them: float64 on a grid, else as stored."""
        sizes = {len(b) for b in blobs}
        if len(sizes) != 1:
            x = torch.empty(len(blobs), self.J, dtype=torch.float64)
            for size in sizes:
                index = [i for i, b in enumerate(blobs) if len(b) == size]
                x[index] = self.decode([blobs[i] for i in index]).to(torch.float64)
            return x
        size = sizes.pop()
        allowed = (4, 8) if self.grid is None else (1, 2, 3, 4)
        if size % self.J or size // self.J not in allowed:
            raise StoreError(f"a row of {size} bytes does not hold {self.J} features: the store is damaged")
        width, data = size // self.J, b"".join(blobs)
        if self.grid is None:
            floats = np.frombuffer(data, "<f8" if width == 8 else "<f4").reshape(-1, self.J)
            return torch.from_numpy(floats.astype(floats.dtype.newbyteorder("=")))
        if width == 3:
            padded, three = np.zeros((len(blobs), self.J, 4), np.uint8), np.frombuffer(data, np.uint8)
            for k in range(3):
                padded[:, :, k + 1] = three[k::3].reshape(-1, self.J)
            q = padded.view("<i4")[:, :, 0] >> 8  # an arithmetic shift: the sign comes along
        else:
            q = np.frombuffer(data, f"<i{width}").reshape(-1, self.J)
        return self.grid.dequantize(torch.from_numpy(q.astype(np.int32)))

    def labels_and_targets(self, y: Tensor) -> tuple[list[int] | None, list[bytes] | None]:
        """What is written for y: labels as integers, targets as the float64 numbers the head summed."""
        if y.ndim == 1 and not y.is_floating_point() and self.K > 1:
            return y.tolist(), None
        values = y.reshape(len(y), -1)
        values = values.to(torch.float64) if self.target_grid is None else self.target_grid.snap(values)
        return None, [bytes(b) for b in split(values.cpu().contiguous().numpy().astype("<f8", copy=False))]

    def y(self, labels: Sequence[int | None], targets: Sequence[bytes | None]) -> Tensor:
        """Undo :meth:`labels_and_targets`."""
        if all(t is None for t in targets):
            return torch.tensor(labels, dtype=torch.int64)
        data = b"".join(t or b"" for t in targets)
        if len(data) != 8 * len(targets) * self.K:
            raise StoreError(f"a row does not hold {self.K} targets: the store is damaged")
        values = np.frombuffer(data, "<f8").reshape(-1, self.K)
        return torch.from_numpy(values.astype(np.float64))


def split(array: np.ndarray[Any, Any]) -> list[memoryview]:
    """The bytes of each row of a contiguous array, without copying them."""
    size = array.nbytes // max(1, len(array))
    view = array.reshape(-1).view(np.uint8).data
    return [view[i : i + size] for i in range(0, size * len(array), size)] if size else [view] * len(array)


COLUMNS = "seq, id, subject, label, target, position, added, nonce, checksum, features"


class Table:
    """The samples of one store."""

    def __init__(self, db: Database, codec: Codec):
        self.db, self.codec = db, codec

    def save_codec(self) -> None:
        """Write how features are stored beside them."""
        codec = self.codec
        grids = {
            name: None if grid is None else [grid.limit.hex(), grid.bits, grid.headroom]
            for name, grid in (("grid", codec.grid), ("target_grid", codec.target_grid))
        }
        self.db.put("rows", {"features": codec.J, "targets": codec.K} | grids)

    def load_codec(self) -> None:
        """Undo :meth:`save_codec`."""
        found = self.db.get("rows")
        if found is None:
            raise StoreError(f"{self.db.path} is damaged: it does not say how its rows are written")
        numbers = (found["grid"], found["target_grid"])
        grids = [None if g is None else FixedPoint(float.fromhex(g[0]), g[1], g[2]) for g in numbers]
        self.codec = Codec(found["features"], found["targets"], *grids)

    # -- finding and reading -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        row = self.db.one("SELECT count(*) FROM samples")
        return int(row[0]) if row else 0

    def find(self, ids: Sequence[str] | None = None, subject: str | None = None) -> list[int]:
        """The rows of some ids, in their order, or of a subject, in the order they were added; RemovalError if unknown."""
        if ids is None:
            assert subject is not None
            found = [r[0] for r in self.db.all("SELECT seq FROM samples WHERE subject = ? ORDER BY seq", (subject,))]
            known = self.db.one("SELECT samples FROM subjects WHERE subject = ?", (subject,))
            if len(found) != (known[0] if known else 0):
                raise StoreError(f"{self.db.path} is damaged: the index of subjects disagrees with their counts")
            if not found:
                raise RemovalError(f"the store holds no sample of the subject {subject!r}. Nothing was changed.")
            return found
        where: dict[str, int] = {}
        for start in range(0, len(ids), LOOKUP):
            part = ids[start : start + LOOKUP]
            marks = ",".join("?" * len(part))
            where.update(self.db.all(f"SELECT id, seq FROM samples WHERE id IN ({marks})", part))
        for sample in ids:
            if sample not in where:
                raise RemovalError(f"the store holds no sample with the id {sample!r}. Nothing was changed.")
        return [where[sample] for sample in ids]

    def ids(self, subject: str | None = None, label: int | None = None) -> list[str]:
        """The ids of all samples of a subject, with a label, or both, in the order they were added."""
        asked = {name: value for name, value in (("subject", subject), ("label", label)) if value is not None}
        where = " AND ".join(f"{name} = ?" for name in asked) or "1"
        seqs = [r[0] for r in self.db.all(f"SELECT seq FROM samples WHERE {where} ORDER BY seq", asked.values())]
        parts = (self._raw(seqs[start : start + LOOKUP]) for start in range(0, len(seqs), LOOKUP))
        return [row[1] for part in parts for row in part]

    def subjects(self) -> dict[str, int]:
        """Each subject and the number of its samples."""
        known = self.db.all("SELECT subject, samples FROM subjects ORDER BY subject")
        sql = "SELECT subject, count(*) FROM samples WHERE subject IS NOT NULL GROUP BY subject ORDER BY subject"
        if known != self.db.all(sql):
            raise StoreError(f"{self.db.path} is damaged: the index of subjects disagrees with their counts")
        return dict(known)

    def read(self, seqs: Sequence[int]) -> Rows:
        """Rows by their number, in that order."""
        return self._decode(self._raw(seqs))

    def _raw(self, seqs: Sequence[int]) -> list[tuple[Any, ...]]:
        """The columns of rows, each checked against its checksum."""
        raw: dict[int, tuple[Any, ...]] = {}
        for start in range(0, len(seqs), LOOKUP):
            part = seqs[start : start + LOOKUP]
            marks = ",".join("?" * len(part))
            found = self.db.all(f"SELECT {COLUMNS} FROM samples WHERE seq IN ({marks})", part)
            raw.update((row[0], row) for row in found)
        missing = next((s for s in seqs if s not in raw), None)
        if missing is not None:
            raise StoreError(f"{self.db.path} is damaged or was changed meanwhile: row {missing} is not there")
        return self._checked([raw[s] for s in seqs])

    def batches(self, after: int | None = None, size: int = BATCH) -> Iterator[Rows]:
        """All rows in batches; only those written by events after a position, if one is given."""
        last = -1
        condition = "" if after is None else " AND position > ?"
        while True:
            values = (last,) if after is None else (last, after)
            sql = f"SELECT {COLUMNS} FROM samples WHERE seq > ?{condition} ORDER BY seq LIMIT {size}"
            found = self.db.all(sql, values)
            if not found:
                return
            last = found[-1][0]
            yield self._decode(self._checked(found))

    def _checked(self, found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        for row in found:
            if not isinstance(row[9], bytes) or row[8] != checksum(row[:8], row[9]):
                raise StoreError(f"{self.db.path} is damaged: row {row[0]} does not have its checksum")
        return found

    def _decode(self, found: list[tuple[Any, ...]]) -> Rows:
        return Rows(
            [r[0] for r in found],
            [r[1] for r in found],
            [r[2] for r in found],
            self.codec.y([r[3] for r in found], [r[4] for r in found]),
            self.codec.decode([r[9] for r in found]),
            [r[6] for r in found],
            [r[7] for r in found],
        )

    # -- writing -------------------------------------------------------------------------------------------------------

    def insert(
        self, ids: Sequence[str], subjects: Sequence[str | None], x: Tensor, y: Tensor, position: int
    ) -> list[bytes]:
        """Write new rows in batches; returns their nonces. ValueError if an id is there already."""
        nonces: list[bytes] = []
        now = time.time()
        last = self.db.one("SELECT max(seq) FROM samples")
        first = ((last or (None,))[0] or 0) + 1

        def rows(part: slice) -> Iterator[tuple[Any, ...]]:
            """The columns side by side; Python's own loops run once for each of them, not for each row."""
            labels, targets = self.codec.labels_and_targets(y[part])
            blobs, secret = self.codec.encode(x[part]), os.urandom(NONCE * len(ids[part]))
            fresh = [secret[i : i + NONCE] for i in range(0, len(secret), NONCE)]
            nothing = [None] * len(fresh)
            same = [position] * len(fresh), [now] * len(fresh)
            seqs = range(first + part.start, first + part.start + len(fresh))
            columns = (seqs, ids[part], subjects[part], labels or nothing, targets or nothing, *same, fresh)
            checksums = [checksum(record, blob) for record, blob in zip(zip(*columns, strict=True), blobs, strict=True)]
            nonces.extend(fresh)
            return zip(*columns, checksums, blobs, strict=True)

        sql = f"INSERT INTO samples ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        try:
            for start in range(0, len(ids), BATCH):
                self.db.many(sql, rows(slice(start, start + BATCH)))
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

    def erase(self, rows: Rows) -> None:
        """Delete rows, and with them their nonces."""
        self.db.many("DELETE FROM samples WHERE seq = ?", ((s,) for s in rows.seq))
        self._count(rows.subjects, -1)

    def rewrite(self, rows: Rows, x: Tensor | None, y: Tensor | None, position: int) -> None:
        """Give rows new features or targets; id, subject and nonce stay."""
        blobs = self.codec.encode(rows.x if x is None else x)
        labels, targets = self.codec.labels_and_targets(rows.y if y is None else y)
        changed = []
        for i, seq in enumerate(rows.seq):
            label, target = (labels[i] if labels else None), (targets[i] if targets else None)
            record = (seq, rows.ids[i], rows.subjects[i], label, target, position, rows.added[i], rows.nonces[i])
            changed.append((label, target, position, checksum(record, blobs[i]), blobs[i], seq))
        self.db.many(
            "UPDATE samples SET label = ?, target = ?, position = ?, checksum = ?, features = ? WHERE seq = ?", changed
        )

    def _count(self, subjects: Iterable[str | None], sign: int) -> None:
        counts = Counter(s for s in subjects if s is not None)
        self.db.many(
            "INSERT INTO subjects VALUES (?, ?) ON CONFLICT (subject) DO UPDATE SET samples = samples + excluded.samples",
            ((s, sign * n) for s, n in counts.items()),
        )
        if sign < 0:
            self.db.many("DELETE FROM subjects WHERE subject = ? AND samples = 0", ((s,) for s in counts))
