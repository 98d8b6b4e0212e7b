"""``torchlssvm show``: an access report, with all that a store holds of a subject."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.request import look_alikes
from torchlssvm.cli.store_folder import open_store
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands
    from torchlssvm.cli.settings import Settings
    from torchlssvm.store import AccessReport

UNKNOWN_COPIES = (
    "not known to this store: backups and copies made by other means, and what the network in front of it was trained "
    "on"
)


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = (
        "Show what is held of a subject: samples, labels, since when, and which files contain them (an access report)."
    )
    show = add_command(commands, "show", run_show, text)
    show.add_argument("--subject", action="append", required=True, metavar="S", help="whose samples; may be repeated")
    show.add_argument(
        "--values", action="store_true", help="with --json: the numbers that are kept of each sample, too"
    )


def run_show(options: argparse.Namespace) -> int:
    """Print one report for each subject."""
    from torchlssvm.cli import settings
    from torchlssvm.store import AccessReport

    with open_store(options, readonly=True) as store, store.view():
        kept = settings.load(store)
        reports = [AccessReport.of(store, name) for name in dict.fromkeys(options.subject)]
        similar = [line for r in reports if not r.samples for line in look_alikes(store.subjects(), r.subject)]
    said = {"store": str(options.store), "subjects": [to_json(r, kept, options.values) for r in reports]}
    emit(
        options,
        said,
        "\n\n".join(to_text(r, kept, str(options.store)) for r in reports)
        + "".join(f"\n{line}" for line in similar)
        + f"\n\n{UNKNOWN_COPIES}",
    )
    return OK


def time_text(seconds: float) -> str:
    """A time in words, UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def label_text(y: Any, kept: Settings) -> str:
    """The name of a label; targets as numbers."""
    return kept.name(y) if isinstance(y, int) else ", ".join(f"{v:g}" for v in y)


def to_json(report: AccessReport, kept: Settings, values: bool) -> dict[str, Any]:
    """Convert a report to primitives."""
    samples = []
    for s in report.samples:
        one = {"id": s.id, "label": label_text(s.y, kept), "added": time_text(s.added), "numbers": len(s.x)}
        samples.append(one | ({"values": s.x} if values else {}))
    requests = [{"id": r.id, "state": r.state, "due": r.due} for r in report.requests]
    files = [asdict(f) for f in report.files]
    return {"subject": report.subject, "samples": samples, "files": files, "requests": requests}


def to_text(report: AccessReport, kept: Settings, store: str) -> str:
    """Write a report for people."""
    if not report.samples:
        lines = [f"{report.subject}: no sample is held in {store}"]
    else:
        numbers = len(report.samples[0].x)
        lines = [f"{report.subject}: {counted(len(report.samples), 'sample')} held in {store}"]
        width = max(6, *(len(s.id) for s in report.samples))
        lines.append(f"  {'sample':<{width}}  {'added (UTC)':<19}  label")
        lines += [f"  {s.id:<{width}}  {time_text(s.added)}  {label_text(s.y, kept)}" for s in report.samples]
        lines.append(
            f"  of each sample {counted(numbers, 'number')} are kept, computed from it (--json --values prints them)"
        )
        lines.append("contained in:")
        lines.append("  the classifier of this store, which has learned all of them")
        for f in report.files:
            there = "" if f.found else " (not found there any more)"
            lines.append(f"  {f.path}: {counted(f.samples, 'sample')}{there}")
        if not report.files:
            lines.append("  no exported file or checkpoint that this store knows of")
    for r in report.requests:
        lines.append(f"request {r.id}: {r.state}, an answer is due by {r.due}")
    return "\n".join(lines)
