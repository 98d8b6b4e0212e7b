"""``torchlssvm verify``: check a certificate of erasure."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import UsageError, add_command, seconds
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.key_arguments import add_trusted_keys, trusted_keys
from torchlssvm.cli.store_folder import holds_store, watched_store
from torchlssvm.cli.suppression_arguments import add_suppression_key

if TYPE_CHECKING:
    from torchlssvm.audit.verification import Report
    from torchlssvm.cli.arguments import Commands
    from torchlssvm.store import SampleStore


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = "Check a certificate of erasure. Exit code 3 when it does not hold."
    verify = add_command(commands, "verify", run_verify, text, store=False)
    verify.add_argument("certificate", type=Path, metavar="CERT", help="file of the certificate")
    against = "store to check it against: follows the journal and sums the rows anew"
    verify.add_argument("--store", type=Path, metavar="STORE", help=against)
    verify.add_argument(
        "--fast",
        action="store_true",
        help="check the sums against the rows with random vectors instead: the time of reading them once",
    )
    verify.add_argument(
        "--receipt", type=Path, metavar="FILE", help="receipt of the erasure: tells whom the certificate is about"
    )
    add_suppression_key(verify)
    verify.add_argument("--head", type=Path, metavar="FILE", help="check a head that export wrote")
    verify.add_argument(
        "--opening", type=Path, metavar="FILE", help="to check a head without the store (see certificate opening)"
    )
    add_trusted_keys(verify)
    verify.add_argument(
        "--allow-unsigned",
        action="store_true",
        help="accept a certificate without a signature, or verify without a key",
    )
    verify.add_argument(
        "--timeout", type=seconds, default=30.0, metavar="S", help="seconds to wait for a writer (default: 30)"
    )


def run_verify(options: argparse.Namespace) -> int:
    """Check the certificate; VerificationError says why it does not hold."""
    from torchlssvm import audit
    from torchlssvm.audit.certificate import Certificate
    from torchlssvm.cli.exported_head import load_head
    from torchlssvm.store import check_absence

    if options.fast and options.store is None:
        raise UsageError("--fast needs --store")
    if options.opening is not None and (options.store is not None or options.head is None):
        raise UsageError("--opening is for --head without --store")
    certificate = Certificate.load(options.certificate)
    receipt = None if options.receipt is None else audit.ErasureReceipt.load(options.receipt)
    key = trusted_keys(options)
    head = None if options.head is None else load_head(options.head)
    judge = partial(audit.verify, certificate, public_key=key, allow_unsigned=options.allow_unsigned, fast=options.fast)
    if options.store is None:
        checks = judge(head, opening=options.opening).checks
        checks |= {} if receipt is None else {"receipt": receipt.check(certificate)}
    else:
        absence = partial(check_absence, certificate=certificate, receipt=receipt)
        checks = verify_with_store(options, judge, absence, head)
    said = {"verified": True, "erased": certificate.erased, "compacted": certificate.compacted, "checks": checks}
    text = (
        f"the certificate holds: {certificate.erased} samples erased, compacted: {str(certificate.compacted).lower()}"
    )
    emit(options, said, "\n".join([text, *(f"  {name}: {result}" for name, result in checks.items())]))
    return OK


def verify_with_store(
    options: argparse.Namespace,
    judge: Callable[..., Report],
    absence: Callable[[SampleStore], dict[str, str]],
    head: Any,
) -> dict[str, str]:
    """Check the store and its head, and another head if there is one. A store that cannot be read fails the verification."""
    from torchlssvm.errors import StoreBusyError, StoreError, VerificationError

    try:
        with watched_store(options, "verifying") as store:
            if not options.fast:  # there it is done once
                store.check_structure()  # first: pages that lead back to themselves would hold rows without end
            checks = judge(store.head, store).checks | absence(store)
            return checks if head is None else checks | {"exported head": judge(head, store).checks["head"]}
    except StoreBusyError:
        raise
    except (StoreError, UnicodeDecodeError) as error:  # SQLite's messages quote damaged text
        if not holds_store(options.store):  # a mistake in the command line, not in the store
            raise
        raise VerificationError(f"the store does not hold up: {error}") from error
