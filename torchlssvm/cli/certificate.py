"""``torchlssvm certificate``: issue a certificate of erasure, sign it again, and write what others need beside it."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from torchlssvm.cli.arguments import FORCE, UsageError, command, one_of, option
from torchlssvm.cli.console import emit, warn
from torchlssvm.cli.keys import SIGNING_KEY, signing_key, trusted_keys
from torchlssvm.cli.store_access import check_output, open_store
from torchlssvm.cli.verify import add_checks, check_certificate, read_certificate_file
from torchlssvm.wording import counted

CERTIFICATE = option("certificate", type=Path, metavar="CERT", help="file of the certificate")


@command(
    "certificate issue",
    "Write a certificate of erasures.",
    option("out", type=Path, metavar="OUT.json", help="the certificate"),
    one_of(
        option("--event", nargs="+", action="extend", metavar="E", help="erasures by their event ids, see history"),
        option("--request", metavar="R", help="all erasures of a request"),
        required=True,
    ),
    SIGNING_KEY,
    changes="the certificate was written",
)
def issue(options: argparse.Namespace) -> int:
    """Issue and write a certificate."""
    check_output(options.out, options.store)
    key = signing_key(options)
    with open_store(options) as store:
        events = options.event
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
    return emit(
        options, said, f"{options.out}: certificate of {counted(certificate.erased, 'erased sample')}, {how}{rest}"
    )


@command(
    "certificate sign",
    "Add a signature to a certificate, for example with the key that takes over from the old one.",
    CERTIFICATE,
    option("out", type=Path, metavar="OUT.json", help="the certificate with one signature more"),
    partial(SIGNING_KEY, required=True),
    store=False,
    changes="the certificate was written",
)
def sign(options: argparse.Namespace) -> int:
    """Write the certificate with one signature more."""
    from torchlssvm import audit

    check_output(options.out)
    certificate = audit.Certificate.load(options.certificate)
    key = signing_key(options)
    signed = audit.sign(certificate, key)
    signed.save(options.out)
    said = {"certificate": str(options.out), "signatures": len(signed.signatures), "key_id": audit.key_id(key)}
    return emit(
        options, said, f"{options.out}: {len(signed.signatures)} signatures, the new one by sha256:{audit.key_id(key)}"
    )


@command(
    "certificate opening",
    "Write the key with which others can check an exported head against a certificate without the store.",
    option("out", type=Path, metavar="OUT.json", help="the opening, for verify --opening"),
    changes="the opening was written",
)
def opening(options: argparse.Namespace) -> int:
    """Write the opening of the present state, with a warning."""
    from torchlssvm.audit.certificate import OPENING_WARNING
    from torchlssvm.errors import StoreError

    check_output(options.out, options.store)
    with open_store(options, readonly=True) as store:
        made = store.opening()
        if made is None:
            raise StoreError("there is no commitment to the present state: issue a certificate first")
        made.save(options.out)
        position = store.position
    warn(f"warning: {OPENING_WARNING}")
    said = {"opening": str(options.out), "position": position, "warning": OPENING_WARNING}
    return emit(options, said, f"{options.out}: opens certificates of position {position}")


@command(
    "certificate stamp",
    "Write the query for a time stamp (RFC 3161), or put the authority's response beside the certificate. Nothing is sent "
    "from here.",
    CERTIFICATE,
    one_of(
        option("--query", type=Path, metavar="OUT.tsq", help="write the query, to be sent to an authority"),
        option("--response", type=Path, metavar="FILE", help="check its response, and write it to CERT.tsr"),
        required=True,
    ),
    option("--authority", type=Path, metavar="PEM", help="root certificate of the authority, which you trust"),
    store=False,
    changes="the file was written",
)
def stamp(options: argparse.Namespace) -> int:
    """Write a request, or take in a response."""
    from torchlssvm import audit
    from torchlssvm.audit.time_stamp import MAX_STAMP_BYTES
    from torchlssvm.untrusted import read_regular

    data = read_certificate_file(options.certificate)
    audit.Certificate.from_json(data)
    if options.query is not None:
        if options.authority is not None:
            raise UsageError("--authority goes with --response")
        check_output(options.query)
        options.query.write_bytes(audit.time_stamp_request(data))
        text = (
            f"{options.query}: send it to a time stamp authority (it holds a hash of the certificate only), then: "
            f"torchlssvm certificate stamp {options.certificate} --response FILE --authority PEM"
        )
        return emit(options, {"query": str(options.query)}, text)
    out = options.certificate.with_name(options.certificate.name + ".tsr")
    stamp = audit.TimeStamp.load(options.response)
    found = stamp.check(data, options.authority)
    if not (out.exists() and out.samefile(options.response)):
        check_output(out)
        out.write_bytes(read_regular(options.response, MAX_STAMP_BYTES))
    return emit(
        options, {"time_stamp": str(out), "time": stamp.time.isoformat(), "check": str(found)}, f"{out}: {found}"
    )


@command(
    "certificate show",
    "Explain a certificate in plain words. With keys, a store or a receipt it is checked first, as verify does.",
    add_checks,
    option("--html", type=Path, metavar="OUT.html", help="write a page to look at and to print"),
    FORCE,
    store=False,
    changes="the page was written",
)
def show_certificate(options: argparse.Namespace) -> int:
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
    return emit(options, said, text)
