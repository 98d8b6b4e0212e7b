"""Correcting data while it is in use: where events come from, how each is applied once, and what a run has seen."""

from torchlssvm.corrections.corrector import Corrector, DeadLetters, Outcome

__all__ = ["Corrector", "DeadLetters", "Outcome"]
