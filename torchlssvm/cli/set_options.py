"""``torchlssvm set``: change options of the head that may change."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import UsageError, add_command, regularization
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.progress_bar import ProgressBar
from torchlssvm.cli.store_folder import open_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands

HELD_OUT = ("kfold", "loo")
"""Ways to choose rho by samples that a head has not seen."""


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = add_command(commands, "set", run_set, "Change the regularization of the head.", changes="rho was set")
    parser.add_argument(
        "--rho", type=rho_or_method, required=True, metavar="R|gcv|kfold|loo",
        help="a number > 0. Chosen from the samples: gcv, for a least-squares head, and again after each command that changes "
        "them; kfold or loo (leave-one-out), for a margin head, and once",
    )  # fmt: skip


def rho_or_method(text: str) -> float | str:
    """A number, or the name of a way to choose."""
    return text if text in HELD_OUT else regularization(text)


def run_set(options: argparse.Namespace) -> int:
    """Set rho and print the value in use."""
    from torchlssvm.linear import MarginHead

    with open_store(options) as store, ProgressBar(options, "choosing rho"):
        head = store.head
        margin = isinstance(head, MarginHead)
        if margin and options.rho == "gcv":
            raise UsageError("--rho gcv is for a least-squares head; a margin head takes --rho kfold, loo or a number")
        if options.rho in HELD_OUT:
            if not margin:
                raise UsageError(
                    f"--rho {options.rho} is for a margin head; a least-squares head takes --rho gcv or a number"
                )
            rho = head.select_rho(method=options.rho).rho  # written when the store closes
        else:
            rho = store.set_rho(options.rho)
        choice = str(head.choices.get("rho", f"{rho!r}, as given"))
    if options.rho in HELD_OUT:
        check_kept(options, rho, choice)
    emit(options, {"rho": rho, "choice": choice}, f"rho is {choice}")
    return OK


def check_kept(options: argparse.Namespace, rho: float, choice: str) -> None:
    """StoreBusyError if another process has changed the store meanwhile, so that the choice was not written."""
    from torchlssvm.errors import StoreBusyError

    with open_store(options, readonly=True) as store:
        if (store.head.rho, str(store.head.choices.get("rho"))) != (rho, choice):
            raise StoreBusyError(f"{options.store} was changed by another process while rho was chosen: try again")
