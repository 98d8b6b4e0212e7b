"""Where a training run stands in its data, kept in the store with the samples it learned.

Ids tell whether a sample was offered before, as long as somebody remembers them. After an erasure and a compaction nobody
does, and must not: a list of ids would confirm a guess about an erased one. What may stay is a number: of this run, so many
batches are learned. A sample that is not held and comes by in one of those batches was erased, and stays out. One that comes
later in the run's first epoch is new. In a second epoch everything has come by before, so whatever is not held stays out.

The number is written in the same transaction as the samples of the batch: after a crash both are there, or neither.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchlssvm.errors import StoreError
from torchlssvm.store import SampleStore

__all__ = ["RunProgress", "forgets"]

NOTE = "training/"


@dataclass(frozen=True)
class RunProgress:
    """How far a run is.

    Args:
        run: its random name, which its checkpoints carry.
        start: the number of events in the store when it began.
        first: its first epoch.
        epoch, batches: the epoch it is in, and how many batches of that are learned, on each rank.
        loader: what the content of a batch hangs on: order, ranks, batch size; None until the first batch.

    >>> cursor = RunProgress("r", start=0).after(0, 4)
    >>> cursor.batches, cursor.passed(0, 4), cursor.passed(0, 5), cursor.passed(1, 9)
    (5, True, False, True)
    >>> cursor.after(0, 2) == cursor  # a resumed run goes over batches again: it never goes back
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
        """A new run, which the store knows from now on."""
        cursor = cls(secrets.token_hex(8), store.position, epoch, epoch)
        store.apply([], notes=cursor.note())
        return cursor

    @classmethod
    def resume(cls, store: SampleStore, run: str) -> RunProgress:
        """The run of a checkpoint, as far as the store has learned it. StoreError for one it knows nothing of."""
        saved = store.note(NOTE + run)
        if saved is None:
            raise StoreError(
                f"the store at {store.path} knows nothing of the run {run!r} that the checkpoint is from: resume with its own "
                "store, or fit without ckpt_path, which offers all samples to this one"
            )
        return cls(run, **saved)

    def note(self) -> dict[str, Any]:
        """For ``store.apply(events, notes=...)``."""
        saved = asdict(self)
        return {NOTE + saved.pop("run"): saved}

    def passed(self, epoch: int, batch: int) -> bool:
        """Whether every sample of this batch has come by in this run before."""
        return epoch != self.first or (self.epoch, self.batches) > (epoch, batch)

    def after(self, epoch: int, batch: int) -> RunProgress:
        """The cursor when this batch is learned."""
        return replace(self, epoch=epoch, batches=batch + 1) if (epoch, batch) >= (self.epoch, self.batches) else self


def forgets(store: SampleStore, start: int = 0) -> bool:
    """Whether samples were erased after ``start`` of which a compaction may have removed the last trace."""
    return store.compacted > start and any(e.kind == "remove" for e in store.history()[start:])
