"""The file of a head that ``export`` writes and ``verify --head`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchlssvm.linear import LinearHead
    from torchlssvm.store import SampleStore

EXPORT_FORMAT = "torchlssvm-export-1"


def write_head(store: SampleStore, path: Path) -> int:
    """Write options and state_dict as plain data, for ``torch.load(path, weights_only=True)``; return the number of samples."""
    import torch

    from torchlssvm.cli import settings

    head = store.head
    out = {"format": EXPORT_FORMAT, "config": head.config(), "state_dict": dict(head.state_dict())}
    out |= {"classes": settings.load(store).classes, "fingerprint": store.fingerprint, "position": store.position}
    out["head"] = type(head).__name__
    try:
        torch.save(out, path)
    except RuntimeError as error:  # torch's writer: no such folder, no room
        raise OSError(f"{path} cannot be written: {error}") from error
    return len(store)


def load_head(path: Path) -> LinearHead:
    """Load a head that ``export`` wrote; w, b, C and P in the file must be those it computes with, which ``verify`` checks."""
    from torchlssvm import LSSVMHead, VerificationError
    from torchlssvm.audit.verification import WEIGHT_TOLERANCE
    from torchlssvm.backbones import load_pt
    from torchlssvm.errors import StoreError
    from torchlssvm.store.head_adapter import head_from
    from torchlssvm.untrusted import check_regular

    try:
        check_regular(path)
        found = load_pt(path)
    except ValueError as error:
        raise VerificationError(str(error)) from error
    if not isinstance(found, dict) or found.get("format") != EXPORT_FORMAT:
        raise VerificationError(f"{path} was not written by torchlssvm export")
    try:
        head = head_from({"type": found.get("head", LSSVMHead.__name__)} | found["config"], None)
        head.load_state_dict(found["state_dict"])
        for name, value in head.state_dict().items():
            given = found["state_dict"][name]
            if name in ("w", "b", "C", "P") and not value.allclose(
                given, WEIGHT_TOLERANCE, WEIGHT_TOLERANCE * float(value.abs().max())
            ):
                raise VerificationError(f"{name} in {path} is not what the head there computes with")
    except (AttributeError, KeyError, RecursionError, RuntimeError, StoreError, TypeError, ValueError) as error:
        raise VerificationError(f"{path} does not hold a head that can be loaded: {str(error)[:500]}") from error
    return head
