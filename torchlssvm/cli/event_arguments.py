"""Events from the arguments of ``remove``, ``relabel`` and ``preview``, and their receipts as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import UsageError

if TYPE_CHECKING:
    from torchlssvm.store import Receipt, SampleStore


def add_sample_selection(parser: argparse.ArgumentParser, required: bool = True, event: bool = True) -> None:
    """Add the options ``--subject`` and ``--id``, of which one is given, and ``--event-id`` for events that are kept."""
    whose = parser.add_mutually_exclusive_group(required=required)
    whose.add_argument("--subject", action="append", metavar="S", help="all samples of this subject; may be repeated")
    whose.add_argument("--id", nargs="+", action="extend", metavar="I", help="samples by their ids")
    if event:
        text = "name of the event; one that was applied before changes nothing (default: a random one)"
        parser.add_argument("--event-id", metavar="E", help=text)


def event_arguments(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the keyword arguments of each event, its samples and its id: one event for all ids, or one for each subject."""
    subjects = list(dict.fromkeys(options.subject or ()))
    whose = [{"subject": name} for name in subjects] or [{"ids": options.id}]
    name = getattr(options, "event_id", None)
    if name is None:
        return whose
    if len(whose) > 1:
        raise UsageError("--event-id goes with one subject: each subject is an event of its own")
    return [whose[0] | {"event_id": name}]


def receipts_to_json(receipts: Sequence[Receipt], store: SampleStore) -> dict[str, Any]:
    """Convert receipts to primitives, without the samples' secrets: the last one's values, all samples, and each event."""
    names = ("event_id", "kind", "position", "applied", "samples")
    events = [{name: getattr(receipt, name) for name in names} for receipt in receipts]
    said = events[-1] | {"applied": any(r.applied for r in receipts), "samples": sum(r.samples for r in receipts)}
    return said | {"digest": receipts[-1].digest, "remaining": len(store), "events": events}
