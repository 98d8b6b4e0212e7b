"""``torchlssvm compact``: destroy the bytes of erased samples."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.progress_bar import ProgressBar
from torchlssvm.cli.store_folder import open_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands
    from torchlssvm.store import SampleStore


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = "Destroy the bytes of erased samples in all files of the store."
    add_command(commands, "compact", run_compact, text, changes="the store was compacted")


def run_compact(options: argparse.Namespace) -> int:
    """Compact the store and print the result."""
    with open_store(options) as store:
        said: dict[str, Any] = {"position": store.position}
        text = compact_store(options, store, said)
    emit(options, said, text)
    return OK


def compact_store(options: argparse.Namespace, store: SampleStore, said: dict[str, Any]) -> str:
    """Compact, note the result in ``said`` for JSON, and return it as text."""
    with ProgressBar(options, "compacting"):
        done = store.compact()
    said |= {"compacted": True, "removed_snapshots": done.removed, "checkpoints": done.checkpoints}
    older = (
        f"; files elsewhere that are older and may hold what was erased: {', '.join(done.checkpoints)}"
        if done.checkpoints
        else ""
    )
    return (
        f"compacted: the bytes of erased samples are destroyed in all files of the store (event {done.position}){older}"
    )
