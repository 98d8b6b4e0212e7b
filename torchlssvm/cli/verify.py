"""``verify``: check a certificate of erasure. ``certificate show`` makes the same checks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import SUPPRESSION_KEY, TIMEOUT, UsageError, command, option
from torchlssvm.cli.console import emit
from torchlssvm.cli.export import load_head
from torchlssvm.cli.keys import TRUSTED_KEYS, trusted_keys
from torchlssvm.cli.store_access import holds_store, watched_store
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.audit import Certificate, Check, ErasureReceipt, Report
    from torchlssvm.store import SampleStore


def add_checks(parser: argparse.ArgumentParser) -> None:
    """Add the certificate, and the options with which to check it."""
    parser.add_argument("certificate", type=Path, metavar="CERT", help="certificate file")
    against = "store to check it against: reads the journal and sums the rows again"
    parser.add_argument("--store", type=Path, metavar="STORE", help=against)
    parser.add_argument(
        "--fast",
        action="store_true",
        help="check the sums with random vectors instead of summing again: takes as long as reading the rows once",
    )
    parser.add_argument("--receipt", type=Path, metavar="FILE", help="receipt of the erasure, which names the erased")
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
    """Make all checks for which options are given; VerificationError if one fails."""
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
    """Return the bytes of a certificate file, which are stamped and hashed as they are."""
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
