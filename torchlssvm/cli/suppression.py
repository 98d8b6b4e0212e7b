"""The suppression list, which keeps erased people out of a store: ``suppression`` and ``readmit``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import ID, SUBJECT, SUPPRESSION_KEY, UsageError, command, option
from torchlssvm.cli.console import emit
from torchlssvm.cli.keys import SIGNING_KEY, signing_key
from torchlssvm.cli.store_access import open_store
from torchlssvm.wording import counted, listed

if TYPE_CHECKING:
    from torchlssvm.store import SampleStore


@command(
    "suppression use",
    "Keep out samples that were erased on request. The list is a file outside the store, and several stores may share it. "
    "Without its key (see keygen --suppression) it reveals nothing.",
    option("--list", type=Path, required=True, metavar="FILE", help="the list; created if it does not exist"),
    SUPPRESSION_KEY,
    changes="the store uses the list",
)
def use(options: argparse.Namespace) -> int:
    """Make the store use the list from now on, and print the state of the list."""
    with open_store(options) as store:
        store.use_suppression_list(options.list)
        return emit(options, *list_state(store))


@command(
    "suppression show",
    "Show the suppression list of a store, and the samples of the store that are on it.",
    SUPPRESSION_KEY,
)
def show(options: argparse.Namespace) -> int:
    """Print the state of the list."""
    with open_store(options, readonly=True) as store:
        return emit(options, *list_state(store))


def list_state(store: SampleStore) -> tuple[dict[str, Any], str]:
    """Return the state of the list, as primitives and as text."""
    path = store.suppression.path
    used = store.suppression.opened() if store.suppression.has_key else None
    held = store.suppression.held() if used is not None else None
    said = {"list": path, "entries": None if used is None else len(used), "held": held}
    if path is None:
        return said, "this store uses no suppression list: erased samples can be added again"
    if used is None or held is None:
        return said, f"{path}: suppression list of this store; give its key (--suppression-key FILE) to see more"
    text = f"{path}: suppression list of this store, {counted(len(used), 'name')}"
    text += "\nadding and erasing samples in this store needs the key of the list"
    if held:
        text += (
            f"\nattention: {counted(len(held), 'sample')} of this store on the list: {listed(held)}. Erase them with "
            f"torchlssvm suppression apply {store.path}"
        )
    return said, text


@command(
    "suppression apply",
    "Erase the samples of a store that are on its suppression list, for example after restoring an old backup.",
    option("--certificate", type=Path, metavar="OUT.json", help="write a certificate of the erasure"),
    SIGNING_KEY,
    option("--receipt", type=Path, metavar="FILE", help="receipt to write, outside the store"),
    option("--compact", action="store_true", help="also destroy the bytes (see compact)"),
    SUPPRESSION_KEY,
    changes="the samples were erased",
)
def apply_list(options: argparse.Namespace) -> int:
    """Erase the samples that are on the list."""
    if options.compact and options.receipt is None:
        raise UsageError(
            "--compact needs --receipt: without a receipt nobody could tell later whose samples were erased"
        )
    key = signing_key(options)
    with open_store(options) as store:
        done = store.erase_returned(
            receipt=options.receipt, compact=options.compact, certificate=options.certificate, key=key
        )
    if done is None:
        return emit(options, {"samples": 0, "events": []}, "no sample of this store is on its suppression list")
    said = {"samples": done.samples, "events": done.event_ids, "compacted": done.compaction is not None}
    if done.unfinished is not None:
        raise done.unfinished
    return emit(options, said, f"{counted(done.samples, 'sample')} erased again (event {done.event_ids[0]})")


@command(
    "readmit",
    "Take subjects and ids off the suppression list, to allow a lawful return. No sample is added. The journal records the "
    "return without names.",
    SUBJECT,
    ID,
    option("--receipt", type=Path, metavar="FILE", help="all names in this receipt"),
    option("--reason", required=True, metavar="TEXT", help="the reason; do not use names"),
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
                    f"the suppression list has none of the names in {options.receipt}: the erasure did not belong to a "
                    "request, or the return was allowed earlier. The samples can be added."
                )
        names = store.readmit(subjects, ids, reason=options.reason)
        position = store.position
    text = f"{counted(names, 'name')} taken off the suppression list (event {position} of the journal)"
    return emit(options, {"names": names, "position": position}, text)
