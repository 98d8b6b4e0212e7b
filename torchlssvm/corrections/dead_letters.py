"""Events that could not be applied, kept in a file with the reasons."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torchlssvm.corrections.event_sources import Item
from torchlssvm.events import to_primitives
from torchlssvm.store.journal import now

__all__ = ["DeadLetters"]


class DeadLetters:
    """A JSONL file of events that could not be applied: time, reason and event. Mend one and feed it again under a new id.

    A run that is resumed may refuse the same thing for the same reason once more; it is written once.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._written: set[str] | None = None

    def write(self, item: Item, reason: str) -> None:
        """Append an event and the reason; both are on the disk when this returns."""
        letter = {"reason": reason, "event": item.raw if item.event is None else to_primitives(item.event)}
        key = json.dumps(letter, default=str)
        if self._written is None:
            self._written = self._read()
        if key in self._written:
            return
        self._written.add(key)
        line = json.dumps({"time": now(), **letter}, default=str)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> set[str]:
        """Read the letters of the file, without their times; a line cut short by a crash is passed over."""
        found: set[str] = set()
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []:
            try:
                letter = json.loads(line)
                found.add(json.dumps({"reason": letter["reason"], "event": letter["event"]}))
            except (ValueError, KeyError, TypeError):
                continue
        return found
