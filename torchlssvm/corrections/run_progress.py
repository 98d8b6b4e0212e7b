"""Progress of a training run through its data, kept in the store with the samples it learned.

Ids tell which samples a run has seen, as long as they are kept. After an erasure and a compaction they are not, and must not
be: a list of ids would confirm a guess about an erased one. A number may stay: of this run, so many batches are learned.
A sample that is not held and arrives in one of those batches was erased, and stays out. One that comes
later in the run's first epoch is new. In a second epoch everything has arrived before, so whatever is not held stays out.

The number is written in the same transaction as the samples of the batch: after a crash both are there, or neither.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchlssvm.errors import StoreError
from torchlssvm.store import SampleStore

__all__ = ["RUN_NAME_BYTES", "RunProgress", "may_have_forgotten"]

RUN_NAME_BYTES = 8
"""Random bytes of a run's name: 64 bits tell the runs of one store apart."""

RUN_NOTE_PREFIX = "training/"
"""Names of the notes of a store that hold the progress of runs begin with this."""


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
        progress = cls(secrets.token_hex(RUN_NAME_BYTES), store.position, epoch, epoch)
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
