"""``torchlssvm request``: requests for erasure, from the day they arrive until they are answered."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import ID, SUBJECT, command, option
from torchlssvm.cli.console import emit, table
from torchlssvm.cli.samples import look_alikes
from torchlssvm.cli.store_access import open_store
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.store import ErasureRequest, SampleStore

STEP_WORDS = {
    "received": "entered here",
    "previewed": "effect looked at",
    "erased": "samples erased",
    "compacted": "bytes destroyed",
    "certified": "certificate written",
    "answered": "answered",
}
STATE_WORDS = STEP_WORDS | {
    "received": "received",
    "erased": "erased, bytes still to be destroyed",
    "compacted": "erased, bytes destroyed",
    "certified": "erased and certified",
}
REQUEST_ID = option("request", metavar="REQUEST", help="id of the request, see request list")


@command(
    "request open",
    "Open a request.",
    option("--request", metavar="R", help="id of the request, without names: it is kept for good (default: a new one)"),
    SUBJECT,
    ID,
    option("--received", metavar="DAY", help="when it arrived, e.g. 2026-05-31 (default: now)"),
    option("--due", metavar="DAY", help="last day to answer (default: one month after it arrived)"),
    option("--reason", default="", metavar="TEXT", help="legal basis or reason, without names"),
    option("--operator", default="", metavar="TEXT", help="who works on it"),
    changes="the request was opened",
)
def open_request(options: argparse.Namespace) -> int:
    """Open a request for subjects, samples or both."""
    with open_store(options) as store:
        made = store.requests.open(
            options.subject or [],
            options.id or [],
            request_id=options.request,
            received=options.received,
            due=options.due,
            reason=options.reason,
            operator=options.operator,
        )
        said = request_to_json(made) | {"held": held_names(store, made)}
        known = store.subjects()
    lines = [f"request {made.id}: received on {made.received[:10]}, an answer is due by {made.due} ({time_left(made)})"]
    lines += [f"  {name}: {counted(n, 'sample')} held" for name, n in said["held"].items()]
    lines += [f"  {line}" for name, n in said["held"].items() if not n for line in look_alikes(known, name)]
    lines.append(f"next: torchlssvm preview {options.store} --request {made.id}")
    return emit(options, said, lines)


@command("request list", "List all requests: overdue ones first, then by the day they are due.")
def list_requests(options: argparse.Namespace) -> int:
    """Print all requests, one in a line."""
    with open_store(options, readonly=True) as store:
        found = store.requests.all()
    width = max((len(r.id) for r in found), default=0)
    lines = [f"{r.id:<{width}}  due {r.due}  {time_left(r):<22}  {STATE_WORDS[r.state]}" for r in found]
    overdue = sum(r.overdue for r in found)
    if overdue:
        lines.insert(0, f"{counted(overdue, 'request')} overdue:")
    said = {"requests": [request_to_json(r) for r in found], "overdue": overdue}
    return emit(options, said, lines or "no requests")


@command("request show", "Show one request and the steps that were taken.", REQUEST_ID)
def show_request(options: argparse.Namespace) -> int:
    """Print one request."""
    with open_store(options, readonly=True) as store, store.view():
        found = store.requests.get(options.request)
        said = request_to_json(found) | {"held": held_names(store, found)}
    about = ", ".join(f"{name} ({counted(n, 'sample')} held)" for name, n in said["held"].items())
    forgotten = "names are no longer kept here: the receipt has them"
    rows: dict[str, Any] = {
        "request": found.id,
        "state": STATE_WORDS[found.state],
        "about": about or f"{counted(len(found.names), 'name')}; {forgotten}",
        "received": found.received[:10],
        "due by": f"{found.due} ({time_left(found)})",
        "reason": found.reason,
        "operator": found.operator,
        "answer": found.answer,
    }
    rows |= {STEP_WORDS[step]: at[:19].replace("T", " ") + " UTC" for step, at in said["steps"].items()}
    return emit(options, said, table({name: value for name, value in rows.items() if value}))


@command(
    "request close",
    "Note that a request was answered.",
    REQUEST_ID,
    option(
        "--answer", default="", metavar="TEXT", help="why it ends, if nothing was erased and certified; without names"
    ),
    changes="the request was closed",
)
def close_request(options: argparse.Namespace) -> int:
    """Close a request."""
    with open_store(options) as store:
        closed = store.requests.close(options.request, options.answer)
    late = -closed.days_left
    after = f", {counted(late, 'day')} after it was due" if late > 0 else ""
    return emit(
        options, request_to_json(closed), f"request {closed.id}: answered on {closed.steps['answered'][:10]}{after}"
    )


def held_names(store: SampleStore, request: ErasureRequest) -> dict[str, int]:
    """The names of a request that are still kept, and the number of samples held of each."""
    counts = {s: len(store.find(subject=s)) for s in request.named("subject")}
    return counts | {i: int(i in store) for i in request.named("id")}


def time_left(request: ErasureRequest) -> str:
    """The time until an answer is due, in words."""
    if not request.open:
        return f"answered {request.steps['answered'][:10]}"
    days = request.days_left
    if days < 0:
        return f"OVERDUE by {counted(-days, 'day')}"
    return "due today" if days == 0 else f"{counted(days, 'day')} left"


def request_to_json(request: ErasureRequest) -> dict[str, Any]:
    """Convert a request to primitives, without nonces; its steps in the order they were taken."""
    names = ("id", "state", "received", "due", "overdue", "reason", "operator", "events", "answer")
    said = {name: getattr(request, name) for name in names}
    said["names"] = [{"kind": n.kind, "name": n.name, "commitment": n.commitment} for n in request.names]
    return said | {"steps": dict(sorted(request.steps.items(), key=lambda step: step[1]))}
