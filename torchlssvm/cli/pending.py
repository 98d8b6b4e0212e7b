"""``torchlssvm pending`` and ``drop``: events that wait in a store for samples that have not come by."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.console import OK, command, emit, open_store

if TYPE_CHECKING:
    from torchlssvm.cli.console import Commands
    from torchlssvm.corrections.pending_events import Pending


def register(commands: Commands) -> None:
    """Add the commands to the parser."""
    text = "List the events that wait for samples which have not come by. They name them until they are answered or dropped."
    command(commands, "pending", run_pending, text)
    text = "Drop pending events that can never be answered. What they were to correct stays as it is."
    drop = command(commands, "drop", run_drop, text)
    drop.add_argument("event", nargs="+", metavar="EVENT", help="ids of events, see pending")


def run_pending(options: argparse.Namespace) -> int:
    """All of them, oldest first."""
    from torchlssvm.corrections.pending_events import PendingEvents

    with open_store(options, readonly=True) as store:
        found = list(PendingEvents(store))
    said = {"store": str(options.store), "pending": [told(p) for p in found]}
    emit(options, said, "\n".join(map(str, found)) if found else "no event is pending")
    return OK


def run_drop(options: argparse.Namespace) -> int:
    """Drop all that are named, or none."""
    from torchlssvm.corrections.pending_events import drop_pending

    with open_store(options) as store:
        dropped = drop_pending(store, options.event)
    said = {"store": str(options.store), "dropped": [told(p) for p in dropped]}
    emit(options, said, "\n".join(f"dropped: {p}" for p in dropped))
    return OK


def told(pending: Pending) -> dict[str, Any]:
    """A pending event as primitives, without features."""
    event = pending.event
    return {
        "event_id": event.event_id,
        "kind": type(event).__name__.lower(),
        "ids": None if event.ids is None else list(event.ids),
        "subject": None if event.ids is not None else event.subject,
        "kept_out": len(pending.kept_out),
        "standing": pending.standing,
    }
