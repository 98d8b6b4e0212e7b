"""``torchlssvm relabel``: correct labels."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import UsageError, add_command
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.event_arguments import add_sample_selection, event_arguments, receipts_to_json
from torchlssvm.cli.store_folder import open_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    relabel = add_command(
        commands, "relabel", run_relabel, "Give samples other labels.", changes="the labels were changed"
    )
    add_sample_selection(relabel)
    relabel.add_argument(
        "--label", nargs="+", action="extend", metavar="L", help="one label for each id, or one for all"
    )
    relabel.add_argument("--file", type=Path, metavar="CSV", help="a CSV with the columns id and label")


def run_relabel(options: argparse.Namespace) -> int:
    """Relabel all samples named, in one event or one for each subject."""
    from torchlssvm.cli import settings
    from torchlssvm.cli.tables import CSVTable, values_by_id
    from torchlssvm.events import Relabel

    ids, labels = options.id, options.label
    if (options.file is None) == (ids is None and options.subject is None) or (options.file is None) == (
        labels is None
    ):
        raise UsageError("give --id and --label, or --subject and --label, or --file")
    if options.file is not None:
        table = CSVTable(options.file, ("id", "label"))
        if table.header is None or not {"id", "label"} <= set(table.header):
            raise ValueError(f"{options.file} needs a header with the columns id and label")
        found = values_by_id(table, "label")
        options.id = ids = list(found)
        labels = list(found.values())
    elif len(labels) == 1 and ids is not None:
        labels = labels * len(ids)
    if len(labels) != (1 if ids is None else len(ids)):
        raise UsageError(f"{len(labels)} labels for {'subjects, which take one' if ids is None else f'{len(ids)} ids'}")
    with open_store(options) as store:
        kept, classes = settings.load(store), store.head.num_classes
        y = [kept.label(text, classes) for text in labels]
        receipts = store.apply([Relabel(y[0] if ids is None else y, **given) for given in event_arguments(options)])
        store.refresh()
        said = receipts_to_json(receipts, store)
    emit(options, said, "\n".join(map(str, receipts)))
    return OK
