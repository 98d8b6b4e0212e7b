"""``torchlssvm export``: the head or the samples of a store as a file."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import UsageError, add_command
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.store_folder import check_output, watched_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands
    from torchlssvm.store import SampleStore


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = "Write the head, or the samples, to a file. That file is listed in certificates of later erasures."
    export = add_command(commands, "export", run_export, text, changes="the file was written")
    export.add_argument("out", type=Path, metavar="OUT", help="file to write")
    export.add_argument(
        "--format", choices=("pt", "jsonl"), default="pt", help="the head, or the samples (default: pt)"
    )
    export.add_argument("--force", action="store_true", help="overwrite an existing file")


def run_export(options: argparse.Namespace) -> int:
    """Write a temporary file and rename it, so that the file is there as a whole or not at all."""
    from torchlssvm.cli.exported_head import write_head

    if options.out.suffix == ".jsonl" and options.format == "pt":
        raise UsageError("samples are written with --format jsonl")
    check_output(options.out, options.store, options.force)
    temporary = options.out.with_name(options.out.name + ".tmp")
    with watched_store(options, "writing", readonly=False) as store:
        for path in (temporary, options.out):  # first: a file that holds samples is never unknown
            store.register_checkpoint(path)
        said: dict[str, Any] = {"out": str(options.out), "format": options.format, "position": store.position}
        try:
            said["samples"] = (
                write_head(store, temporary) if options.format == "pt" else write_samples(store, temporary)
            )
            os.replace(temporary, options.out)
            store.forget_checkpoint(temporary)
        finally:
            temporary.unlink(missing_ok=True)
    what = "the head" if options.format == "pt" else "the samples"
    emit(options, said, f"{options.out}: {what} at position {said['position']}, {said['samples']} samples")
    return OK


def write_samples(store: SampleStore, path: Path) -> int:
    """Write one JSON object a line for each sample; return their number."""
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        for rows in store.batches():
            for i in range(len(rows)):
                one = {
                    "id": rows.ids[i],
                    "subject": rows.subjects[i],
                    "label": rows.y[i].tolist(),
                    "x": rows.x[i].tolist(),
                }
                file.write(json.dumps(one) + "\n")
            written += len(rows)
    return written
