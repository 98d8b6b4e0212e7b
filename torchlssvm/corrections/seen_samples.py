"""The ids of samples that training has seen, so that no sample counts twice and no erased sample comes back.

The same samples arrive again in a second epoch, as padding of a distributed sampler, and in a resumed run. Among them may be a
sample that was learned and then erased, which must not be learned again. Each id that was seen is therefore kept as a keyed
hash, in a file in the folder of the store or, without a store, in the checkpoint. An id is written before its event, and
discarded if the event did not reach the journal.

Hashes and key together reveal whether an id was seen, so ``SampleStore.compact`` removes the file. From then on, nobody can
tell which samples were erased, so a run that began before the compaction cannot be resumed (:func:`resume_run`), unless the
store has a suppression list. A checkpoint without a store keeps the hashes, so delete the checkpoints of finished runs.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from torchlssvm.errors import StoreDiskError, StoreError
from torchlssvm.events import check_text
from torchlssvm.files import append, replacement
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.functional.sample_identity import HASH_BYTES, id_hash
from torchlssvm.store import UNTIL_COMPACTION, SampleStore

__all__ = ["SeenSamples", "begin_run", "may_have_forgotten", "resume_run"]

SEEN_FILE = f"offered{UNTIL_COMPACTION}"
"""The file in a store's folder."""

RUN_NOTE_PREFIX = "training/"
"""Names of the notes of a store that hold the start of a run begin with this."""


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
        self.key = secrets.token_bytes(HASH_BYTES)  # one key per run, so that hashes do not link two runs
        if store is not None:
            self._read(store)

    def _hash(self, sample_id: str) -> bytes:
        return id_hash(check_text(sample_id, "an id"), self.key)

    def new(self, ids: Sequence[str]) -> list[int]:
        """Return the indices of the ids that were not seen before, each id once."""
        found = {self._hash(ids[k]): k for k in reversed(range(len(ids)))}
        held = [] if self.store is None else [h for h, k in found.items() if ids[k] in self.store]
        return sorted(found[h] for h in found.keys() - self.hashes - set(held))

    def __contains__(self, sample_id: str) -> bool:
        """True if a sample with this id was seen."""
        return self._hash(sample_id) in self.hashes

    def record(self, ids: Iterable[str], event_id: str | None = None) -> None:
        """Record ids that an event is about to add (with a store) or has just added (without a store).

        Without an event, record ids that were seen while the store already held them. A later erasure does not make these ids
        new.
        """
        hashes = dict.fromkeys(h for h in map(self._hash, ids) if h not in self.hashes)
        if self.store is not None and hashes:
            path = self.store.path / SEEN_FILE
            head = "" if path.exists() and path.stat().st_size else json.dumps({"key": self.key.hex()}) + "\n"
            name = None if event_id is None else self.store.recorded_id(event_id)
            line = json.dumps({"event_id": name, "ids": [h.hex() for h in hashes]})
            try:
                append(path, head + line + "\n")
            except OSError as error:
                raise StoreDiskError(f"{path}: {error}. Nothing was changed.") from error
        self.hashes.update(hashes)

    def take_back(self, ids: Iterable[str]) -> None:
        """Take back ids that were recorded for an event which then failed. The file is put right when it is next read."""
        self.hashes.difference_update(map(self._hash, ids))

    def _read(self, store: SampleStore) -> None:
        """Read the file. An incomplete last line, and lines whose event was never applied, are discarded."""
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
            with replacement(path) as new:
                new.write_bytes(b"".join(lines[k] + b"\n" for k in valid))

    def state_dict(self) -> dict[str, Any]:
        """Key and hashes for a checkpoint. It is empty with a store, which keeps them itself."""
        if self.store is not None or not self.hashes:
            return {}
        return {"key": bytes_to_tensor(self.key), "hashes": bytes_to_tensor(b"".join(sorted(self.hashes)))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        if self.store is None:
            packed = tensor_to_bytes(state["hashes"]) if state else b""
            self.key = tensor_to_bytes(state["key"]) if state else self.key
            self.hashes = {packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)}


def begin_run(store: SampleStore | None) -> str:
    """Begin a run and record its start in the store; return a random name that the checkpoints of the run contain."""
    name = secrets.token_hex(8)
    if store is not None:
        store.set_note(RUN_NOTE_PREFIX + name, store.position)
    return name


def resume_run(store: SampleStore, name: str) -> None:
    """Raise StoreError if the store does not know a run, or no longer knows which samples were erased since its start."""
    start = store.note(RUN_NOTE_PREFIX + name)
    if start is None:
        raise StoreError(
            f"the store at {store.path} has no record of the run {name!r}, which wrote the checkpoint. Resume with the store "
            "of that run, or fit without ckpt_path, which adds all samples to this store"
        )
    if may_have_forgotten(store, start) and store.suppression.path is None:
        raise StoreError(
            f"samples were erased from {store.path} since this run began, and after a compaction nobody knows which ones, so "
            "a resumed run could learn them again. Take them out of the data set and fit without ckpt_path (a sample that the "
            "store holds is not learned twice), or keep a suppression list, which names those erased on request"
        )


def may_have_forgotten(store: SampleStore, start: int = 0) -> bool:
    """True if samples were erased after ``start`` and a compaction may have removed their last trace."""
    return store.compacted > start and any(e.kind == "remove" for e in store.history()[start:])
