"""``torchlssvm report``: one HTML page about a store."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import add_command, count
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.store_folder import check_output, watched_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = (
        "Write one HTML page about the store: erasures, requests and pending work first; then accuracy, calibration, rho, "
        "suspicious and harmful samples, events."
    )
    report = add_command(commands, "report", run_report, text, changes="the page was written")
    page = Path("torchlssvm_report.html")
    report.add_argument("--out", type=Path, default=page, metavar="FILE", help="the page (default: %(default)s)")
    text = "pictures: a folder (ids are paths below it) or a .npy file (n, H, W[, 3])"
    report.add_argument("--images", type=Path, metavar="PATH", help=text)
    report.add_argument("--certificates", type=Path, metavar="DIR", help="list the certificate files of this folder")
    report.add_argument("--force", action="store_true", help="overwrite an existing file")
    report.add_argument("--title", metavar="TEXT", help="title of the page")
    report.add_argument(
        "--count", type=count, default=24, metavar="N", help="samples in each list (default: %(default)s)"
    )


def run_report(options: argparse.Namespace) -> int:
    """Write the page and print its main figures."""
    from torchlssvm.cli import settings
    from torchlssvm.report import write_report

    check_output(options.out, options.store, options.force)
    with watched_store(options, "reporting", readonly=False) as store:
        # It shows samples: certificates name it once it is older than an erasure.
        store.register_checkpoint(options.out)
        try:
            found = write_report(
                store, options.out, images=options.images, classes=settings.load(store).classes, title=options.title,
                certificates=options.certificates, count=options.count,
            )  # fmt: skip
        except BaseException:
            if not options.out.exists():
                store.forget_checkpoint(options.out)
            raise
    data = {
        "report": str(options.out),
        "open_requests": sum(r.open for r in found.requests),
        "overdue_requests": sum(r.overdue for r in found.requests),
        "waiting": found.waiting,
        "samples": len(found.labels.labels),
        "accuracy": found.accuracy,
        "calibration_error": found.ece[1],
        "suspicious": len(found.labels.suspects),
        "rho": found.head["rho"],
        "best_rho": found.path.rho,
        "drift": found.drift,
    }
    text = f"{options.out}: {len(found.waiting):,} things to be done, {data['overdue_requests']:,} requests overdue; "
    text += f"accuracy {found.accuracy:.1%} (leave-one-out), {data['suspicious']:,} suspicious labels"
    emit(options, data, text)
    return OK
