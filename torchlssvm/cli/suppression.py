"""Who was erased on request stays out: ``suppression`` and ``readmit``."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchlssvm.cli.arguments import ID, SUBJECT, SUPPRESSION_KEY, UsageError, command, option
from torchlssvm.cli.console import emit
from torchlssvm.cli.store_access import open_store
from torchlssvm.wording import counted


@command(
    "suppression",
    "Keep out samples that were erased on request. The list is a file outside the store, which several stores may share; "
    "without its key (see keygen --suppression) it reveals nothing.",
    option("--list", type=Path, metavar="FILE", help="use this list from now on; it is made if it does not exist"),
    SUPPRESSION_KEY,
    changes="the store uses the list",
)
def suppression(options: argparse.Namespace) -> int:
    """Bind the list if one is given; print its state."""
    with open_store(options) as store:
        if options.list is not None:
            store.use_suppression_list(options.list)
        path = store.suppression.path
        used = store.suppression.opened() if store.suppression.has_key else None
        held = store.suppression.held() if used is not None else None
    said = {"list": path, "entries": None if used is None else len(used), "held": held}
    if path is None:
        text = "this store uses no suppression list: samples that were erased can be added again"
    elif used is None or held is None:
        text = f"{path}: the suppression list of this store; give its key (--suppression-key FILE) to see more"
    else:
        text = f"{path}: the suppression list of this store, {counted(len(used), 'name')}"
        text += "\nnothing is added to this store or erased from it without the key of the list"
        if held:
            first = ", ".join(held[:5])
            text += (
                f"\nattention: {counted(len(held), 'sample')} of this store on the list, to be erased here too: {first}"
            )
    return emit(options, said, text)


@command(
    "readmit",
    "Allow a lawful return. It takes subjects and ids off the suppression list, and adds nothing. The journal keeps an "
    "entry of it, without names.",
    SUBJECT,
    ID,
    option("--receipt", type=Path, metavar="FILE", help="all names of a receipt that are on the list"),
    option("--reason", required=True, metavar="TEXT", help="why, without the names of those concerned"),
    SUPPRESSION_KEY,
    changes="the return is allowed",
)
def readmit(options: argparse.Namespace) -> int:
    """Take names off the list."""
    from torchlssvm.audit import ErasureReceipt

    subjects, ids = options.subject or [], options.id or []
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
        names = store.readmit(subjects, ids, reason=options.reason)
        position = store.position
    text = f"{counted(names, 'name')} taken off the suppression list; the journal has it as event {position}"
    return emit(options, {"names": names, "position": position}, text)
