"""Certificates of erasure: their fields, their signatures and their verification."""

from torchlssvm.audit.certificate import Certificate
from torchlssvm.audit.keys import new_key, private_key, public_key, sign
from torchlssvm.audit.receipt import ErasureReceipt
from torchlssvm.audit.verification import Report, verify
from torchlssvm.backbone_hash import fingerprint

__all__ = [
    "Certificate",
    "ErasureReceipt",
    "Report",
    "fingerprint",
    "new_key",
    "private_key",
    "public_key",
    "sign",
    "verify",
]
