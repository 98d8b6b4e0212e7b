"""``torchlssvm set``: change options of the head that may change."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import add_command, regularization
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.progress_bar import ProgressBar
from torchlssvm.cli.store_folder import open_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = add_command(commands, "set", run_set, "Change the regularization of the head.", changes="rho was set")
    parser.add_argument(
        "--rho", type=regularization, required=True, metavar="gcv|R",
        help="a number > 0, or gcv: chosen from the samples, again after each command that changes them",
    )  # fmt: skip


def run_set(options: argparse.Namespace) -> int:
    """Set rho and print the value in use."""
    with open_store(options) as store, ProgressBar(options, "choosing rho"):
        rho = store.set_rho(options.rho)
        choice = store.head.choices.get("rho", f"{rho!r}, as given")
    emit(options, {"rho": rho, "choice": choice}, f"rho is {choice}")
    return OK
