"""``torchlssvm subjects``: list the people of a store."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.console import OK, emit, table
from torchlssvm.cli.store_folder import open_store
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = "List the subjects of the store, i.e. whose samples it holds, and how many of each."
    add_command(commands, "subjects", run_subjects, text)


def run_subjects(options: argparse.Namespace) -> int:
    """Print each subject and the number of its samples."""
    with open_store(options, readonly=True) as store, store.view():
        found, total = store.subjects(), len(store)
    without = total - sum(found.values())
    lines = [table({name: counted(n, "sample") for name, n in found.items()})] if found else []
    lines.append(f"{counted(len(found), 'subject')}, {counted(total, 'sample')}")
    if without:
        lines.append(f"{counted(without, 'sample')} without a subject: a request can name these by their ids only")
    emit(options, {"subjects": found, "samples": total, "without_subject": without}, "\n".join(lines))
    return OK
