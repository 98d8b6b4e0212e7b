"""``torchlssvm pending``: list the events that wait in a store for their samples."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.store_folder import open_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands
    from torchlssvm.corrections.pending_events import Pending


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = "List the events that wait for samples not learned yet. They name those samples until they are answered or dropped."
    add_command(commands, "pending", run_pending, text)


def run_pending(options: argparse.Namespace) -> int:
    """Print the pending events, oldest first."""
    from torchlssvm.corrections.pending_events import PendingEvents

    with open_store(options, readonly=True) as store:
        found = list(PendingEvents(store))
    said = {"store": str(options.store), "pending": [pending_to_json(p) for p in found]}
    emit(options, said, "\n".join(map(str, found)) if found else "no event is pending")
    return OK


def pending_to_json(pending: Pending) -> dict[str, Any]:
    """Convert a pending event to primitives, without features."""
    event = pending.event
    return {
        "event_id": event.event_id,
        "kind": type(event).__name__.lower(),
        "ids": None if event.ids is None else list(event.ids),
        "subject": None if event.ids is not None else event.subject,
        "on_watch": pending.applied > 0,
    }
