"""``torchlssvm verify``: check a certificate of erasure."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.certificate_checks import add_checks, check_certificate
from torchlssvm.cli.console import OK, emit
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.audit import Certificate
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = "Check a certificate of erasure. Exit code 3 when it does not hold."
    verify = add_command(commands, "verify", run_verify, text, store=False)
    add_checks(verify)
    verify.add_argument(
        "--allow-unsigned",
        action="store_true",
        help="accept a certificate without a signature, or verify without a key",
    )


def run_verify(options: argparse.Namespace) -> int:
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
    emit(options, said, [headline(options, certificate), *(f"  {name}: {check}" for name, check in checks.items())])
    return OK


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
