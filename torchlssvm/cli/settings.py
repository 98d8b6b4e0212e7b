"""Settings that the command line keeps with a store: the names of its classes and the network its features come from.

Kept as a note of the store, so that it has the same durability and checksum as everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchlssvm.store import SampleStore

NOTE_NAME = "cli"


@dataclass
class Settings:
    """Names of classes and network. ``classes``: the names of labels 0, 1, ...; may be fewer than there are labels, or none."""

    classes: list[str] = field(default_factory=list)
    backbone: str | None = None
    weights: str | None = None

    def name(self, label: int) -> str:
        """Return the name of a label."""
        return self.classes[label] if 0 <= label < len(self.classes) else str(label)

    def label(self, text: str, classes: int) -> int:
        """Return the label that a text stands for: a name, or a number from 0."""
        text = text.strip()
        if text in self.classes:
            return self.classes.index(text)
        try:
            value = int(text)
        except ValueError:
            try:
                number = float(text)
            except ValueError:
                number = 0.5
            if not number.is_integer():
                known = (
                    f"the classes are {', '.join(map(repr, self.classes))}" if self.classes else "no class has a name"
                )
                raise ValueError(f"{text!r} is neither a class nor a number from 0 to {classes - 1}: {known}") from None
            value = int(number)
        if not 0 <= value < classes:
            raise ValueError(f"label {text} is out of range: the store has {classes} classes, 0 to {classes - 1}")
        return value

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


def load(store: SampleStore) -> Settings:
    """Load the settings of a store; one that was not made by the command line has none."""
    return Settings(**store.notes().get(NOTE_NAME, {}))


def is_initialized(store: SampleStore) -> bool:
    """Tell if the command line has made this store, and finished."""
    return NOTE_NAME in store.notes()


def save(store: SampleStore, settings: Settings) -> None:
    """Write the settings into the store."""
    store.set_note(NOTE_NAME, asdict(settings))


def learn_names(store: SampleStore, names: Sequence[str]) -> Settings:
    """Register the names of classes, under the write lock: another process may be doing the same."""
    classes = store.head.num_classes

    def learn(kept: dict[str, Any] | None) -> dict[str, Any]:
        settings = Settings(**(kept or {}))
        settings.learn_names(names, classes)
        return asdict(settings)

    return Settings(**store.update_note(NOTE_NAME, learn))
