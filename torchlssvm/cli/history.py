"""``torchlssvm history``: list the journal."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.store_folder import open_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    add_command(commands, "history", run_history, "List every event, after checking the chain they form.")


def run_history(options: argparse.Namespace) -> int:
    """Print all events, oldest first."""
    with open_store(options, readonly=True) as store:
        entries = store.history()
    names = ("position", "time", "kind", "samples", "event_id")
    events = [{name: getattr(e, name) for name in names} | {"chain": e.chain.hex()} for e in entries]
    lines = [f"{'':>6}  {'time (UTC)':<19}  {'kind':<8} {'samples':>8}  event"]
    lines += [f"{e.position:>6}  {e.time[:19]}  {e.kind:<8} {e.samples:>8}  {e.event_id}" for e in entries]
    emit(options, {"store": str(options.store), "events": events}, "\n".join(lines) if entries else "no event yet")
    return OK
