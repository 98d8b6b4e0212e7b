"""``torchlssvm remove``: unlearn and erase samples, and certify it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import UsageError, add_command
from torchlssvm.cli.compact import compact_store
from torchlssvm.cli.console import BUSY, OK, emit, one_line, warn
from torchlssvm.cli.event_arguments import add_sample_selection, event_arguments, receipts_to_json
from torchlssvm.cli.store_folder import open_store, refuse_inside_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


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
    remove.add_argument("--certificate", type=Path, metavar="OUT.json", help="write a certificate of the erasure")
    remove.add_argument("--key", type=Path, metavar="KEY.pem", help="sign the certificate (see keygen)")
    remove.add_argument("--compact", action="store_true", help="also destroy the bytes, see compact")


def run_remove(options: argparse.Namespace) -> int:
    """Remove, then compact, then certify. All that can be refused is refused before."""
    from torchlssvm import audit
    from torchlssvm.errors import StoreBusyError
    from torchlssvm.events import Remove

    if options.key is not None and options.certificate is None:
        raise UsageError("--key needs --certificate")
    key = None if options.key is None else audit.private_key(options.key)
    if options.certificate is not None and options.certificate.exists():
        raise ValueError(f"{options.certificate} is there already: a certificate is not written over")
    if options.certificate is not None and not options.certificate.absolute().parent.is_dir():
        raise ValueError(
            f"{options.certificate.absolute().parent} is not a folder: the certificate cannot be written there"
        )
    if options.certificate is not None:
        refuse_inside_store(options.certificate, options.store)
    events = [Remove(**given) for given in event_arguments(options)]
    busy: StoreBusyError | None = None
    with open_store(options) as store:
        receipts = store.apply(events)
        nonces = {name: nonce for receipt in receipts for name, nonce in receipt.nonces.items()}
        said = receipts_to_json(receipts, store) | {"nonces": nonces, "compacted": False, "certificate": None}
        text = [str(receipt) for receipt in receipts]
        if options.compact:
            try:
                text.append(compact_store(options, store, said))
            except StoreBusyError as error:
                busy = error
        if options.certificate is not None:
            certificate = store.certificate([receipt.event_id for receipt in receipts], key)
            certificate.save(options.certificate)
            said |= {"certificate": str(options.certificate), "signed": bool(certificate.signature)}
            how = "signed" if certificate.signature else "not signed"
            text.append(f"certificate: {options.certificate} ({how}, compacted: {str(certificate.compacted).lower()})")
    if busy is not None:
        warn(f"torchlssvm: error: the samples are removed, but: {one_line(busy)}")
    emit(options, said, "\n".join(text))
    return OK if busy is None else BUSY
