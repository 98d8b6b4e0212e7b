"""Commands that erase: ``preview``, ``remove``, ``receipt``."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import (
    BY_POSITION,
    EVENT,
    ID,
    REQUEST,
    SUBJECT,
    SUPPRESSION_KEY,
    UsageError,
    command,
    one_of,
    option,
)
from torchlssvm.cli.console import BUSY, OK, emit, one_line, progress, warn
from torchlssvm.cli.keys import SIGNING_KEY, signing_key
from torchlssvm.cli.samples import check_single_event, read_file, results_to_json
from torchlssvm.cli.store import compaction_text, compaction_to_json
from torchlssvm.cli.store_access import check_output, open_store
from torchlssvm.wording import counted, listed

if TYPE_CHECKING:
    from torchlssvm.store import SampleStore
    from torchlssvm.store.erasure.erasure import Erasure

RECEIPT_SUFFIX = ".receipt.json"
OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
"""Characters that are not used in file names. Each run of them becomes a dash."""


def samples_to_erase(options: argparse.Namespace, store: SampleStore) -> tuple[list[str], list[str]]:
    """Return the subjects and ids on the command line, or those of a request that the store still has."""
    from torchlssvm.store.erasure.erasure import held_of_request

    if options.subject is not None or options.id is not None:
        return list(dict.fromkeys(options.subject or ())), list(dict.fromkeys(options.id or ()))
    if options.request is None:
        raise UsageError("give --subject, --id or --request")
    return held_of_request(store, options.request)


# -- preview -----------------------------------------------------------------------------------------------------------


@command(
    "preview",
    "Show what a removal would change, without removing anything.",
    one_of(SUBJECT, ID),
    REQUEST,
    option("--features", type=Path, metavar="FILE", help="test data: a .npy, .pt, .csv or .parquet file"),
    option("--labels", metavar="FILE|COLUMN", help="labels of the test data, for the accuracy"),
    BY_POSITION,
)
def preview(options: argparse.Namespace) -> int:
    """Print how many samples and predictions a removal would change, and the accuracy before and after."""
    import torch

    from torchlssvm.events import Remove
    from torchlssvm.linear.linear_head import targets_of

    if options.labels is not None and options.features is None:
        raise UsageError("--labels needs --features")
    with open_store(options) as store:
        subjects, ids = samples_to_erase(options, store)
        events = [Remove(subject=s) for s in subjects] + ([Remove(ids=ids)] if ids else [])
        x = y = None
        if options.features is not None:
            samples = read_file(options, store, options.features)
            x = torch.cat([x.to(torch.float64) for x, *_ in samples.batches(8192)])
            y = None if samples.y is None else torch.as_tensor(samples.y)
        with progress(options, "previewing"):
            found = store.preview(events, x, y)
        each = store.head.num_classes if targets_of(store.head) == "multilabel" else 1
        if options.request is not None:
            store.requests.take_step(options.request, "previewed")
    lines = [f"{counted(found.samples, 'sample')} would be removed, {found.remaining:,} would remain"]
    if x is not None:
        lines.append(f"{found.flips} of {len(x) * each} predictions would change")
    if found.accuracy_before is not None:
        after = "no samples left to predict from" if found.accuracy_after is None else f"{found.accuracy_after:.2%}"
        lines.append(f"accuracy: {found.accuracy_before:.2%} before, {after} after")
    if options.request is not None:
        said = shlex.join(["torchlssvm", "remove", str(options.store), "--request", options.request])
        lines.append(f"nothing has been erased; next: {said}")
    return emit(options, asdict(found), lines)


# -- remove ------------------------------------------------------------------------------------------------------------


@command(
    "remove",
    "Unlearn and erase samples, by subject or by id.",
    one_of(SUBJECT, ID),
    EVENT,
    REQUEST,
    option("--certificate", type=Path, metavar="OUT.json", help="write a certificate of the erasure"),
    SIGNING_KEY,
    option("--compact", action="store_true", help="also destroy the bytes (see compact)"),
    option(
        "--receipt",
        type=Path,
        metavar="FILE",
        help="receipt to write (default: next to the certificate, or in the folder STORE.receipts)",
    ),
    SUPPRESSION_KEY,
    changes="the samples were removed",
)
def remove(options: argparse.Namespace) -> int:
    """Remove samples, write the receipt, compact and certify. After a crash, the same command completes the missing steps."""
    from torchlssvm.events import new_event_id

    if options.key is not None and options.certificate is None:
        raise UsageError("--key needs --certificate")
    key = signing_key(options)
    with open_store(options) as store:
        subjects, ids = samples_to_erase(options, store)
        targets = [*subjects, *(["by id"] if ids else [])]
        check_single_event(options, targets)
        event = options.event or (new_event_id() if len(targets) == 1 else None)
        out = receipt_path(options, options.request or event or new_event_id())
        named = (
            {}
            if options.request is not None and not (options.subject or options.id)
            else {"subjects": subjects, "ids": ids}
        )
        with progress(options, "erasing"):
            done = store.erase(
                **named, request=options.request, event_id=event if targets else None, receipt=out,
                compact=options.compact, certificate=options.certificate, key=key,
            )  # fmt: skip
        said = erasure_to_json(done, store)
        text = []
        for name, result in zip(targets, done.results, strict=True):
            effect = "erased" if result.applied else "erased earlier, nothing changed"
            text.append(f"{name}: {counted(result.samples, 'sample')} {effect} (event {result.event_id})")
        if not done.results:
            text.append(f"the samples of request {options.request} were erased earlier; the missing steps are done now")
        if done.samples:
            text.append(protection_text(store, options.request, done.samples, len(subjects)))
        if done.still_held:
            text.append(f"request {options.request} is not finished: the store still has {listed(done.still_held)}")
        text.append(receipt_text(done.receipt) if done.receipt else "no receipt written: it was written earlier")
        if done.compaction is not None:
            text.append(compaction_text(done.compaction))
        if done.certificate is not None:
            how = "signed" if done.certificate.signatures else "not signed"
            gone = "bytes destroyed" if done.certificate.compacted else "bytes not yet destroyed"
            text.append(f"certificate: {options.certificate} ({how}, {gone})")
            said |= {"certificate": str(options.certificate), "signed": bool(done.certificate.signatures)}
        if not said["compacted"]:
            text.append(
                f"the store's files may still contain the bytes: destroy them with torchlssvm compact {options.store}"
            )
    if done.unfinished is not None:
        warn(f"torchlssvm: error: the samples were removed, but not everything is done: {one_line(done.unfinished)}")
    emit(options, said, text)
    return OK if done.unfinished is None else BUSY


def erasure_to_json(done: Erasure, store: SampleStore) -> dict[str, Any]:
    """Convert the result of an erasure to primitives."""
    last = max(entry.position for entry in store.history() if entry.event_id in done.event_ids)
    said: dict[str, Any] = {"events": done.event_ids, "samples": 0, "applied": False, "remaining": len(store)}
    if done.results:
        said = results_to_json(done.results, store)
    said["nonces"] = {name: nonce for result in done.results for name, nonce in result.nonces.items()}
    said |= {"compacted": store.compacted >= last, "certificate": None, "still_held": done.still_held}
    if done.compaction is not None:
        said |= compaction_to_json(done.compaction)
    return said | {"receipt": None if done.receipt is None else str(done.receipt)}


def protection_text(store: SampleStore, request: str | None, samples: int, subjects: int) -> str:
    """Say whether the erased samples can be added again."""
    if store.suppression.path is None:
        return (
            "the same samples could be added again: to prevent that, use a suppression list "
            f"(torchlssvm suppression use {store.path} --list FILE)"
        )
    if request is None:
        return "the same samples could be added again: only erasures for a --request enter the suppression list"
    whose = f" and {counted(subjects, 'subject')}" if subjects else ""
    return f"{counted(samples, 'sample')}{whose} entered in the suppression list and cannot be added again"


# -- receipts ----------------------------------------------------------------------------------------------------------


@command(
    "receipt",
    "Write the receipt of erasures that have none, for example after a crash. Until the store is compacted, a receipt can be "
    "written again with --request or --event.",
    option("--out", type=Path, required=True, metavar="FILE", help="receipt to write, outside the store"),
    one_of(
        option("--request", metavar="R", help="all erasures of this request"),
        option("--event", nargs="+", action="extend", metavar="E", help="event ids of the erasures (see history)"),
    ),
    changes="the receipt was written",
)
def receipt(options: argparse.Namespace) -> int:
    """Write one receipt."""
    check_output(options.out)
    with open_store(options) as store:
        if options.request is not None:
            events = store.requests.get(options.request).events
        else:
            events = options.event or store.receipts.unwritten()
        if not events:
            raise ValueError("every erasure has its receipt")
        said = {"receipt": str(options.out), "events": list(events), "samples": store.receipt(events).samples}
        store.write_receipt(events, options.out)
        text = receipt_text(options.out)
    return emit(options, said, text)


def receipt_path(options: argparse.Namespace, name: str) -> Path:
    """Return the path of the receipt: as given, next to the certificate, or in the folder STORE.receipts."""
    if options.receipt is not None:
        return Path(options.receipt)
    if options.certificate is not None:
        return Path(options.certificate).with_name(options.certificate.name.removesuffix(".json") + RECEIPT_SUFFIX)
    store = options.store.resolve()
    folder = Path(store.with_name(store.name + ".receipts"))
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / (OTHER_CHARACTERS.sub("-", name)[:80] + RECEIPT_SUFFIX)


def receipt_text(path: Path) -> str:
    """Describe where the receipt is and what to do with it."""
    return (
        f"receipt: {path} (it names the erased: keep it away from the store, and destroy it when nobody can question the "
        "answer)"
    )
