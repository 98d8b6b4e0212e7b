"""Samples that training has seen already, so that none is counted twice and none that was erased comes back.

A second epoch, the padding of a distributed sampler and a run that is resumed all show samples again. That a sample is held
says too little: one that was learned and then erased is not held, and must stay out. So each id that was seen is
kept, as a keyed hash. With a store the hashes are a file in its folder, written before the event and taken back if the
event did not make it into the journal; without one they go into the checkpoint, with the head.

The key stands beside them, for the run that is resumed. That file therefore shows whether an id was seen, and
``SampleStore.compact`` removes it, key and all. From then on only this process remembers what was erased, and a list of ids
must not: it would confirm a guess about an erased one. A number may stay, :class:`RunProgress`: batches of this run that are
learned. A sample that is not held and arrives in one of those batches was erased, and stays out. One that comes later in the
run's first epoch is new. In a second epoch everything has arrived before, so whatever is not held stays out. The number is
written in the same transaction as the samples of the batch: after a crash both are there, or neither.

A checkpoint without a store keeps the hashes: when an erasure must leave no trace of the id, use a store, or delete checkpoints
of runs that are over.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchlssvm.errors import StoreError
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.functional.sample_identity import FINGERPRINT_BYTES, id_hash, shared_key
from torchlssvm.store import UNTIL_COMPACTION, SampleStore
from torchlssvm.store.snapshots import write_durably

__all__ = ["RunProgress", "SeenSamples", "may_have_forgotten"]

SEEN_FILE = f"offered{UNTIL_COMPACTION}"
"""The file in a store's folder."""

RUN_NOTE_PREFIX = "training/"
"""Names of the notes of a store that hold the progress of runs begin with this."""


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
        self.key: bytes | None = None  # of this file, or of the checkpoint that was loaded; ranks share one
        if store is not None:
            self.key = secrets.token_bytes(FINGERPRINT_BYTES)
            self._read(store)

    def _hash(self, sample_id: str) -> bytes:
        if self.key is None:  # not the ranks' own key, which is never written
            self.key = hashlib.blake2b(b"seen samples", digest_size=FINGERPRINT_BYTES, key=shared_key()).digest()
        return id_hash(sample_id, self.key)

    def new(self, ids: Sequence[str]) -> list[int]:
        """Return the places of the ids that were not seen before, each id once."""
        found = {self._hash(ids[k]): k for k in reversed(range(len(ids)))}
        held = [] if self.store is None else [h for h, k in found.items() if ids[k] in self.store]
        return sorted(found[h] for h in found.keys() - self.hashes - set(held))

    def __contains__(self, sample_id: str) -> bool:
        """True if a sample with this id was seen."""
        return self._hash(sample_id) in self.hashes

    def record(self, ids: Iterable[str], event_id: str | None = None) -> None:
        """Record ids that an event is about to add (with a store), or just has (without).

        Without an event: ids that were seen while the store held them already; an erasure later on does not make them new.
        """
        hashes = dict.fromkeys(h for h in map(self._hash, ids) if h not in self.hashes)
        self.hashes.update(hashes)
        if self.store is not None and self.key is not None and hashes:
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
        """Key and hashes for a checkpoint; empty with a store, which has them."""
        if self.store is not None or not self.hashes or self.key is None:
            return {}
        return {"key": bytes_to_tensor(self.key), "hashes": bytes_to_tensor(b"".join(sorted(self.hashes)))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        if self.store is None:
            packed = tensor_to_bytes(state["hashes"]) if state else b""
            self.key = tensor_to_bytes(state["key"]) if state else None
            self.hashes = {packed[i : i + FINGERPRINT_BYTES] for i in range(0, len(packed), FINGERPRINT_BYTES)}


@dataclass(frozen=True)
class RunProgress:
    """Epoch and batches that a run has learned.

    Args:
        run: its random name, which its checkpoints carry.
        start: the number of events in the store when it began.
        first: its first epoch.
        epoch, batches: the epoch it is in, and how many batches of that are learned, on each rank.
        loader: the loader's order, ranks and batch size, on which the content of a batch depends; None until the first batch.

    >>> progress = RunProgress("r", start=0).after(0, 4)
    >>> progress.batches, progress.passed(0, 4), progress.passed(0, 5), progress.passed(1, 9)
    (5, True, False, True)
    >>> progress.after(0, 2) == progress  # a resumed run goes over batches again: it never goes back
    True
    """

    run: str
    start: int
    first: int = 0
    epoch: int = 0
    batches: int = 0
    loader: dict[str, Any] | None = None

    @classmethod
    def begin(cls, store: SampleStore, epoch: int) -> RunProgress:
        """Begin a new run, which the store knows from now on."""
        progress = cls(new_run_name(), store.position, epoch, epoch)
        store.apply([], notes=progress.note())
        return progress

    @classmethod
    def resume(cls, store: SampleStore, run: str) -> RunProgress:
        """Resume the run of a checkpoint, as far as the store has learned it. StoreError for one it knows nothing of."""
        saved = store.note(RUN_NOTE_PREFIX + run)
        if saved is None:
            raise StoreError(
                f"the store at {store.path} knows nothing of the run {run!r} that the checkpoint is from: resume with its own "
                "store, or fit without ckpt_path, which offers all samples to this one"
            )
        return cls(run, **saved)

    def note(self) -> dict[str, Any]:
        """Make the note for ``store.apply(events, notes=...)``."""
        saved = asdict(self)
        return {RUN_NOTE_PREFIX + saved.pop("run"): saved}

    def passed(self, epoch: int, batch: int) -> bool:
        """True if every sample of this batch has arrived in this run before."""
        return epoch != self.first or (self.epoch, self.batches) > (epoch, batch)

    def after(self, epoch: int, batch: int) -> RunProgress:
        """Return the progress once this batch is learned."""
        return replace(self, epoch=epoch, batches=batch + 1) if (epoch, batch) >= (self.epoch, self.batches) else self


def may_have_forgotten(store: SampleStore, start: int = 0) -> bool:
    """True if samples were erased after ``start`` of which a compaction may have removed the last trace."""
    return store.compacted > start and any(e.kind == "remove" for e in store.history()[start:])


def new_run_name() -> str:
    """Make a random name of 64 bits, which tells the runs of one store apart."""
    return secrets.token_hex(8)
