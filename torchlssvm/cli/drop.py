"""``torchlssvm drop``: give up pending events."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.pending import pending_to_json
from torchlssvm.cli.store_folder import open_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = "Drop pending events that can never be answered. The samples they name stay as they are."
    drop = add_command(commands, "drop", run_drop, text, changes="the events were dropped")
    drop.add_argument("event", nargs="+", metavar="EVENT", help="ids of events, see pending")


def run_drop(options: argparse.Namespace) -> int:
    """Drop all events named, or none."""
    from torchlssvm.corrections.pending_events import drop_pending

    with open_store(options) as store:
        dropped = drop_pending(store, options.event)
    said = {"store": str(options.store), "dropped": [pending_to_json(p) for p in dropped]}
    emit(options, said, "\n".join(f"dropped: {p}" for p in dropped))
    return OK
