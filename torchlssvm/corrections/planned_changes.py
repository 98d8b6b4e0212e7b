"""Effects of a burst of events, known before it is applied."""

from __future__ import annotations

from torchlssvm.corrections.pending_events import Pending
from torchlssvm.events import Add, Event, Remove

__all__ = ["PlannedChanges"]


class PlannedChanges:
    """Effects of the events of a burst: which samples are then held or gone, their subjects, and which events wait."""

    def __init__(self) -> None:
        self.held: dict[str, bool] = {}
        self.subjects: set[str] = set()
        self._waiting: set[tuple[str, str]] = set()

    def apply(self, event: Event) -> None:
        """Note an event that is to be applied."""
        if isinstance(event, Add):
            self.held |= dict.fromkeys(event.ids, True)
            self.subjects |= {s for s in event.subjects if s is not None}
        elif isinstance(event, Remove):
            self.held |= dict.fromkeys(event.ids or (), False)

    def hold(self, event: Event) -> None:
        """Note an event that is held, and with it those behind it that name the same samples."""
        self._waiting.update(Pending(event, "").names)

    def waits(self, name: tuple[str, str]) -> bool:
        """True if an event waits for this sample or subject."""
        return name in self._waiting
