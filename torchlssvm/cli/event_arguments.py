"""Events from the arguments of ``remove``, ``relabel`` and ``preview``, and their receipts as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import UsageError

if TYPE_CHECKING:
    from torchlssvm.store import Receipt, SampleStore

EVENT_ID_HELP = "name of the event; one that was applied before changes nothing (default: a random one)"


def add_sample_selection(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the options ``--subject`` and ``--id``, of which one is given."""
    whose = parser.add_mutually_exclusive_group(required=required)
    whose.add_argument("--subject", action="append", metavar="S", help="all samples of this subject; may be repeated")
    whose.add_argument("--id", nargs="+", action="extend", metavar="I", help="samples by their ids")


def event_id(options: argparse.Namespace) -> dict[str, str]:
    """Return ``--event-id`` as a keyword argument of an event; empty without it."""
    if options.event_id is not None and len(options.subject or ()) > 1:
        raise UsageError("--event-id goes with one subject: each subject is an event of its own")
    return {} if options.event_id is None else {"event_id": options.event_id}


def event_targets(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the keyword arguments that select each event's samples: one event for all ids, or one for each subject."""
    if options.subject is None:
        return [{"ids": options.id}]
    options.subject = list(dict.fromkeys(options.subject))
    return [{"subject": name} for name in options.subject]


def receipts_to_json(receipts: Sequence[Receipt], store: SampleStore) -> dict[str, Any]:
    """Convert receipts to primitives, without the samples' secrets: the last one's values, all samples, and each event."""
    names = ("event_id", "kind", "position", "applied", "samples")
    events = [{name: getattr(receipt, name) for name in names} for receipt in receipts]
    said = events[-1] | {"applied": any(r.applied for r in receipts), "samples": sum(r.samples for r in receipts)}
    return said | {"digest": receipts[-1].digest, "remaining": len(store), "events": events}
