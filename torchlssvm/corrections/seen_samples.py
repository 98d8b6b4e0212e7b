"""Samples that training has seen already, so that none is counted twice and none that was erased comes back.

A second epoch, the padding of a distributed sampler and a run that is resumed all show samples again. That a sample is held
says too little: one that was learned and then erased is not held, and must stay out. So each id that was seen is
kept, as a hash. With a store the hashes are a file in its folder, written before the event and taken back if the
event did not make it into the journal; without one they go into the checkpoint, with the head. Either is keyed at random, so
hashes of two files cannot be compared, nor be looked up in a table.

The key stands beside them, for the run that is resumed. That file therefore shows whether an id was seen, and
``SampleStore.compact`` removes it, key and all. From then on only this process remembers what was erased; a run that is
resumed goes by its place (:mod:`torchlssvm.corrections.run_progress`). A checkpoint without a store keeps it: when an erasure
must leave no trace of the id, use a store, or delete checkpoints of runs that are over.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from torchlssvm.errors import StoreError
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.store import UNTIL_COMPACTION, SampleStore
from torchlssvm.store.snapshots import write_durably

__all__ = ["SeenSamples"]

SEEN_FILE = f"offered{UNTIL_COMPACTION}"
"""The file in a store's folder."""

ID_HASH_BYTES = 16
"""Bytes of the hash of an id: 128 bits, so that different ids do not share one."""


class SeenSamples:
    """The set of sample ids that were seen.

    >>> seen = SeenSamples()
    >>> seen.record(["a", "b"], "e1")
    >>> seen.new(["b", "c", "c"])
    [1]
    >>> other = SeenSamples()
    >>> other.load_state_dict(seen.state_dict())
    >>> other.new(["a", "d"])
    [1]
    """

    def __init__(self, store: SampleStore | None = None):
        self.store = store
        self.hashes: set[bytes] = set()
        self.key = secrets.token_bytes(16)
        self.sealed: set[bytes] = set()  # without a store: hashes of a checkpoint, under the key
        if store is not None:
            self._read(store)

    def _hash(self, sample_id: str) -> bytes:
        key = b"" if self.store is None else self.key  # ranks compare them; what is saved is sealed
        return hashlib.blake2b(sample_id.encode(), digest_size=ID_HASH_BYTES, key=key).digest()

    def _seal(self, hash_: bytes) -> bytes:
        return hashlib.blake2b(hash_, digest_size=ID_HASH_BYTES, key=self.key).digest()

    def _known(self, hash_: bytes) -> bool:
        return hash_ in self.hashes or (bool(self.sealed) and self._seal(hash_) in self.sealed)

    def new(self, ids: Sequence[str]) -> list[int]:
        """Return the places of the ids that were not seen before, each id once."""
        seen: set[bytes] = set()
        places = []
        for k, hash_ in enumerate(map(self._hash, ids)):
            held = self.store is not None and ids[k] in self.store
            if not self._known(hash_) and hash_ not in seen and not held:
                seen.add(hash_)
                places.append(k)
        return places

    def __contains__(self, sample_id: str) -> bool:
        """True if a sample with this id was seen."""
        return self._known(self._hash(sample_id))

    def record(self, ids: Iterable[str], event_id: str) -> None:
        """Record ids that an event is about to add (with a store), or just has (without)."""
        self._record(ids, event_id)

    def record_held(self, ids: Iterable[str]) -> None:
        """Record ids that were seen while the store held them already; an erasure later on does not make them new."""
        self._record(ids, None)

    def _record(self, ids: Iterable[str], event_id: str | None) -> None:
        hashes = [hash_ for hash_ in map(self._hash, ids) if not self._known(hash_)]
        self.hashes.update(hashes)
        if self.store is not None and hashes:
            path = self.store.path / SEEN_FILE
            head = "" if path.exists() else json.dumps({"key": self.key.hex()}) + "\n"
            line = json.dumps({"event_id": event_id, "ids": [h.hex() for h in hashes]})
            with path.open("a", encoding="ascii") as file:
                file.write(head + line + "\n")
                file.flush()
                os.fsync(file.fileno())

    def _read(self, store: SampleStore) -> None:
        """Read the file; a last line that is not whole, and lines whose event was never applied, are taken back."""
        path = store.path / SEEN_FILE
        if not path.exists():
            return
        *lines, torn = path.read_bytes().split(b"\n")
        applied = {None, *(entry.event_id for entry in store.history())}
        try:
            records = [json.loads(line) for line in lines]
            if records:
                self.key = bytes.fromhex(records[0]["key"])
            valid = [k for k, record in enumerate(records) if k == 0 or record["event_id"] in applied]
            self.hashes = {bytes.fromhex(h) for k in valid[1:] for h in records[k]["ids"]}
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} is damaged: {error}") from None
        if torn or len(valid) < len(lines):
            write_durably(path, b"".join(lines[k] + b"\n" for k in valid))

    def state_dict(self) -> dict[str, Any]:
        """Keyed hashes for a checkpoint; empty with a store, which has them."""
        sealed = self.sealed | {self._seal(hash_) for hash_ in self.hashes}
        if self.store is not None or not sealed:
            return {}
        parts = {"key": self.key, "sealed": b"".join(sorted(sealed))}
        return {name: bytes_to_tensor(part) for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        if self.store is not None:
            return
        parts = {name: tensor_to_bytes(part) for name, part in state.items()}
        self.key, self.hashes = parts.get("key", self.key), set()
        packed = parts.get("sealed", b"")
        self.sealed = {packed[i : i + ID_HASH_BYTES] for i in range(0, len(packed), ID_HASH_BYTES)}

    def __getstate__(self) -> dict[str, Any]:
        """Seal the hashes for pickling, as in a checkpoint."""
        if self.store is not None:
            return vars(self)
        return vars(self) | {"hashes": set(), "sealed": self.sealed | {self._seal(hash_) for hash_ in self.hashes}}
