"""``torchlssvm certificate``: issue, sign, time-stamp and explain certificates of erasure. ``verify``: check one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import FORCE, SUPPRESSION_KEY, TIMEOUT, UsageError, command, one_of, option
from torchlssvm.cli.console import emit, warn
from torchlssvm.cli.export import load_head
from torchlssvm.cli.keys import SIGNING_KEY, TRUSTED_KEYS, signing_key, trusted_keys
from torchlssvm.cli.store_access import check_output, open_store, watched_store
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.audit import Certificate, Check, ErasureReceipt, Report
    from torchlssvm.store import SampleStore

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
    check_output(options.out)
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

    check_output(options.out)
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


# -- checks ------------------------------------------------------------------------------------------------------------


def add_checks(parser: argparse.ArgumentParser) -> None:
    """Add the certificate, and the options with which to check it."""
    CERTIFICATE(parser)
    against = "store to check the certificate against: reads the journal and sums the rows again"
    parser.add_argument("--store", type=Path, metavar="STORE", help=against)
    parser.add_argument(
        "--fast",
        action="store_true",
        help="check the sums with random vectors instead of summing the rows again; takes as long as reading the rows once",
    )
    parser.add_argument("--receipt", type=Path, metavar="FILE", help="receipt of the erasure, with the erased names")
    SUPPRESSION_KEY(parser)
    parser.add_argument(
        "--exported-head", dest="head", type=Path, metavar="FILE", help="also check this head, written by export"
    )
    parser.add_argument(
        "--opening", type=Path, metavar="FILE", help="key to check a head without the store (see certificate opening)"
    )
    TRUSTED_KEYS(parser)
    parser.add_argument(
        "--time-stamp", type=Path, metavar="FILE", help="response of a time stamp authority (see certificate stamp)"
    )
    parser.add_argument("--authority", type=Path, metavar="PEM", help="root certificate of an authority that you trust")
    TIMEOUT(parser)


def check_certificate(
    options: argparse.Namespace, certificate: Certificate, receipt: ErasureReceipt | None, allow_unsigned: bool
) -> dict[str, Check]:
    """Make all checks for which options are given. Raises VerificationError if one of them fails."""
    from torchlssvm import audit
    from torchlssvm.store import check_absence

    if options.fast and options.store is None:
        raise UsageError("--fast needs --store")
    if options.opening is not None and (options.store is not None or options.head is None):
        raise UsageError("--opening needs --exported-head, and cannot be used with --store")
    if options.authority is not None and options.time_stamp is None:
        raise UsageError("--authority needs --time-stamp")
    key = trusted_keys(options)
    head = None if options.head is None else load_head(options.head)
    judge = partial(audit.verify, certificate, public_key=key, allow_unsigned=allow_unsigned, fast=options.fast)
    if options.store is None:
        checks = judge(head, opening=options.opening).checks
        checks |= {} if receipt is None else {"receipt": receipt.check(certificate)}
    else:
        absence = partial(check_absence, certificate=certificate, receipt=receipt)
        checks = check_with_store(options, judge, absence, head)
    if options.time_stamp is not None:
        stamp = audit.TimeStamp.load(options.time_stamp)
        checks |= {"time stamp": stamp.check(read_certificate_file(options.certificate), options.authority)}
    return checks


def read_certificate_file(path: Path) -> bytes:
    """Return the bytes of a certificate file. Time stamps and hashes cover exactly these bytes."""
    from torchlssvm.audit.documents import MAX_BYTES
    from torchlssvm.untrusted import read_regular

    return read_regular(path, MAX_BYTES["certificate"])


def check_with_store(
    options: argparse.Namespace,
    judge: Callable[..., Report],
    absence: Callable[[SampleStore], dict[str, Check]],
    head: Any,
) -> dict[str, Check]:
    """Check the store and its head, and another head if one is given. A store that cannot be read fails the verification."""
    from torchlssvm.errors import StoreBusyError, StoreError, VerificationError
    from torchlssvm.files import holds_store

    try:
        with watched_store(options, "verifying") as store:
            if not options.fast:  # the fast check does this itself
                store.check_structure()  # first, since a cycle of database pages would yield rows forever
            checks = judge(store.head, store).checks | absence(store)
            if head is None:
                return checks
            return checks | {"exported head": replace(judge(head, store).checks["head"], name="exported head")}
    except StoreBusyError:
        raise
    except (StoreError, UnicodeDecodeError) as error:  # SQLite's messages quote damaged text
        if not holds_store(options.store):  # a wrong path, not a damaged store
            raise
        raise VerificationError(f"the store is damaged: {error}") from error


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
        check_output(options.html, options.force)
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


@command(
    "verify",
    "Check a certificate of erasure. The exit code is 3 if it does not hold.",
    add_checks,
    option(
        "--allow-unsigned",
        action="store_true",
        help="accept an unsigned certificate, or do not check the signature",
    ),
    store=False,
)
def verify(options: argparse.Namespace) -> int:
    """Check the certificate and print the result of each check."""
    from torchlssvm.audit import Certificate, ErasureReceipt

    certificate = Certificate.load(options.certificate)
    receipt = None if options.receipt is None else ErasureReceipt.load(options.receipt)
    checks = check_certificate(options, certificate, receipt, options.allow_unsigned)
    said = {
        "verified": True,
        "erased": certificate.erased,
        "compacted": certificate.compacted,
        "erasure_checked": options.store is not None,
        "return_checked": options.store is not None and receipt is not None,
        "checks": {name: str(check) for name, check in checks.items()},
        "outcomes": {name: check.outcome.value for name, check in checks.items()},
    }
    return emit(
        options, said, [headline(options, certificate), *(f"  {name}: {check}" for name, check in checks.items())]
    )


def headline(options: argparse.Namespace, certificate: Certificate) -> str:
    """Return the result on one line, with the option that would check more."""
    if options.store is None:
        signed = "the signature is valid" if options.public_key else "the signature was not checked"
        head = "" if options.head is None else " and the head matches the certificate"
        return f"{signed}{head}; the erasure was not checked (give --store)"
    gone = "bytes destroyed" if certificate.compacted else "bytes not yet destroyed when the certificate was issued"
    erased = f"{counted(certificate.erased, 'sample')} erased, {gone}"
    # A suppression list is no substitute: samples that were erased without a request are not on it.
    back = "; a return under the same ids was not checked (give --receipt)"
    return f"the certificate holds: {erased}{back if options.receipt is None else ''}"
