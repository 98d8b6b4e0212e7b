"""The files beside the database: snapshots of the statistics, and the last acknowledged position.

A snapshot makes opening a store fast, but it is optional, because the statistics can be recomputed from the rows. Old
snapshots are removed, because their sums include samples that were erased later. A snapshot ends with the SHA-256 of its
content.

The witness is the last position that was acknowledged to a caller. It reveals whether a database has lost acknowledged events,
for example because the disk did not keep the end of the log, or because the database was replaced with a backup.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from pathlib import Path
from typing import Any

import torch

from torchlssvm.canonical_json import loads
from torchlssvm.files import replacement, sync_folder
from torchlssvm.store.database import checksum
from torchlssvm.store.journal import CHAIN_START
from torchlssvm.untrusted import load_tensors, read_regular

SNAPSHOT_SUFFIX = ".snapshot.pt"
SNAPSHOT_FORMAT = "torchlssvm-snapshot-1"
SNAPSHOT_FIELDS = {"format": str, "position": int, "chain": str, "digest": str, "statistics": dict}

MAX_SNAPSHOT_BYTES = 2**33
"""Bytes of a snapshot that is read: the sums of 30,000 features. Without one the rows are summed."""

WITNESS_BYTES = 256
"""Bytes of the witness, always the same, so that it is overwritten in place; it needs 150."""

UNTIL_COMPACTION = ".until-compaction"
"""Suffix of files in the store's folder that may contain data about erased samples. Compaction removes them."""

LEFTOVERS = (f"*{UNTIL_COMPACTION}", "*.tmp")
"""Files of the store's folder that compaction removes: the above, and files that a crash left half-written."""


class Snapshots:
    """The snapshot files of a store's folder, one for each journal position."""

    def __init__(self, folder: Path):
        self.folder = folder

    def paths(self) -> list[Path]:
        """All snapshot files, oldest first, including those that a crash left half-written."""
        return sorted([*self.folder.glob(f"*{SNAPSHOT_SUFFIX}"), *self.folder.glob(f"*{SNAPSHOT_SUFFIX}.*.tmp")])

    def position(self, path: Path) -> int:
        """The journal position at which a snapshot was taken; -1 if the name is not that of a snapshot."""
        stem = path.name.partition(SNAPSHOT_SUFFIX)[0]
        return int(stem) if stem.isdecimal() else -1

    def names_before(self, position: int) -> list[str]:
        """The names of the snapshots from before a journal position, oldest first."""
        return [p.name for p in self.paths() if self.position(p) < position]

    def write(self, position: int, chain: bytes, digest: str, state: dict[str, torch.Tensor]) -> None:
        """Write a snapshot and remove the older ones."""
        buffer = io.BytesIO()
        head = {"format": SNAPSHOT_FORMAT, "position": position, "chain": chain.hex(), "digest": digest}
        torch.save(head | {"statistics": state}, buffer)
        path = self.folder / f"{position:012d}{SNAPSHOT_SUFFIX}"
        with replacement(path, sync=False) as new:
            new.write_bytes(buffer.getvalue() + hashlib.sha256(buffer.getbuffer()).digest())
        self.remove([p for p in self.paths() if p != path])

    def read(self, path: Path) -> dict[str, Any] | None:
        """Return the content of a snapshot, or None if it cannot be read. The caller then sums the rows."""
        try:
            content = read_regular(path, MAX_SNAPSHOT_BYTES)
        except (OSError, ValueError):
            return None
        body, trailer = memoryview(content)[:-32], content[-32:]  # the file ends with the SHA-256 of its content
        if hashlib.sha256(body).digest() != trailer:
            return None
        try:
            found: Any = load_tensors(io.BytesIO(body))
        except Exception:  # torch's reader raises errors of many kinds
            return None
        if not isinstance(found, dict) or any(
            type(found.get(name)) is not kind for name, kind in SNAPSHOT_FIELDS.items()
        ):
            return None
        return found if found["format"] == SNAPSHOT_FORMAT else None

    def remove(self, paths: list[Path]) -> None:
        """Delete snapshots, or other files of the folder."""
        for path in paths:
            path.unlink(missing_ok=True)
        if paths:
            sync_folder(self.folder)


class Witness:
    """The last acknowledged position and chain hash, in a small file written after each commit."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> tuple[int, bytes] | None:
        """Return position and chain hash; None if the file is missing or damaged. A half-written file is read again."""
        for _ in range(5):
            found = self._read()
            if found is not None or not self.path.exists():
                return found
            time.sleep(0.002)
        return None

    def _read(self) -> tuple[int, bytes] | None:
        try:
            text, _, check = read_regular(self.path, 2 * WITNESS_BYTES)[:WITNESS_BYTES].rstrip(b" ").partition(b" ")
            if b"%08x" % checksum((text,)) != check:
                return None
            data = loads(text)
            return int(data["position"]), bytes.fromhex(data["chain"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def create(self) -> None:
        """Write the witness of a new store durably. The file keeps its size from then on."""
        with replacement(self.path) as new:
            new.write_bytes(self._encode(0, CHAIN_START))

    def write(self, position: int, chain: bytes) -> None:
        """Overwrite the witness in place, which takes microseconds. The file is not synced, because the log is."""
        data = self._encode(position, chain)
        with open(self.path, "r+b" if self.path.exists() else "wb") as file:
            file.write(data)

    def _encode(self, position: int, chain: bytes) -> bytes:
        text = json.dumps({"position": position, "chain": chain.hex()}, separators=(",", ":")).encode()
        return (text + b" " + b"%08x" % checksum((text,))).ljust(WITNESS_BYTES)
