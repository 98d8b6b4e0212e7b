"""Write files outside stores, so that readers see either the old content or the new content, never a part."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DATABASE_FILE = "samples.sqlite"
"""Every folder with a file of this name is a store."""


def holds_store(folder: Path) -> bool:
    """True if a folder contains the file of a store, readable or not."""
    return os.path.lexists(folder / DATABASE_FILE)


def refuse_in_store(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if a path is inside a store. Keys, lists, receipts and exports there would be copied with the store."""
    place = Path(path).resolve()
    folder = next((folder for folder in (place, *place.parents) if holds_store(folder)), None)
    if folder is not None:
        raise ValueError(
            f"{os.fspath(path)} is inside the store {folder}, which must contain no other files: choose another folder"
        )


def sync_folder(path: Path) -> None:
    """Make a new or removed name in a folder durable."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def append(path: Path, text: str) -> None:
    """Append to a file that only its owner can read, and put it on the disk. After an error the file is as it was."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0) as file:
        size, data = file.tell(), text.encode()
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(size)
            raise


@contextmanager
def replacement(path: str | os.PathLike[str], *, private: bool = False, sync: bool = True) -> Iterator[Path]:
    """Yield the path of a new file, which replaces ``path`` when the context ends, or is removed after an error.

    Args:
        path: the file, which need not exist.
        private: create the new file so that only its owner can read it.
        sync: the file is on the disk when the context has ended. With False it may be incomplete after a power failure: use
            this only for files that are checked when they are read.
    """
    target = Path(path)
    new = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        if private:
            os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield new
        if sync:
            with open(new, "r+b") as file:
                os.fsync(file.fileno())
        new.replace(target)
    except BaseException:
        new.unlink(missing_ok=True)  # no incomplete file stays, and a full disk needs its space
        raise
    if sync:
        sync_folder(target.absolute().parent)
