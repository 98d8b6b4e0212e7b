"""``torchlssvm stats``: count what a store holds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.console import OK, emit, table
from torchlssvm.cli.store_folder import open_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    add_command(commands, "stats", run_stats, "Show the numbers of the store: samples, classes, subjects, digest.")


def run_stats(options: argparse.Namespace) -> int:
    """Print the numbers of the store."""
    from torchlssvm.cli import settings

    with open_store(options, readonly=True) as store:
        kept, found = settings.load(store), store.stats()
    found |= {"class_names": kept.classes, "backbone": kept.backbone, "weights": kept.weights}
    shown = {name: value for name, value in found.items() if value not in (None, [], {})}
    shown["labels"] = ", ".join(f"{kept.name(int(k))}: {v}" for k, v in found["labels"].items()) or "none"
    shown["class_names"] = ", ".join(kept.classes) or "none"
    emit(options, found, table(shown))
    return OK
