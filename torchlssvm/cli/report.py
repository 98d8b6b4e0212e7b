"""``report``: one HTML page about a store. ``demo``: learn, correct, erase and verify on scikit-learn's digits."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchlssvm.cli.arguments import FORCE, command, count, number, option
from torchlssvm.cli.console import FAILED, OK, emit
from torchlssvm.cli.store_access import Settings, check_output, watched_store
from torchlssvm.wording import counted


@command(
    "report",
    "Write an HTML page about the store. It starts with requests, erasures and open tasks, and goes on with accuracy, "
    "calibration, rho, suspicious labels, harmful samples and events.",
    option(
        "--out",
        type=Path,
        default=Path("torchlssvm_report.html"),
        metavar="FILE",
        help="page to write (default: %(default)s)",
    ),
    option(
        "--images",
        type=Path,
        metavar="PATH",
        help="pictures of the samples: a folder (ids are paths below it) or a .npy file (n, H, W[, 3])",
    ),
    option("--certificates", type=Path, metavar="DIR", help="list the certificates in this folder"),
    option(
        "--groups",
        choices=["subject"],
        help="leave out all samples of a subject together, if they are alike: views of one picture, messages of one person",
    ),
    FORCE,
    option("--title", metavar="TEXT", help="title of the page"),
    option("--count", type=count, default=24, metavar="N", help="samples per list (default: %(default)s)"),
    changes="the page was written",
)
def report(options: argparse.Namespace) -> int:
    """Write the page and print its main figures."""
    from torchlssvm.report import PASSES, write_report

    check_output(options.out, options.force)
    with watched_store(options, "reporting", readonly=False, passes=PASSES) as store:
        # The page shows samples, so certificates of later erasures list it.
        store.register_checkpoint(options.out)
        try:
            found = write_report(
                store, options.out, images=options.images, classes=Settings.load(store).classes, title=options.title,
                certificates=options.certificates, count=options.count, groups=options.groups,
            )  # fmt: skip
        except BaseException:
            if not options.out.exists():
                store.certificates.forget(options.out)
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
    late = f" ({counted(data['overdue_requests'], 'request')} overdue)" if data["overdue_requests"] else ""
    text = f"{options.out}: {counted(len(found.waiting), 'open task')}{late}; leave-one-out accuracy {found.accuracy:.1%}; "
    return emit(options, data, text + counted(data["suspicious"], "suspicious label"))


@command(
    "demo",
    "Show the main features on scikit-learn's digits. The demo learns digits with wrong labels, finds and corrects them, "
    "erases a user, and verifies the erasure.",
    option("--out", type=Path, default=Path(), metavar="DIR", help="folder for the picture (default: .)"),
    option(
        "--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="N", help="seed of the random numbers (default: 0)"
    ),
    store=False,
)
def demo(options: argparse.Namespace) -> int:
    """Run the demo. The exit code is 1 if one of its checks fails."""
    from torchlssvm.demo import run

    facts, text = run(options.out, options.seed)
    emit(options, facts, text)
    return OK if facts["passed"] else FAILED
