"""Outcome of one event: applied, repeated, held or refused."""

from __future__ import annotations

from dataclasses import dataclass

from torchlssvm.events import Event

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """Result of an event: "applied", "repeated" (its id came before), "held" or "refused", with the reason.

    "watched": an event for a subject, applied before, was applied to samples that came later.
    """

    event_id: str
    kind: str
    samples: int
    status: str
    reason: str = ""
    error: type[Exception] | None = None
    """The type of the error, if the event was refused."""

    @classmethod
    def of(cls, event: Event, status: str, samples: int = 0) -> Outcome:
        """Make the outcome of an event."""
        return cls(event.event_id, event.kind, samples, status)

    @classmethod
    def refusal(cls, event: Event, error: Exception) -> Outcome:
        """Make the outcome of an event that cannot be applied."""
        return cls(event.event_id, event.kind, 0, "refused", f"{type(error).__name__}: {error}", type(error))
