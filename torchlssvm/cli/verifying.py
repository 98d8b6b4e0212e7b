"""``torchlssvm verify`` and ``export``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.console import OK, Progress, UsageError, command, emit, open_store, refuse_inside_store, seconds

if TYPE_CHECKING:
    from torchlssvm import LSSVMHead
    from torchlssvm.audit.verification import Report
    from torchlssvm.cli.console import Commands
    from torchlssvm.store import SampleStore

FORMAT = "torchlssvm-export-1"


def register(commands: Commands) -> None:
    """Add the commands to the parser."""
    text = "Check a certificate of erasure. Exit code 3 when it does not hold."
    verify = command(commands, "verify", run_verify, text, store=False)
    verify.add_argument("certificate", type=Path, metavar="CERT", help="the certificate")
    verify.add_argument("--store", type=Path, metavar="STORE", help="follow its journal and sum its rows anew")
    verify.add_argument("--head", type=Path, metavar="FILE", help="check a head that export wrote")
    verify.add_argument("--public-key", type=Path, metavar="PUB", help="the issuer's key, from the issuer")
    verify.add_argument("--allow-unsigned", action="store_true", help="do without a signature or a key")
    verify.add_argument("--timeout", type=seconds, default=30.0, metavar="S", help="wait so long for a writer")

    text = "Write the head, or the samples, to a file. That file is listed in certificates of later erasures."
    export = command(commands, "export", run_export, text, changes="the file was written")
    export.add_argument("out", type=Path, metavar="OUT", help="the file")
    export.add_argument(
        "--format", choices=("pt", "jsonl"), default="pt", help="the head, or the samples (default: pt)"
    )
    export.add_argument("--force", action="store_true", help="write over a file that is there")


def run_verify(options: argparse.Namespace) -> int:
    """VerificationError with the reason when the certificate does not hold."""
    from torchlssvm import audit
    from torchlssvm.audit.certificate import Certificate

    certificate = Certificate.load(options.certificate)
    key = None if options.public_key is None else audit.public_key(options.public_key)
    head = None if options.head is None else load_head(options.head)
    judge = partial(audit.verify, certificate, public_key=key, allow_unsigned=options.allow_unsigned)
    with Progress(options, "verifying") as bar:
        checks = judge(head).checks if options.store is None else judge_with_store(options, judge, head, bar)
    said = {"verified": True, "erased": certificate.erased, "compacted": certificate.compacted, "checks": checks}
    text = (
        f"the certificate holds: {certificate.erased} samples erased, compacted: {str(certificate.compacted).lower()}"
    )
    emit(options, said, "\n".join([text, *(f"  {name}: {result}" for name, result in checks.items())]))
    return OK


def judge_with_store(
    options: argparse.Namespace, judge: Callable[..., Report], head: Any, bar: Progress
) -> dict[str, str]:
    """Check the store and its head, and another head if there is one. A store that cannot be read fails the verification."""
    from torchlssvm.errors import StoreBusyError, StoreError, VerificationError
    from torchlssvm.store.database import FILE

    try:
        with open_store(options, readonly=True) as store:
            store.watch(bar.advance)
            store.check_structure()  # first: pages that lead back to themselves hold more rows than anybody can read
            checks = judge(store.head, store).checks
            return checks if head is None else checks | {"exported head": judge(head, store).checks["head"]}
    except StoreBusyError:
        raise
    except (StoreError, UnicodeDecodeError) as error:  # SQLite's messages quote damaged text
        if not os.path.lexists(options.store / FILE):  # a mistake of whoever calls, not of the store
            raise
        raise VerificationError(f"the store does not hold up: {error}") from error


def load_head(path: Path) -> LSSVMHead:
    """A head that ``export`` wrote; w, b, C and P in the file must be those it computes with, which ``verify`` checks."""
    from torchlssvm import StoreError, VerificationError
    from torchlssvm.audit.verification import WEIGHT_TOLERANCE
    from torchlssvm.backbones import load_pt
    from torchlssvm.store.head_adapter import head_from
    from torchlssvm.untrusted import check_regular

    try:
        check_regular(path)
        found = load_pt(path)
    except ValueError as error:
        raise VerificationError(str(error)) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise VerificationError(f"{path} was not written by torchlssvm export")
    try:
        head = head_from(found["config"], None)
        head.load_state_dict(found["state_dict"])
        for name, value in head.state_dict().items():
            given = found["state_dict"][name]
            if name in ("w", "b", "C", "P") and not value.allclose(
                given, WEIGHT_TOLERANCE, WEIGHT_TOLERANCE * float(value.abs().max())
            ):
                raise VerificationError(f"{name} in {path} is not what the head there computes with")
    except (AttributeError, KeyError, RecursionError, RuntimeError, StoreError, TypeError, ValueError) as error:
        raise VerificationError(f"{path} does not hold a head that can be loaded: {str(error)[:500]}") from error
    return head


def run_export(options: argparse.Namespace) -> int:
    """Write beside the file first: whoever looks sees all of it, or nothing."""
    if options.out.suffix == ".jsonl" and options.format == "pt":
        raise UsageError("samples are written with --format jsonl")
    if options.out.is_dir():
        raise ValueError(f"{options.out} is a folder: name a file in it")
    if options.out.exists() and not options.force:
        raise ValueError(f"{options.out} is there already: choose another name, or --force")
    temporary = options.out.with_name(options.out.name + ".tmp")
    refuse_inside_store(options.out, options.store)
    with open_store(options) as store, Progress(options, "writing") as bar:
        store.watch(bar.advance)
        for path in (temporary, options.out):  # first: a file that holds samples is never unknown
            store.register_checkpoint(path)
        said: dict[str, Any] = {"out": str(options.out), "format": options.format, "position": store.position}
        try:
            said["samples"] = (
                write_head(store, temporary) if options.format == "pt" else write_samples(store, temporary)
            )
            os.replace(temporary, options.out)
        finally:
            temporary.unlink(missing_ok=True)
    what = "the head" if options.format == "pt" else "the samples"
    emit(options, said, f"{options.out}: {what} at position {said['position']}, {said['samples']} samples")
    return OK


def write_head(store: SampleStore, path: Path) -> int:
    """Options and state_dict as plain data, for ``torch.load(path, weights_only=True)``; returns the number of samples."""
    import torch

    from torchlssvm.cli import settings

    head = store.head
    out = {"format": FORMAT, "config": head.config(), "state_dict": dict(head.state_dict())}
    out |= {"classes": settings.load(store).classes, "fingerprint": store.fingerprint, "position": store.position}
    try:
        torch.save(out, path)
    except RuntimeError as error:  # torch's writer: no such folder, no room
        raise OSError(f"{path} cannot be written: {error}") from error
    return len(store)


def write_samples(store: SampleStore, path: Path) -> int:
    """One JSON object in a line for each sample; returns their number."""
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
