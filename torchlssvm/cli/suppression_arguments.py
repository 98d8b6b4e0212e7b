"""Options of commands that meet a suppression list, and the words for it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.store import SampleStore


def add_suppression_key(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--suppression-key``."""
    parser.add_argument(
        "--suppression-key",
        type=Path,
        metavar="FILE",
        help="key of the store's suppression list (default: the variable TORCHLSSVM_SUPPRESSION_KEY)",
    )


def protection_text(store: SampleStore, request: str | None, samples: int, subjects: int) -> str:
    """Say if erased samples can be added again."""
    if store.suppression.path is None:
        return (
            "no suppression list is in use: the same samples could be added again "
            f"(torchlssvm suppression {store.path} --list FILE)"
        )
    if request is None:
        return "not entered in the suppression list, since this belongs to no request: the same samples could be added again"
    whose = f" and {counted(subjects, 'subject')}" if subjects else ""
    return f"{counted(samples, 'sample')}{whose} entered in the suppression list: they cannot be added again"
