"""``export``: write the head or the samples of a store to a file; load an exported head for ``verify --exported-head``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import FORCE, UsageError, command, option
from torchlssvm.cli.console import emit
from torchlssvm.cli.store_access import Settings, check_output, watched_store
from torchlssvm.files import replacement
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.linear import LinearHead
    from torchlssvm.store import SampleStore

EXPORT_FORMAT = "torchlssvm-export-1"


@command(
    "export",
    "Write the head or the samples to a file. Only you can read the file; certificates of later erasures list it.",
    option("out", type=Path, metavar="OUT", help="file to write"),
    option("--format", choices=("pt", "jsonl"), default="pt", help="pt: the head (default); jsonl: the samples"),
    FORCE,
    changes="the file was written",
)
def export(options: argparse.Namespace) -> int:
    """Write a temporary file and rename it, so that the file is either complete or does not exist."""
    if options.out.suffix == ".jsonl" and options.format == "pt":
        raise UsageError("give --format jsonl to export samples")
    check_output(options.out, options.force)
    write = write_head if options.format == "pt" else write_samples
    with watched_store(options, "writing", readonly=False) as store:
        with replacement(options.out, private=True) as new:
            for path in (new, options.out):  # first, so that no file with samples is ever unknown
                store.register_checkpoint(path)
            said: dict[str, Any] = {"out": str(options.out), "format": options.format, "position": store.position}
            said["samples"] = write(store, new)
        store.certificates.forget(new)
    what = "the head" if options.format == "pt" else "the samples"
    return emit(
        options, said, f"{options.out}: {what} at event {said['position']}, {counted(said['samples'], 'sample')}"
    )


def write_samples(store: SampleStore, path: Path) -> int:
    """Write one line of JSON per sample; return the number of samples."""
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


def write_head(store: SampleStore, path: Path) -> int:
    """Write options and state_dict for ``torch.load(path, weights_only=True)``, and return the number of samples."""
    import torch

    head = store.head
    out = {"format": EXPORT_FORMAT, "config": head.config(), "state_dict": dict(head.state_dict())}
    out |= {"classes": Settings.load(store).classes, "fingerprint": store.fingerprint, "position": store.position}
    out["head"] = type(head).__name__
    try:
        with path.open("wb") as file:
            torch.save(out, file)
    except RuntimeError as error:  # torch raises it for a missing folder or a full disk
        raise OSError(f"{path} cannot be written: {error}") from error
    return len(store)


def load_head(path: Path) -> LinearHead:
    """Load a head that ``export`` wrote. The w, b, C and P in the file must equal those that the loaded head uses."""
    from torchlssvm import VerificationError
    from torchlssvm.audit.verification import WEIGHT_TOLERANCE
    from torchlssvm.backbones import load_pt
    from torchlssvm.errors import StoreError
    from torchlssvm.store.head_adapter import head_from
    from torchlssvm.untrusted import check_regular

    try:
        check_regular(path)
        found = load_pt(path)
    except ValueError as error:
        raise VerificationError(str(error)) from error
    if not isinstance(found, dict) or found.get("format") != EXPORT_FORMAT:
        raise VerificationError(f"{path} was not written by torchlssvm export")
    try:
        head = head_from({"type": found["head"]} | found["config"], None)
        head.load_state_dict(found["state_dict"])
        for name, value in head.state_dict().items():
            given = found["state_dict"][name]
            if name in ("w", "b", "C", "P") and not value.allclose(
                given, WEIGHT_TOLERANCE, WEIGHT_TOLERANCE * float(value.abs().max())
            ):
                raise VerificationError(f"{name} in {path} differs from the value that the head computes with")
    except (AttributeError, KeyError, RecursionError, RuntimeError, StoreError, TypeError, ValueError) as error:
        raise VerificationError(f"{path} does not contain a valid head: {str(error)[:500]}") from error
    return head
