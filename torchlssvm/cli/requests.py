"""``torchlssvm request``: requests for erasure, from the day they arrive to the answer."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import ID, SUBJECT, command, option
from torchlssvm.cli.console import emit, table
from torchlssvm.cli.samples import look_alikes
from torchlssvm.cli.store_access import open_store
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.store import ErasureRequest, SampleStore

STEP_WORDS = {
    "received": "entered",
    "previewed": "previewed",
    "erased": "samples erased",
    "compacted": "bytes destroyed",
    "certified": "certificate written",
    "answered": "answered",
}
STATE_WORDS = STEP_WORDS | {
    "received": "received",
    "erased": "erased, bytes not yet destroyed",
    "compacted": "erased, bytes destroyed",
    "certified": "erased and certified",
}
REQUEST_ID = option("request", metavar="REQUEST", help="id of the request (see request list)")


@command(
    "request open",
    "Open a request.",
    option(
        "--request", metavar="R", help="id of the request, which is kept forever: do not use a name (default: a new id)"
    ),
    SUBJECT,
    ID,
    option("--received", metavar="DAY", help="day the request arrived, e.g. 2026-05-31 (default: today)"),
    option("--due", metavar="DAY", help="last day for the answer (default: one month after it arrived)"),
    option("--reason", default="", metavar="TEXT", help="legal basis or reason; do not use names"),
    option("--operator", default="", metavar="TEXT", help="person who handles the request"),
    changes="the request was opened",
)
def open_request(options: argparse.Namespace) -> int:
    """Open a request that names subjects, samples or both."""
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
    lines = [f"request {made.id}: received on {made.received[:10]}, due on {made.due} ({time_left(made)})"]
    lines += [f"  {name}: {counted(n, 'sample')}" for name, n in said["held"].items()]
    lines += [f"  {line}" for name, n in said["held"].items() if not n for line in look_alikes(known, name)]
    lines.append("next: " + shlex.join(["torchlssvm", "preview", str(options.store), "--request", made.id]))
    return emit(options, said, lines)


@command("request list", "List all requests: overdue ones first, then by due date.")
def list_requests(options: argparse.Namespace) -> int:
    """Print all requests, one per line."""
    with open_store(options, readonly=True) as store:
        found = store.requests.all()
    width = max((len(r.id) for r in found), default=0)
    lines = [f"{r.id:<{width}}  due {r.due}  {time_left(r):<22}  {STATE_WORDS[r.state]}" for r in found]
    overdue = sum(r.overdue for r in found)
    if overdue:
        lines.insert(0, f"{counted(overdue, 'request')} overdue:")
    said = {"requests": [request_to_json(r) for r in found], "overdue": overdue}
    return emit(options, said, lines or "no requests")


@command("request show", "Show one request and the steps taken.", REQUEST_ID)
def show_request(options: argparse.Namespace) -> int:
    """Print one request."""
    with open_store(options, readonly=True) as store, store.view():
        found = store.requests.get(options.request)
        said = request_to_json(found) | {"held": held_names(store, found)}
    about = ", ".join(f"{name} ({counted(n, 'sample')})" for name, n in said["held"].items())
    forgotten = "no longer kept here; see the receipt"
    rows: dict[str, Any] = {
        "request": found.id,
        "state": STATE_WORDS[found.state],
        "about": about or f"{counted(len(found.names), 'name')}, {forgotten}",
        "received": found.received[:10],
        "due": f"{found.due} ({time_left(found)})",
        "reason": found.reason,
        "operator": found.operator,
        "answer": found.answer,
    }
    rows |= {STEP_WORDS[step]: at[:19].replace("T", " ") + " UTC" for step, at in said["steps"].items()}
    return emit(options, said, table({name: value for name, value in rows.items() if value}))


@command(
    "request close",
    "Record that a request was answered.",
    REQUEST_ID,
    option(
        "--answer", default="", metavar="TEXT", help="the answer, if nothing was erased and certified; do not use names"
    ),
    changes="the request was closed",
)
def close_request(options: argparse.Namespace) -> int:
    """Close a request."""
    with open_store(options) as store:
        closed = store.requests.close(options.request, options.answer)
    late = -closed.days_left
    after = f", {counted(late, 'day')} late" if late > 0 else ""
    return emit(
        options, request_to_json(closed), f"request {closed.id}: answered on {closed.steps['answered'][:10]}{after}"
    )


def held_names(store: SampleStore, request: ErasureRequest) -> dict[str, int]:
    """Return the names in a request that the store still keeps, with the number of samples of each."""
    counts = {s: len(store.find(subject=s)) for s in request.named("subject")}
    return counts | {i: int(i in store) for i in request.named("id")}


def time_left(request: ErasureRequest) -> str:
    """Return the time left for the answer, in words."""
    if not request.open:
        return f"answered {request.steps['answered'][:10]}"
    days = request.days_left
    if days < 0:
        return f"OVERDUE by {counted(-days, 'day')}"
    return "due today" if days == 0 else f"{counted(days, 'day')} left"


def request_to_json(request: ErasureRequest) -> dict[str, Any]:
    """Convert a request to primitives, without nonces. The steps are in the order in which they were taken."""
    names = ("id", "state", "received", "due", "overdue", "reason", "operator", "events", "answer")
    said = {name: getattr(request, name) for name in names}
    said["names"] = [{"kind": n.kind, "name": n.name, "commitment": n.commitment} for n in request.names]
    return said | {"steps": dict(sorted(request.steps.items(), key=lambda step: step[1]))}
