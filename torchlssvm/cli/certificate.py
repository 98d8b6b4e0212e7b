"""``torchlssvm certificate``: issue a certificate of erasure, sign it again, and write what others need beside it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import UsageError, add_command
from torchlssvm.cli.certificate_checks import add_checks, check_certificate, read_certificate_file
from torchlssvm.cli.console import OK, emit, warn
from torchlssvm.cli.key_arguments import add_signing_key, signing_key, trusted_keys
from torchlssvm.cli.store_folder import check_output, open_store, refuse_inside_store
from torchlssvm.wording import counted

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
    register_stamp(parts)
    register_show(parts)


def run_help(options: argparse.Namespace) -> int:
    """Say that a part is missing."""
    raise UsageError("name a part: issue, sign, opening, stamp or show", options.parser)


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
    emit(options, said, f"{options.out}: certificate of {counted(certificate.erased, 'erased sample')}, {how}{rest}")
    return OK


# -- show --------------------------------------------------------------------------------------------------------------


def register_show(parts: Commands) -> None:
    """Add ``certificate show``."""
    text = "Explain a certificate in plain words. With keys, a store or a receipt it is checked first, as verify does."
    show = add_command(parts, "show", run_show, text, store=False, changes="the page was written")
    add_checks(show)
    show.add_argument("--html", type=Path, metavar="OUT.html", help="write a page to look at and to print")
    show.add_argument("--force", action="store_true", help="overwrite an existing page")


def run_show(options: argparse.Namespace) -> int:
    """Print what a certificate says, and write the page."""
    from torchlssvm import audit
    from torchlssvm.report.certificate_page import CertificateFacts, certificate_lines, certificate_page

    if options.html is not None:
        check_output(options.html, options.store, options.force)
    data = read_certificate_file(options.certificate)
    certificate = audit.Certificate.from_json(data)
    receipt = None if options.receipt is None else audit.ErasureReceipt.load(options.receipt)
    key = trusted_keys(options)
    checks = check_certificate(options, certificate, receipt, allow_unsigned=key is None)
    facts = CertificateFacts(certificate, data, options.certificate.name, checks)
    said = {
        "certificate": str(options.certificate),
        "summary": facts.summary,
        "facts": facts.facts,
        "checks": {name: str(check) for name, check in checks.items()},
        "not_covered": facts.not_covered,
        "fingerprints": facts.fingerprints,
        "html": None if options.html is None else str(options.html),
    }
    text = certificate_lines(facts)
    if options.html is not None:
        options.html.write_text(certificate_page(facts), encoding="utf-8")
        named = " The page names people, from the receipt." if receipt is not None else ""
        text = [f"{options.html}: the certificate as a page. {facts.summary}{named}"]
    emit(options, said, text)
    return OK


# -- stamp -------------------------------------------------------------------------------------------------------------


def register_stamp(parts: Commands) -> None:
    """Add ``certificate stamp``."""
    text = (
        "Write the request for a time stamp (RFC 3161), or put the authority's response beside the certificate. Nothing is "
        "sent from here."
    )
    stamp = add_command(parts, "stamp", run_stamp, text, store=False, changes="the file was written")
    stamp.add_argument("certificate", type=Path, metavar="CERT", help="file of the certificate")
    which = stamp.add_mutually_exclusive_group(required=True)
    which.add_argument("--request", type=Path, metavar="OUT.tsq", help="write the request, to be sent to an authority")
    which.add_argument("--response", type=Path, metavar="FILE", help="check its response, and write it to CERT.tsr")
    stamp.add_argument(
        "--authority", type=Path, metavar="PEM", help="root certificate of the authority, which you trust"
    )


def run_stamp(options: argparse.Namespace) -> int:
    """Write a request, or take in a response."""
    from torchlssvm import audit
    from torchlssvm.audit.time_stamp import MAX_STAMP_BYTES
    from torchlssvm.untrusted import read_regular

    data = read_certificate_file(options.certificate)
    audit.Certificate.from_json(data)
    if options.request is not None:
        if options.authority is not None:
            raise UsageError("--authority goes with --response")
        refuse_existing(options.request)
        options.request.write_bytes(audit.time_stamp_request(data))
        text = (
            f"{options.request}: send it to a time stamp authority (it holds a hash of the certificate only), then: "
            f"torchlssvm certificate stamp {options.certificate} --response FILE --authority PEM"
        )
        emit(options, {"request": str(options.request)}, text)
        return OK
    out = options.certificate.with_name(options.certificate.name + ".tsr")
    stamp = audit.TimeStamp.load(options.response)
    found = stamp.check(data, options.authority)
    if not (out.exists() and out.samefile(options.response)):
        refuse_existing(out)
        out.write_bytes(read_regular(options.response, MAX_STAMP_BYTES))
    emit(options, {"time_stamp": str(out), "time": stamp.time.isoformat(), "check": found}, f"{out}: {found}")
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
    text = "Write the key with which others can check an exported head against a certificate without the store."
    opening = add_command(parts, "opening", run_opening, text, changes="the opening was written")
    opening.add_argument("out", type=Path, metavar="OUT.json", help="the opening, for verify --opening")


def run_opening(options: argparse.Namespace) -> int:
    """Write the opening of the present state, with a warning."""
    from torchlssvm.audit.opening import OPENING_WARNING
    from torchlssvm.errors import StoreError

    refuse_existing(options.out, options.store)
    with open_store(options, readonly=True) as store:
        opening = store.opening()
        if opening is None:
            raise StoreError("there is no commitment to the present state: issue a certificate first")
        opening.save(options.out)
        position = store.position
    warn(f"warning: {OPENING_WARNING}")
    said = {"opening": str(options.out), "position": position, "warning": OPENING_WARNING}
    emit(options, said, f"{options.out}: opens certificates of position {position}")
    return OK
