"""Events from the arguments of ``remove``, ``relabel`` and ``preview``, and their receipts as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import UsageError
from torchlssvm.errors import RemovalError

if TYPE_CHECKING:
    from torchlssvm.store import EventResult, SampleStore


def add_sample_selection(parser: argparse.ArgumentParser, event: bool = True) -> None:
    """Add the options ``--subject`` and ``--id``, of which one may be given, and ``--event-id`` for events that are kept."""
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--subject", action="append", metavar="S", help="all samples of this subject; may be repeated")
    whose.add_argument("--id", nargs="+", action="extend", metavar="I", help="samples by their ids")
    if event:
        text = "name of the event; one that was applied before changes nothing (default: a random one)"
        parser.add_argument("--event-id", metavar="E", help=text)


def add_request(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--request``, which stands for the names of a request."""
    parser.add_argument(
        "--request", metavar="R", help="the request this belongs to; without --subject and --id, all its names"
    )


def check_selection(options: argparse.Namespace) -> None:
    """Raise UsageError when neither samples nor a request are named."""
    if options.subject is None and options.id is None and options.request is None:
        raise UsageError("one of the arguments --subject --id --request is required")


def requested_targets(options: argparse.Namespace, store: SampleStore) -> list[dict[str, Any]]:
    """Return the keyword arguments that select each event's samples, where they may be those of a request."""
    if options.subject is not None or options.id is not None:
        return event_arguments(options)
    request = store.requests.get(options.request)
    if request.forgotten:
        raise ValueError(f"the request {request.id!r} is {request.state}, and its names are no longer kept")
    targets: list[dict[str, Any]] = [{"subject": s} for s in request.named("subject") if store.count_of(s)]
    held = [i for i in request.named("id") if i in store]
    subjects = {t["subject"] for t in targets}
    ids = [i for i, s in zip(held, store.get(held).subjects if held else [], strict=True) if s not in subjects]
    targets += [{"ids": ids}] if ids else []
    if not targets:
        raise RemovalError(
            f"nothing is held of those whom the request {request.id!r} names: answer it with torchlssvm request close "
            f"{options.store} {request.id} --answer TEXT"
        )
    return _with_event_id(options, targets)


def event_arguments(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the keyword arguments of each event, its samples and its id: one event for all ids, or one for each subject."""
    subjects = list(dict.fromkeys(options.subject or ()))
    return _with_event_id(options, [{"subject": name} for name in subjects] or [{"ids": options.id}])


def _with_event_id(options: argparse.Namespace, targets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ``--event-id``, if it is given, to the arguments of the only event."""
    name = getattr(options, "event_id", None)
    if name is None:
        return targets
    if len(targets) > 1:
        raise UsageError("--event-id goes with one subject: each subject is an event of its own")
    return [targets[0] | {"event_id": name}]


def receipts_to_json(receipts: Sequence[EventResult], store: SampleStore) -> dict[str, Any]:
    """Convert receipts to primitives, without the samples' secrets: the last one's values, all samples, and each event."""
    names = ("event_id", "kind", "position", "applied", "samples")
    events = [{name: getattr(receipt, name) for name in names} for receipt in receipts]
    said = events[-1] | {"applied": any(r.applied for r in receipts), "samples": sum(r.samples for r in receipts)}
    return said | {"digest": receipts[-1].digest, "remaining": len(store), "events": events}
