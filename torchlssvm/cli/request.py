"""``torchlssvm request``: requests for erasure, from the day they arrive until they are answered."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.console import OK, emit, table
from torchlssvm.cli.store_folder import open_store
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands
    from torchlssvm.store import ErasureRequest, SampleStore

STEP_WORDS = {
    "received": "entered here",
    "previewed": "effect looked at",
    "erased": "samples erased",
    "compacted": "bytes destroyed",
    "certified": "certificate written",
    "answered": "answered",
}
STATE_WORDS = {
    "received": "received",
    "previewed": "effect looked at",
    "erased": "erased, bytes still to be destroyed",
    "compacted": "erased, bytes destroyed",
    "certified": "erased and certified",
    "answered": "answered",
}


def register(commands: Commands) -> None:
    """Add the command with its verbs to the parser."""
    text = "Keep requests for erasure: open, list, show and close them."
    request = commands.add_parser("request", help=text[0].lower() + text[1:-1], description=text)
    verbs = request.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)

    new = add_command(verbs, "open", run_open, "Open a request.", changes="the request was opened")
    new.add_argument("--subject", action="append", default=[], metavar="S", help="who asked; may be repeated")
    new.add_argument("--sample", action="append", default=[], metavar="I", help="a sample by its id; may be repeated")
    new.add_argument(
        "--id", metavar="R", help="id of the request, without names: it is kept for ever (default: a new one)"
    )
    new.add_argument("--received", metavar="DAY", help="when it arrived, e.g. 2026-05-31 (default: now)")
    new.add_argument("--due", metavar="DAY", help="last day to answer (default: one month after it arrived)")
    new.add_argument("--reason", default="", metavar="TEXT", help="legal basis or reason, without names")
    new.add_argument("--operator", default="", metavar="TEXT", help="who works on it")

    text = "List all requests: overdue ones first, then by the day they are due."
    add_command(verbs, "list", run_list, text)
    add_argument_request(add_command(verbs, "show", run_show, "Show one request and the steps that were taken."))

    close = add_command(
        verbs, "close", run_close, "Note that a request was answered.", changes="the request was closed"
    )
    add_argument_request(close)
    close.add_argument(
        "--answer", default="", metavar="TEXT", help="why it ends, if nothing was erased and certified; without names"
    )


def add_argument_request(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a request."""
    parser.add_argument("request", metavar="REQUEST", help="id of the request, see request list")


def run_open(options: argparse.Namespace) -> int:
    """Open a request."""
    with open_store(options) as store:
        made = store.requests.open(
            options.subject, options.sample, request_id=options.id, received=options.received, due=options.due,
            reason=options.reason, operator=options.operator,
        )  # fmt: skip
        said = to_json(made) | {"held": held_names(store, made)}
        store_subjects = store.subjects()
    lines = [f"request {made.id}: received on {made.received[:10]}, an answer is due by {made.due} ({time_left(made)})"]
    lines += [f"  {name}: {counted(n, 'sample')} held" for name, n in said["held"].items()]
    lines += [f"  {line}" for name, n in said["held"].items() if not n for line in look_alikes(store_subjects, name)]
    lines.append(f"next: torchlssvm preview {options.store} --request {made.id}")
    emit(options, said, "\n".join(lines))
    return OK


def run_list(options: argparse.Namespace) -> int:
    """Print all requests, one in a line."""
    with open_store(options, readonly=True) as store:
        found = store.requests.all()
    width = max((len(r.id) for r in found), default=0)
    lines = [f"{r.id:<{width}}  due {r.due}  {time_left(r):<22}  {STATE_WORDS[r.state]}" for r in found]
    overdue = sum(r.overdue for r in found)
    if overdue:
        lines.insert(0, f"{counted(overdue, 'request')} overdue:")
    emit(options, {"requests": [to_json(r) for r in found], "overdue": overdue}, "\n".join(lines) or "no requests")
    return OK


def run_show(options: argparse.Namespace) -> int:
    """Print one request."""
    with open_store(options, readonly=True) as store, store.view():
        found = store.requests.get(options.request)
        said = to_json(found) | {"held": held_names(store, found)}
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
    for step, at in sorted(found.steps.items(), key=by_time):
        rows[STEP_WORDS[step]] = at[:19].replace("T", " ") + " UTC"
    emit(options, said, table({name: value for name, value in rows.items() if value}))
    return OK


def by_time(step: tuple[str, str]) -> str:
    """Order steps by their times."""
    return step[1]


def run_close(options: argparse.Namespace) -> int:
    """Close a request."""
    with open_store(options) as store:
        closed = store.requests.close(options.request, options.answer)
    late = -closed.days_left
    after = f", {counted(late, 'day')} after it was due" if late > 0 else ""
    emit(options, to_json(closed), f"request {closed.id}: answered on {closed.steps['answered'][:10]}{after}")
    return OK


def held_names(store: SampleStore, request: ErasureRequest) -> dict[str, int]:
    """The names of a request that are still kept, and the number of samples held of each."""
    counts = {s: store.count_of(s) for s in request.named("subject")}
    return counts | {i: int(i in store) for i in request.named("id")}


def look_alikes(subjects: Iterable[str], name: str) -> list[str]:
    """Say which subjects of a store differ from a name in case, spaces or the form of their letters only."""
    from torchlssvm.events import casefolded

    wanted = " ".join(casefolded(name).split())
    found = [s for s in subjects if s != name and " ".join(casefolded(s).split()) == wanted]
    return [
        f"attention: the store holds samples of {s!r}, which is written in another way than {name!r}" for s in found
    ]


def time_left(request: ErasureRequest) -> str:
    """The time until an answer is due, in words."""
    if not request.open:
        return f"answered {request.steps['answered'][:10]}"
    days = request.days_left
    if days < 0:
        return f"OVERDUE by {counted(-days, 'day')}"
    return "due today" if days == 0 else f"{counted(days, 'day')} left"


def to_json(request: ErasureRequest) -> dict[str, Any]:
    """Convert a request to primitives, without nonces."""
    names = [{"kind": n.kind, "name": n.name, "commitment": n.commitment} for n in request.names]
    return {
        "id": request.id,
        "state": request.state,
        "received": request.received,
        "due": request.due,
        "overdue": request.overdue,
        "names": names,
        "reason": request.reason,
        "operator": request.operator,
        "steps": dict(sorted(request.steps.items(), key=by_time)),
        "events": request.events,
        "answer": request.answer,
    }
