"""``torchlssvm verify``: check a certificate of erasure."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.certificate_checks import add_checks, check_certificate
from torchlssvm.cli.console import OK, emit
from torchlssvm.wording import counted

if TYPE_CHECKING:
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
    said = {"verified": True, "erased": certificate.erased, "compacted": certificate.compacted, "checks": checks}
    gone = "destroyed" if certificate.compacted else "not destroyed when it was issued"
    text = f"the certificate holds: {counted(certificate.erased, 'sample')} erased, their bytes {gone}"
    emit(options, said, "\n".join([text, *(f"  {name}: {result}" for name, result in checks.items())]))
    return OK
