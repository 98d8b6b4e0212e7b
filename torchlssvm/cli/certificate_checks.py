"""Checks of a certificate that ``verify`` and ``certificate show`` share: their options, and how they are made."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import UsageError, seconds
from torchlssvm.cli.key_arguments import add_trusted_keys, trusted_keys
from torchlssvm.cli.store_folder import holds_store, watched_store
from torchlssvm.cli.suppression_arguments import add_suppression_key

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
    add_suppression_key(parser)
    parser.add_argument("--head", type=Path, metavar="FILE", help="check a head that export wrote")
    parser.add_argument(
        "--opening", type=Path, metavar="FILE", help="to check a head without the store (see certificate opening)"
    )
    add_trusted_keys(parser)
    parser.add_argument(
        "--time-stamp", type=Path, metavar="FILE", help="response of a time stamp authority (see certificate stamp)"
    )
    parser.add_argument(
        "--authority", type=Path, metavar="PEM", help="root certificate of that authority, which you trust"
    )
    parser.add_argument(
        "--timeout", type=seconds, default=30.0, metavar="S", help="seconds to wait for a writer (default: 30)"
    )


def check_certificate(
    options: argparse.Namespace, certificate: Certificate, receipt: ErasureReceipt | None, allow_unsigned: bool
) -> dict[str, Check]:
    """Make all checks that the options allow; VerificationError if one fails."""
    from torchlssvm import audit
    from torchlssvm.cli.exported_head import load_head
    from torchlssvm.store import check_absence

    if options.fast and options.store is None:
        raise UsageError("--fast needs --store")
    if options.opening is not None and (options.store is not None or options.head is None):
        raise UsageError("--opening is for --head without --store")
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
    from torchlssvm.audit.certificate import MAX_CERTIFICATE_BYTES
    from torchlssvm.untrusted import read_regular

    return read_regular(path, MAX_CERTIFICATE_BYTES)


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
