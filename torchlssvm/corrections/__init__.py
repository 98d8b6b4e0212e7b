"""Correct data in use: event sources, a corrector that applies each event once, and the samples that a run has seen."""

from torchlssvm.corrections.corrector import Corrector
from torchlssvm.corrections.event_sources import DeadLetters, as_source
from torchlssvm.corrections.waiting_events import EventOutcome, EventStatus

__all__ = ["Corrector", "DeadLetters", "EventOutcome", "EventStatus", "as_source"]
