"""Certificates of erasure: what they say, how they are signed, and how anybody can verify them."""

from torchlssvm.audit.certificate import Certificate
from torchlssvm.audit.verification import Report, new_key, private_key, public_key, sign, verify

__all__ = ["Certificate", "Report", "new_key", "private_key", "public_key", "sign", "verify"]
