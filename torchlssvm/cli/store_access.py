"""Open a store for a command, read the settings that the command line keeps in it, and check output files."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.console import one_line, progress, warn

if TYPE_CHECKING:
    from torchlssvm.store import SampleStore

STORE_LOG = logging.NullHandler()
"""Keeps the store's log off stderr; other handlers still receive it."""


def open_store(options: argparse.Namespace, readonly: bool = False) -> SampleStore:
    """Open the store of a command. Warnings are printed as one line on stderr."""
    from torchlssvm.errors import StoreError, SuppressedWarning
    from torchlssvm.files import holds_store
    from torchlssvm.store import SampleStore

    if not holds_store(options.store):
        raise StoreError(f"there is no store at {options.store}: make one with torchlssvm init")
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
    """Open the store with a progress bar that counts the samples read. ``passes`` is how often each sample is read."""
    with open_store(options, readonly) as store, progress(options, doing, passes * len(store)) as advance:
        store.table.on_read = advance
        yield store


# -- output files ------------------------------------------------------------------------------------------------------


def check_output(out: Path, overwrite: bool | None = None) -> None:
    """Raise ValueError if a file must not be written: it exists, its folder does not exist, or it is inside a store.

    ``overwrite`` is the value of ``--force``, or None for files that are never overwritten.
    """
    from torchlssvm.files import refuse_in_store

    if out.is_dir():
        raise ValueError(f"{out} is a folder: give the name of a file")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out.absolute().parent} is not a folder, so {out.name} cannot be written there")
    refuse_in_store(out)
    if os.path.lexists(out) and not overwrite:
        raise ValueError(
            f"{out} exists: choose another name{'' if overwrite is None else ', or overwrite it with --force'}"
        )


# -- settings ----------------------------------------------------------------------------------------------------------


@dataclass
class Settings:
    """The names of the classes and the network that computes the features, as stored in the note ``SETTINGS_NOTE``.

    ``classes`` holds the names of labels 0, 1, and so on. There may be fewer names than labels. ``network`` holds the options
    of :func:`torchlssvm.attach` for the layers that compute the features.
    """

    classes: list[str] = field(default_factory=list)
    backbone: str | None = None
    weights: str | None = None
    network: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, store: SampleStore) -> Settings:
        """Load the settings of a store. The settings of a store that was made in Python are empty."""
        from torchlssvm.store.database import SETTINGS_NOTE

        settings = cls(**(store.note(SETTINGS_NOTE) or {}))
        settings.classes = store.classes
        return settings

    def name(self, label: int) -> str:
        """Return the name of a label."""
        return self.classes[label] if 0 <= label < len(self.classes) else str(label)

    def label(self, text: str, classes: int, targets: str = "classes") -> int | float:
        """Return the label of a class. The text is the name of the class or its number from 0, or the number to be learned."""
        text = text.strip()
        if targets != "classes":
            with suppress(ValueError):
                if classes == 1:
                    return float(text)
            what = "a number" if classes == 1 else f"a row of {classes} numbers, in a .npy or .pt file (n, {classes})"
            raise ValueError(f"{text!r} is not {what}, which each sample of this store has (targets={targets!r})")
        if text in self.classes:
            return self.classes.index(text)
        try:
            number = float(text)
        except ValueError:
            number = 0.5
        if not number.is_integer():
            known = f"; the classes are {', '.join(map(repr, self.classes))}" if self.classes else ""
            raise ValueError(f"{text!r} is neither the name of a class nor a number from 0 to {classes - 1}{known}")
        if not 0 <= number < classes:
            raise ValueError(f"label {text} is out of range: the store has {classes} classes, 0 to {classes - 1}")
        return int(number)


def learn_names(store: SampleStore, names: Sequence[str]) -> Settings:
    """Give new class names the next free labels, in this order. If all names are numbers, they are the labels themselves."""
    classes = store.head.num_classes

    def learn(known: list[str]) -> list[str]:
        if not known and all(n.isdecimal() and str(int(n)) == n and int(n) < classes for n in names):
            return known
        new = [n for n in names if n not in known]
        if len(known) + len(new) > classes:
            raise ValueError(
                f"{', '.join(map(repr, new))} would make {len(known) + len(new)} classes; the store has {classes}"
                + (f": {', '.join(map(repr, known))}" if known else "")
            )
        return [*known, *new]

    store.name_classes(learn)  # it takes the write lock, since another process may do the same
    return Settings.load(store)
