"""Registration of checkpoints with a store, so that its certificates name the checkpoints older than an erasure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import CheckpointIO

from torchlssvm.store import SampleStore
from torchlssvm.store.certificate_issuer import lasting_name


class RegisteringCheckpointIO(CheckpointIO):
    """Writes checkpoints as the Trainer would, and registers them with the store.

    Every file has an entry, even after a crash: a new file is registered before it is written, and when an existing file is
    overwritten, its entry is updated afterwards. At worst, a crash in between leaves an entry that is not needed.
    """

    def __init__(self, inner: CheckpointIO, store: SampleStore):
        self.inner, self.store = inner, store

    @contextmanager
    def _open(self) -> Iterator[SampleStore]:
        """Open the store, even if it was opened for reading, or a finished run has closed it."""
        if not self.store.closed and not self.store.readonly:
            yield self.store
            return
        with SampleStore(self.store.path) as store:
            yield store

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint and register it."""
        position = self.store.head_position
        with self._open() as store:
            if lasting_name(path) not in store.certificates.checkpoints():
                store.register_checkpoint(path, position)
            self.inner.save_checkpoint(checkpoint, path, storage_options)
            store.register_checkpoint(path, position)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint as the inner plugin does."""
        return self.inner.load_checkpoint(path, *args, **options)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint and delete it from the store's list."""
        self.inner.remove_checkpoint(path)
        with self._open() as store:
            store.certificates.forget(path)

    def teardown(self) -> None:
        """Tear down the inner plugin."""
        self.inner.teardown()


def register_with(trainer: Trainer, store: SampleStore) -> None:
    """Register the checkpoints of this Trainer with the store from now on, on the rank that writes them."""
    io = trainer.strategy.checkpoint_io
    if isinstance(io, RegisteringCheckpointIO) and io.store.path == store.path:
        io = io.inner
    trainer.strategy.checkpoint_io = RegisteringCheckpointIO(io, store)
