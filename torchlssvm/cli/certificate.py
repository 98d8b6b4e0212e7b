"""``torchlssvm certificate``: issue a certificate of erasure, sign it again, and write what others need beside it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import UsageError, add_command
from torchlssvm.cli.console import OK, emit, warn
from torchlssvm.cli.key_arguments import add_signing_key, signing_key
from torchlssvm.cli.store_folder import open_store, refuse_inside_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command and its parts to the parser."""
    certificate = add_command(
        commands, "certificate", run_help, "Issue certificates of erasure, and work with them.", store=False
    )
    parts = certificate.add_subparsers(title="parts", metavar="PART", dest="part")
    register_issue(parts)
    register_sign(parts)
    register_opening(parts)


def run_help(options: argparse.Namespace) -> int:
    """Say that a part is missing."""
    raise UsageError("name a part: issue, sign or opening", options.parser)


def refuse_existing(out: Path, store: Path | None = None) -> None:
    """ValueError if a file cannot be written: it is there, its folder is not, or it is inside a store."""
    if out.exists():
        raise ValueError(f"{out} is there already: it is not written over")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out.absolute().parent} is not a folder")
    refuse_inside_store(out, store)


# -- issue -------------------------------------------------------------------------------------------------------------


def register_issue(parts: Commands) -> None:
    """Add ``certificate issue``."""
    issue = add_command(
        parts, "issue", run_issue, "Write a certificate of erasures.", changes="the certificate was written"
    )
    issue.add_argument("out", type=Path, metavar="OUT.json", help="the certificate")
    whose = issue.add_mutually_exclusive_group(required=True)
    whose.add_argument("--event-id", action="append", metavar="E", help="an erasure; may be repeated")
    whose.add_argument("--request", metavar="R", help="all erasures of a request")
    add_signing_key(issue)


def run_issue(options: argparse.Namespace) -> int:
    """Issue and write a certificate."""
    refuse_existing(options.out, options.store)
    key = signing_key(options)
    with open_store(options) as store:
        events = options.event_id
        if options.request is not None:
            request = store.requests.get(options.request)
            if not request.events:
                raise ValueError(f"nothing was erased for the request {options.request!r} yet")
            events = [request.id, *request.events]
        certificate = store.certificate(events, key=key)
        certificate.save(options.out)
        store.requests.certified(events)
    said = {
        "certificate": str(options.out),
        "signed": bool(certificate.signatures),
        "erased": certificate.erased,
        "compacted": certificate.compacted,
    }
    how = "signed" if certificate.signatures else "not signed"
    rest = "" if certificate.compacted else "; not compacted yet: the bytes may still be in the store's files"
    emit(options, said, f"{options.out}: certificate of {certificate.erased} erased samples, {how}{rest}")
    return OK


# -- sign --------------------------------------------------------------------------------------------------------------


def register_sign(parts: Commands) -> None:
    """Add ``certificate sign``."""
    text = "Add a signature to a certificate, for example with the key that takes over from the old one."
    sign = add_command(parts, "sign", run_sign, text, store=False, changes="the certificate was written")
    sign.add_argument("certificate", type=Path, metavar="CERT", help="file of the certificate")
    sign.add_argument("out", type=Path, metavar="OUT.json", help="the certificate with one signature more")
    add_signing_key(sign, required=True)


def run_sign(options: argparse.Namespace) -> int:
    """Write the certificate with one signature more."""
    from torchlssvm import audit

    refuse_existing(options.out)
    certificate = audit.Certificate.load(options.certificate)
    key = signing_key(options)
    signed = audit.sign(certificate, key)
    signed.save(options.out)
    said = {"certificate": str(options.out), "signatures": len(signed.signatures), "key_id": audit.key_id(key)}
    emit(
        options, said, f"{options.out}: {len(signed.signatures)} signatures, the new one by sha256:{audit.key_id(key)}"
    )
    return OK


# -- opening -----------------------------------------------------------------------------------------------------------


def register_opening(parts: Commands) -> None:
    """Add ``certificate opening``."""
    text = "Write the key that lets somebody check an exported head against a certificate without the store."
    opening = add_command(parts, "opening", run_opening, text, changes="the opening was written")
    opening.add_argument("out", type=Path, metavar="OUT.json", help="the opening, for verify --opening")


def run_opening(options: argparse.Namespace) -> int:
    """Write the opening of the present state, with a warning."""
    from torchlssvm.audit.opening import WARNING
    from torchlssvm.errors import StoreError

    refuse_existing(options.out, options.store)
    with open_store(options, readonly=True) as store:
        opening = store.opening()
        if opening is None:
            raise StoreError("there is no commitment to the present state: issue a certificate first")
        opening.save(options.out)
        position = store.position
    warn(f"warning: {WARNING}")
    said = {"opening": str(options.out), "position": position, "warning": WARNING}
    emit(options, said, f"{options.out}: opens certificates of position {position}")
    return OK
