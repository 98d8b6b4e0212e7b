"""Certificates of erasure: their fields, their signatures and their verification."""

from torchlssvm.audit.certificate import Certificate, Opening
from torchlssvm.audit.checks import Check, FileState, Outcome, Report
from torchlssvm.audit.keys import (
    PassphraseError,
    find_signer,
    key_id,
    new_key,
    private_key,
    public_key,
    sign,
    trusted_keys,
)
from torchlssvm.audit.receipt import ErasureReceipt
from torchlssvm.audit.time_stamp import TimeStamp, time_stamp_request
from torchlssvm.audit.verification import verify
from torchlssvm.backbone_hash import fingerprint

__all__ = [
    "Certificate",
    "Check",
    "ErasureReceipt",
    "FileState",
    "Opening",
    "Outcome",
    "PassphraseError",
    "Report",
    "TimeStamp",
    "find_signer",
    "fingerprint",
    "key_id",
    "new_key",
    "private_key",
    "public_key",
    "sign",
    "time_stamp_request",
    "trusted_keys",
    "verify",
]
