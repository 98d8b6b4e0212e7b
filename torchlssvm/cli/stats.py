"""``torchlssvm stats``: count what a store holds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.console import OK, emit, table
from torchlssvm.cli.store_folder import open_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands
    from torchlssvm.store import SampleStore


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    add_command(
        commands,
        "stats",
        run_stats,
        "Show the numbers of the store: samples, classes, subjects, rho, the grid, digest.",
    )


def run_stats(options: argparse.Namespace) -> int:
    """Print the numbers of the store."""
    from torchlssvm.cli import settings

    with open_store(options, readonly=True) as store:
        kept, found = settings.load(store), numbers(store)
    found |= {"class_names": kept.classes, "backbone": kept.backbone, "weights": kept.weights}
    shown = {name: value for name, value in found.items() if value not in (None, [], {})}
    shown["labels"] = ", ".join(f"{kept.name(int(k))}: {v}" for k, v in found["labels"].items()) or "none"
    shown["class_names"] = ", ".join(kept.classes) or "none"
    emit(options, found, table(shown))
    return OK


def numbers(store: SampleStore) -> dict[str, Any]:
    """The numbers of the store, with rho and the largest feature that its grid takes; the head is not restored for this."""
    from torchlssvm.linear.data_choices import DataChoices

    with store.view():
        found, records = store.stats(), store.certificates
        rho, chosen = records.db.get("head").get("rho"), records.db.get("chosen", None)
        grid = records.table.codec.grid
    if rho is not None:  # a kernel machine has none
        made = DataChoices.from_json((chosen or {}).get("made", {}), None)
        found["rho"] = str(made.listed(rho).get("rho", f"{rho!r}, as given"))
    found["limit"] = None if grid is None else grid.max_value
    return found
