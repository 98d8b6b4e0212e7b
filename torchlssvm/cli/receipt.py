"""``torchlssvm receipt``: write receipts of erasures that have none yet."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.receipt_file import check_receipt_path, write_receipt
from torchlssvm.cli.store_folder import open_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = (
        "Write the receipt of erasures that have none, e.g. after a crash. Until a store is compacted it can be written again "
        "with --request or --event."
    )
    parser = add_command(commands, "receipt", run_receipt, text, changes="the receipt was written")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="file of the receipt, outside the store"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--request", metavar="R", help="all erasures of this request")
    which.add_argument(
        "--event", nargs="+", action="extend", metavar="E", help="erasures by their event ids, see history"
    )


def run_receipt(options: argparse.Namespace) -> int:
    """Write one receipt."""
    check_receipt_path(options.out, options.store)
    with open_store(options) as store:
        if options.request is not None:
            events = store.requests.get(options.request).events
        else:
            events = options.event or store.unwritten_receipts()
        if not events:
            raise ValueError("no receipt is waiting to be written")
        said = {"receipt": str(options.out), "events": list(events), "samples": store.receipt(events).samples}
        text = write_receipt(store, events, options.out)
    emit(options, said, text)
    return OK
