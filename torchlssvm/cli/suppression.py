"""Commands that keep out who was erased on request: ``suppression`` and ``readmit``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import ID, SUBJECT, SUPPRESSION_KEY, UsageError, command, option
from torchlssvm.cli.console import emit
from torchlssvm.cli.keys import SIGNING_KEY, signing_key
from torchlssvm.cli.store_access import open_store
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.store import SampleStore


@command(
    "suppression use",
    "Keep out samples that were erased on request. The list is a file outside the store, which several stores may share; "
    "without its key (see keygen --suppression) it reveals nothing.",
    option("--list", type=Path, required=True, metavar="FILE", help="the list; it is made if it does not exist"),
    SUPPRESSION_KEY,
    changes="the store uses the list",
)
def use(options: argparse.Namespace) -> int:
    """Bind the list; print its state."""
    with open_store(options) as store:
        store.use_suppression_list(options.list)
        return emit(options, *list_state(store))


@command(
    "suppression show", "Show the suppression list that a store uses, and who is held although on it.", SUPPRESSION_KEY
)
def show(options: argparse.Namespace) -> int:
    """Print the state of the list."""
    with open_store(options, readonly=True) as store:
        return emit(options, *list_state(store))


def list_state(store: SampleStore) -> tuple[dict[str, Any], str]:
    """The state of a store's list, as primitives and as text."""
    path = store.suppression.path
    used = store.suppression.opened() if store.suppression.has_key else None
    held = store.suppression.held() if used is not None else None
    said = {"list": path, "entries": None if used is None else len(used), "held": held}
    if path is None:
        return said, "this store uses no suppression list: samples that were erased can be added again"
    if used is None or held is None:
        return said, f"{path}: the suppression list of this store; give its key (--suppression-key FILE) to see more"
    text = f"{path}: the suppression list of this store, {counted(len(used), 'name')}"
    text += "\nnothing is added to this store or erased from it without the key of the list"
    if held:
        text += (
            f"\nattention: {counted(len(held), 'sample')} of this store on the list: {', '.join(held[:5])}. Erase them again "
            f"with torchlssvm suppression apply {store.path}"
        )
    return said, text


@command(
    "suppression apply",
    "Erase the samples of a store that are on its suppression list, e.g. after an old copy was put back.",
    option("--certificate", type=Path, metavar="OUT.json", help="write a certificate of the erasure"),
    SIGNING_KEY,
    option("--receipt", type=Path, metavar="FILE", help="file of the receipt, outside the store"),
    option("--compact", action="store_true", help="also destroy the bytes, see compact"),
    SUPPRESSION_KEY,
    changes="the samples were erased",
)
def apply_list(options: argparse.Namespace) -> int:
    """Erase what came back."""
    if options.compact and options.receipt is None:
        raise UsageError("--compact needs --receipt: afterwards nobody could tell whom the erasure was about")
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
