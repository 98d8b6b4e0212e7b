"""``torchlssvm suppression``: let a store use a suppression list, or show the one it uses."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import add_command
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.store_folder import open_store
from torchlssvm.cli.suppression_arguments import add_suppression_key
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = (
        "Keep out samples that were erased on request. The list is a file outside the store, which several stores may share; "
        "without its key (see keygen --suppression) it reveals nothing."
    )
    parser = add_command(commands, "suppression", run_suppression, text, changes="the store uses the list")
    parser.add_argument(
        "--list", type=Path, metavar="FILE", help="use this list from now on; it is made if it is not there"
    )
    add_suppression_key(parser)


def run_suppression(options: argparse.Namespace) -> int:
    """Bind the list if one is given; print its state."""
    with open_store(options) as store:
        if options.list is not None:
            store.use_suppression_list(options.list)
        path = store.suppression.path
        used = store.suppression.opened() if store.suppression.has_key else None
        held = store.suppression.held() if used is not None else None
    said = {"list": path, "entries": None if used is None else len(used), "held": held}
    if path is None:
        text = "this store uses no suppression list: samples that were erased can be added again"
    elif used is None or held is None:
        text = f"{path}: the suppression list of this store; give its key (--suppression-key FILE) to see more"
    else:
        text = f"{path}: the suppression list of this store, {counted(len(used), 'name')}"
        text += "\nnothing is added to this store or erased from it without the key of the list"
        if held:
            first = ", ".join(held[:5])
            text += (
                f"\nattention: {counted(len(held), 'sample')} of this store on the list, to be erased here too: {first}"
            )
    emit(options, said, text)
    return OK
