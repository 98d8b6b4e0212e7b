"""``torchlssvm readmit``: allow the lawful return of a person who was erased."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import UsageError, add_command
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.store_folder import open_store
from torchlssvm.cli.suppression_arguments import add_suppression_key
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = (
        "Allow a lawful return: take subjects and ids off the suppression list. Nothing is added by it. The journal keeps an "
        "entry of it, without names."
    )
    parser = add_command(commands, "readmit", run_readmit, text, changes="the return is allowed")
    parser.add_argument("--subject", action="append", default=[], metavar="S", help="a subject; may be repeated")
    parser.add_argument("--id", nargs="+", action="extend", default=[], metavar="I", help="samples by their ids")
    parser.add_argument("--receipt", type=Path, metavar="FILE", help="all names of a receipt that are on the list")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why, without the names of those concerned")
    add_suppression_key(parser)


def run_readmit(options: argparse.Namespace) -> int:
    """Take names off the list."""
    from torchlssvm.audit import ErasureReceipt

    subjects, ids = list(options.subject), list(options.id)
    receipt = None if options.receipt is None else ErasureReceipt.load(options.receipt)
    if receipt is None and not subjects and not ids:
        raise UsageError("give --subject, --id or --receipt")
    with open_store(options) as store:
        if receipt is not None:
            more_ids, more_subjects = store.suppression.names_listed(receipt.ids, receipt.subjects)
            ids, subjects = list(dict.fromkeys([*ids, *more_ids])), list(dict.fromkeys([*subjects, *more_subjects]))
            if not ids and not subjects:
                raise ValueError(
                    f"no name of {options.receipt} is on the suppression list: the erasure belonged to no request, or the "
                    "return was allowed before. Nothing keeps these samples out."
                )
        count = store.readmit(subjects, ids, reason=options.reason)
        position = store.position
    text = f"{counted(count, 'name')} taken off the suppression list; the journal has it as event {position}"
    emit(options, {"names": count, "position": position}, text)
    return OK
