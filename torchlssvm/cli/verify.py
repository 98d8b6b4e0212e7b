"""``verify``: check a certificate of erasure; the same checks for ``certificate show``."""

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
    """Add the certificate and all that it can be checked against."""
    parser.add_argument("certificate", type=Path, metavar="CERT", help="file of the certificate")
    against = "store to check it against: follows the journal and sums the rows again"
    parser.add_argument("--store", type=Path, metavar="STORE", help=against)
    parser.add_argument(
        "--fast",
        action="store_true",
        help="check the sums against the rows with random vectors instead: the time of reading them once",
    )
    parser.add_argument(
        "--receipt", type=Path, metavar="FILE", help="receipt of the erasure: tells whom the certificate is about"
    )
    SUPPRESSION_KEY(parser)
    parser.add_argument(
        "--exported-head", dest="head", type=Path, metavar="FILE", help="check a head that export wrote"
    )
    parser.add_argument(
        "--opening", type=Path, metavar="FILE", help="to check a head without the store (see certificate opening)"
    )
    TRUSTED_KEYS(parser)
    parser.add_argument(
        "--time-stamp", type=Path, metavar="FILE", help="response of a time stamp authority (see certificate stamp)"
    )
    parser.add_argument(
        "--authority", type=Path, metavar="PEM", help="root certificate of that authority, which you trust"
    )
    TIMEOUT(parser)


def check_certificate(
    options: argparse.Namespace, certificate: Certificate, receipt: ErasureReceipt | None, allow_unsigned: bool
) -> dict[str, Check]:
    """Make all checks that the options allow; VerificationError if one fails."""
    from torchlssvm import audit
    from torchlssvm.store import check_absence

    if options.fast and options.store is None:
        raise UsageError("--fast needs --store")
    if options.opening is not None and (options.store is not None or options.head is None):
        raise UsageError("--opening is for --exported-head without --store")
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
    """The bytes of a certificate's file, as they are stamped and fingerprinted."""
    from torchlssvm.audit.documents import MAX_BYTES
    from torchlssvm.untrusted import read_regular

    return read_regular(path, MAX_BYTES["certificate"])


def check_with_store(
    options: argparse.Namespace,
    judge: Callable[..., Report],
    absence: Callable[[SampleStore], dict[str, Check]],
    head: Any,
) -> dict[str, Check]:
    """Check the store and its head, and another head if there is one. A store that cannot be read fails the verification."""
    from torchlssvm.errors import StoreBusyError, StoreError, VerificationError

    try:
        with watched_store(options, "verifying") as store:
            if not options.fast:  # there it is done once
                store.check_structure()  # first: pages that lead back to themselves would hold rows without end
            checks = judge(store.head, store).checks | absence(store)
            if head is None:
                return checks
            return checks | {"exported head": replace(judge(head, store).checks["head"], name="exported head")}
    except StoreBusyError:
        raise
    except (StoreError, UnicodeDecodeError) as error:  # SQLite's messages quote damaged text
        if not holds_store(options.store):  # a mistake in the command line, not in the store
            raise
        raise VerificationError(f"the store does not hold up: {error}") from error


@command(
    "verify",
    "Check a certificate of erasure. Exit code 3 when it does not hold.",
    add_checks,
    option(
        "--allow-unsigned",
        action="store_true",
        help="accept a certificate without a signature, or verify without a key",
    ),
    store=False,
)
def verify(options: argparse.Namespace) -> int:
    """Check the certificate; VerificationError says why it does not hold."""
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
    """The result in one line, with what was not checked and the option that would check it."""
    if options.store is None:
        signed = "the signature is valid" if options.public_key else "the signature was not checked"
        head = "" if options.head is None else ", the head is the one that the certificate commits to"
        return f"{signed}{head}; give --store to check the erasure itself"
    one = certificate.erased == 1
    gone = "destroyed" if certificate.compacted else "not destroyed when it was issued"
    erased = f"{counted(certificate.erased, 'sample')} erased, {'its' if one else 'their'} bytes {gone}"
    # A suppression list does not tell: samples that were erased without a request are not on it.
    back = f"; give --receipt to check that {'it was' if one else 'they were'} not added again"
    return f"the certificate holds: {erased}{back if options.receipt is None else ''}"
