"""``torchlssvm remove``: unlearn and erase samples, and certify it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import UsageError, add_command
from torchlssvm.cli.compact import compact_store
from torchlssvm.cli.console import BUSY, OK, emit, one_line, warn
from torchlssvm.cli.event_arguments import (
    add_request,
    add_sample_selection,
    check_selection,
    receipts_to_json,
    requested_targets,
)
from torchlssvm.cli.key_arguments import add_signing_key, signing_key
from torchlssvm.cli.receipt_file import check_receipt_path, receipt_path, write_receipt
from torchlssvm.cli.store_folder import open_store, refuse_inside_store
from torchlssvm.cli.suppression_arguments import add_suppression_key, protection_text
from torchlssvm.wording import counted, listed

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands
    from torchlssvm.store import EventResult


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    remove = add_command(
        commands,
        "remove",
        run_remove,
        "Unlearn and erase samples, by subject or by id.",
        changes="the samples were removed",
    )
    add_sample_selection(remove)
    add_request(remove)
    remove.add_argument("--certificate", type=Path, metavar="OUT.json", help="write a certificate of the erasure")
    add_signing_key(remove)
    remove.add_argument("--compact", action="store_true", help="also destroy the bytes, see compact")
    remove.add_argument(
        "--receipt",
        type=Path,
        metavar="FILE",
        help="file of the receipt (default: beside the certificate, or in the folder STORE.receipts)",
    )
    add_suppression_key(remove)


def run_remove(options: argparse.Namespace) -> int:
    """Remove, write the receipt, compact, certify. All that can be refused is refused before."""
    from torchlssvm.errors import StoreBusyError
    from torchlssvm.events import Remove

    if options.key is not None and options.certificate is None:
        raise UsageError("--key needs --certificate")
    key = signing_key(options)
    if options.certificate is not None and options.certificate.exists():
        raise ValueError(f"{options.certificate} is there already: a certificate is not written over")
    if options.certificate is not None and not options.certificate.absolute().parent.is_dir():
        raise ValueError(
            f"{options.certificate.absolute().parent} is not a folder: the certificate cannot be written there"
        )
    if options.certificate is not None:
        refuse_inside_store(options.certificate, options.store)
    check_selection(options)
    busy: StoreBusyError | None = None
    with open_store(options) as store:
        targets = requested_targets(options, store)
        events = [Remove(**whose) for whose in targets]
        out = receipt_path(options.receipt, options.certificate, options.store, options.request or events[0].event_id)
        check_receipt_path(out, options.store)
        receipts = store.apply(events, request=options.request, keep_receipt=True)
        store.refresh()
        done = [receipt.event_id for receipt in receipts]
        nonces = {name: nonce for receipt in receipts for name, nonce in receipt.nonces.items()}
        said = receipts_to_json(receipts, store) | {"nonces": nonces, "compacted": False, "certificate": None}
        text = [erased_text(whose, receipt) for whose, receipt in zip(targets, receipts, strict=True)]
        if any(receipt.applied for receipt in receipts):
            subjects = sum("subject" in whose for whose in targets)
            text.append(protection_text(store, options.request, said["samples"], subjects))
        if options.request is not None:
            left = store.requests.still_held(store.requests.get(options.request))
            said["still_held"] = [n.name for n in left]
            if left:
                text.append(f"request {options.request} is not done: samples are held of {listed(said['still_held'])}")
        waiting = [e for e in store.unwritten_receipts() if e in done]
        said["receipt"] = str(out) if waiting else None
        text.append(write_receipt(store, waiting, out) if waiting else "no receipt is written: there was one before")
        if options.compact:
            try:
                text.append(compact_store(options, store, said))
            except StoreBusyError as error:
                busy = error
        if options.certificate is not None:
            certificate = store.certificate([*([options.request] if options.request else []), *done], key)
            certificate.save(options.certificate)
            if options.request is not None:
                store.requests.certified(done)
            said |= {"certificate": str(options.certificate), "signed": bool(certificate.signatures)}
            how = "signed" if certificate.signatures else "not signed"
            text.append(f"certificate: {options.certificate} ({how}, compacted: {str(certificate.compacted).lower()})")
        if not said["compacted"]:
            text.append(
                f"the bytes may still be in the files of the store: torchlssvm compact {options.store} destroys them"
            )
    if busy is not None:
        warn(f"torchlssvm: error: the samples are removed, but: {one_line(busy)}")
    emit(options, said, "\n".join(text))
    return OK if busy is None else BUSY


def erased_text(whose: dict[str, Any], receipt: EventResult) -> str:
    """Say what a removal did."""
    name = whose.get("subject", "by id")
    done = "erased" if receipt.applied else "were erased before, nothing was changed"
    return f"{name}: {counted(receipt.samples, 'sample')} {done} (event {receipt.event_id})"
