"""The folder of a store, as the command line names it."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.progress_bar import ProgressBar

if TYPE_CHECKING:
    from torchlssvm.store import SampleStore

STORE_LOG = logging.NullHandler()
"""Takes the place of logging's last resort, which would print recoveries on stderr; other handlers still get them."""


def holds_store(folder: Path) -> bool:
    """Tell if a folder has the file of a store, readable or not."""
    from torchlssvm.store.database import DATABASE_FILE

    return os.path.lexists(folder / DATABASE_FILE)


def open_store(options: argparse.Namespace, readonly: bool = False) -> SampleStore:
    """Open the store that a command works on; its log stays off the terminal, where errors are one line."""
    from torchlssvm.errors import StoreError
    from torchlssvm.store import SampleStore

    if not holds_store(options.store):
        raise StoreError(f"there is no store at {options.store}: torchlssvm init makes one")
    logging.getLogger("torchlssvm.store").addHandler(STORE_LOG)
    return SampleStore(
        options.store,
        readonly=readonly,
        timeout=options.timeout,
        suppression_key=getattr(options, "suppression_key", None),
        erased=getattr(options, "erased", "refuse"),
    )


@contextmanager
def watched_store(options: argparse.Namespace, doing: str, readonly: bool = True) -> Iterator[SampleStore]:
    """Open the store with a progress bar that counts the samples read."""
    with open_store(options, readonly) as store, ProgressBar(options, doing) as bar:
        store.watch(bar.advance)
        yield store


def check_output(out: Path, store: Path, overwrite: bool) -> None:
    """Raise ValueError for a file that is a folder, inside a store, or there already and not to be overwritten."""
    if out.is_dir():
        raise ValueError(f"{out} is a folder: name a file in it")
    refuse_inside_store(out, store)
    if os.path.lexists(out) and not overwrite:
        raise ValueError(f"{out} is there already: choose another name, or --force")


def refuse_inside_store(out: Path, store: Path | None = None) -> None:
    """Raise ValueError when a file would be written into the folder of a store, this one or any other."""
    place = out.resolve()
    for folder in (place, *place.parents):
        if holds_store(folder) or (store is not None and folder == store.resolve()):
            raise ValueError(
                f"{out} is inside the store {folder}: files of others do not belong there, choose another place"
            )
