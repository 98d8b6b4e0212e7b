"""``torchlssvm certificate``: issue, sign, time-stamp and explain certificates of erasure."""

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

CERTIFICATE = option("certificate", type=Path, metavar="CERT", help="certificate file")


@command(
    "certificate issue",
    "Write a certificate of erasures.",
    option("out", type=Path, metavar="OUT.json", help="certificate to write"),
    one_of(
        option("--event", nargs="+", action="extend", metavar="E", help="event ids of the erasures (see history)"),
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
                raise ValueError(f"nothing has been erased for the request {options.request!r}")
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
    rest = "" if certificate.compacted else "; not compacted: the store's files may still contain the bytes"
    return emit(
        options, said, f"{options.out}: certificate of {counted(certificate.erased, 'erased sample')}, {how}{rest}"
    )


@command(
    "certificate sign",
    "Add a signature to a certificate, for example with a new key.",
    CERTIFICATE,
    option("out", type=Path, metavar="OUT.json", help="signed certificate to write"),
    partial(SIGNING_KEY, required=True),
    store=False,
    changes="the certificate was written",
)
def sign(options: argparse.Namespace) -> int:
    """Write the certificate with one more signature."""
    from torchlssvm import audit

    check_output(options.out)
    certificate = audit.Certificate.load(options.certificate)
    key = signing_key(options)
    signed = audit.sign(certificate, key)
    signed.save(options.out)
    said = {"certificate": str(options.out), "signatures": len(signed.signatures), "key_id": audit.key_id(key)}
    return emit(
        options,
        said,
        f"{options.out}: {counted(len(signed.signatures), 'signature')}, the new one by sha256:{audit.key_id(key)}",
    )


@command(
    "certificate opening",
    "Write a key that lets others check an exported head against a certificate without the store.",
    option("out", type=Path, metavar="OUT.json", help="key to write, for verify --opening"),
    changes="the opening was written",
)
def opening(options: argparse.Namespace) -> int:
    """Write the opening of the current state, with a warning."""
    from torchlssvm.audit.certificate import OPENING_WARNING
    from torchlssvm.errors import StoreError

    check_output(options.out, options.store)
    with open_store(options, readonly=True) as store:
        made = store.opening()
        if made is None:
            raise StoreError("no certificate commits to the current state: issue one first")
        made.save(options.out)
        position = store.position
    warn(f"warning: {OPENING_WARNING}")
    said = {"opening": str(options.out), "position": position, "warning": OPENING_WARNING}
    return emit(options, said, f"{options.out}: opens the certificates issued at position {position} of the journal")


@command(
    "certificate stamp",
    "Write a query for a time stamp (RFC 3161), or check the authority's response and store it next to the certificate. You "
    "send the query yourself.",
    CERTIFICATE,
    one_of(
        option("--query", type=Path, metavar="OUT.tsq", help="query to write; send it to a time stamp authority"),
        option("--response", type=Path, metavar="FILE", help="response of the authority; written to CERT.tsr"),
        required=True,
    ),
    option("--authority", type=Path, metavar="PEM", help="root certificate of an authority that you trust"),
    store=False,
    changes="the file was written",
)
def stamp(options: argparse.Namespace) -> int:
    """Write a query, or check and store a response."""
    from torchlssvm import audit
    from torchlssvm.audit.time_stamp import MAX_STAMP_BYTES
    from torchlssvm.untrusted import read_regular

    data = read_certificate_file(options.certificate)
    audit.Certificate.from_json(data)
    if options.query is not None:
        if options.authority is not None:
            raise UsageError("--authority needs --response")
        check_output(options.query)
        options.query.write_bytes(audit.time_stamp_request(data))
        text = (
            f"{options.query}: send it to a time stamp authority (it contains only a hash of the certificate), then run "
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
    "Explain a certificate in plain words. It is checked first against the keys, the store or the receipt that you give.",
    add_checks,
    option("--html", type=Path, metavar="OUT.html", help="write an HTML page"),
    FORCE,
    store=False,
    changes="the page was written",
)
def show_certificate(options: argparse.Namespace) -> int:
    """Print what a certificate says, or write it as a page."""
    from torchlssvm import audit
    from torchlssvm.audit.documents import write_private
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
        write_private(options.html, certificate_page(facts).encode(), overwrite=options.force)
        named = " The page names people from the receipt." if receipt is not None else ""
        text = [f"{options.html}: the certificate as a page. {facts.summary}{named}"]
    return emit(options, said, text)
