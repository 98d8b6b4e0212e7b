"""The store that a command works on: opening it, the settings that the command line keeps in it, and files beside it."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.console import one_line, progress, warn

if TYPE_CHECKING:
    from torchlssvm.store import SampleStore

STORE_LOG = logging.NullHandler()
"""Replaces logging's last resort, which would print recoveries on stderr; other handlers still get them."""

SETTINGS_NOTE = "cli"
"""Note of the store that holds the :class:`Settings`, with the durability and checksum of everything else there."""


def holds_store(folder: Path) -> bool:
    """Tell if a folder has the file of a store, readable or not."""
    from torchlssvm.store.database import DATABASE_FILE

    return os.path.lexists(folder / DATABASE_FILE)


def open_store(options: argparse.Namespace, readonly: bool = False) -> SampleStore:
    """Open the store that a command works on; its log stays off the terminal, where errors are one line."""
    from torchlssvm.errors import StoreError, SuppressedWarning
    from torchlssvm.store import SampleStore

    if not holds_store(options.store):
        raise StoreError(f"there is no store at {options.store}: torchlssvm init makes one")
    logging.getLogger("torchlssvm.store").addHandler(STORE_LOG)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *place: warn(f"torchlssvm: warning: {one_line(Exception(message))}")
        warnings.simplefilter("always", SuppressedWarning)
        return SampleStore(
            options.store,
            readonly=readonly,
            timeout=options.timeout,
            suppression_key=getattr(options, "suppression_key", None),
            erased=getattr(options, "erased", "refuse"),
        )


@contextmanager
def watched_store(
    options: argparse.Namespace, doing: str, readonly: bool = True, passes: int = 1
) -> Iterator[SampleStore]:
    """Open the store with a progress bar that moves as samples are read. ``passes``: how often each sample is read."""
    with open_store(options, readonly) as store, progress(options, doing, passes * len(store)) as advance:
        store.table.on_read = advance
        yield store


# -- files beside it ---------------------------------------------------------------------------------------------------


def check_output(out: Path, store: Path | None = None, overwrite: bool | None = None) -> None:
    """Raise ValueError if a file cannot be written: it exists, its folder does not, or it is inside a store.

    ``overwrite``: True or False as ``--force`` was given; None for files that are never overwritten.
    """
    if out.is_dir():
        raise ValueError(f"{out} is a folder: name a file in it")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out.absolute().parent} is not a folder: {out.name} cannot be written there")
    refuse_inside_store(out, store)
    if os.path.lexists(out) and not overwrite:
        raise ValueError(f"{out} exists already: choose another name{'' if overwrite is None else ', or --force'}")


def refuse_inside_store(out: Path, store: Path | None = None) -> None:
    """Raise ValueError when a file would be written into the folder of a store, this one or any other."""
    place = out.resolve()
    for folder in (place, *place.parents):
        if holds_store(folder) or (store is not None and folder == store.resolve()):
            raise ValueError(
                f"{out} is inside the store {folder}: other files do not belong there, choose another place"
            )


# -- settings ----------------------------------------------------------------------------------------------------------


@dataclass
class Settings:
    """Names of the classes, and the network that features come from.

    ``classes``: the names of labels 0, 1, ...; there may be fewer of them than labels, or none at all. ``network``: options
    of :func:`torchlssvm.attach` for the layers that features come from.
    """

    classes: list[str] = field(default_factory=list)
    backbone: str | None = None
    weights: str | None = None
    network: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, store: SampleStore) -> Settings:
        """Load the settings of a store; one that was not made by the command line has none."""
        settings = cls(**(store.note(SETTINGS_NOTE) or {}))
        settings.classes = store.classes
        return settings

    def name(self, label: int) -> str:
        """Return the name of a label."""
        return self.classes[label] if 0 <= label < len(self.classes) else str(label)

    def label(self, text: str, classes: int) -> int:
        """Return the label that a text stands for: a name, or a number from 0."""
        text = text.strip()
        if text in self.classes:
            return self.classes.index(text)
        try:
            number = float(text)
        except ValueError:
            number = 0.5
        if not number.is_integer():
            known = f"the classes are {', '.join(map(repr, self.classes))}" if self.classes else "no class has a name"
            raise ValueError(f"{text!r} is neither a class nor a number from 0 to {classes - 1}: {known}")
        if not 0 <= number < classes:
            raise ValueError(f"label {text} is out of range: the store has {classes} classes, 0 to {classes - 1}")
        return int(number)

    def learn_names(self, names: Sequence[str], classes: int) -> None:
        """Give names that are new the next free labels, in this order; numbers from 0 may stand for themselves."""
        if not self.classes and all(n.isdecimal() and str(int(n)) == n and int(n) < classes for n in names):
            return
        new = [n for n in names if n not in self.classes]
        if len(self.classes) + len(new) > classes:
            raise ValueError(
                f"{', '.join(map(repr, new))} would make {len(self.classes) + len(new)} classes; the store has {classes}"
                + (f": {', '.join(map(repr, self.classes))}" if self.classes else "")
            )
        self.classes += new


def learn_names(store: SampleStore, names: Sequence[str]) -> Settings:
    """Register the names of classes, under the write lock: another process may be doing the same."""
    classes = store.head.num_classes

    def learn(known: list[str]) -> list[str]:
        settings = Settings(known)
        settings.learn_names(names, classes)
        return settings.classes

    store.name_classes(learn)
    return Settings.load(store)
