"""Commands that erase: ``preview``, ``remove``, ``receipt``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
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
from torchlssvm.cli.samples import check_width, read_file, receipts_to_json, selected, with_event
from torchlssvm.cli.store import compact_store
from torchlssvm.cli.store_access import check_output, open_store
from torchlssvm.wording import counted, listed

if TYPE_CHECKING:
    from torchlssvm.store import EventResult, SampleStore

RECEIPT_SUFFIX = ".receipt.json"
OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
"""Characters that a file is not named with; each run of them becomes a dash."""


def samples_to_erase(options: argparse.Namespace, store: SampleStore) -> list[dict[str, Any]]:
    """Return the keyword arguments that select each event's samples: those named, or all of a request."""
    from torchlssvm.errors import RemovalError

    if options.subject is not None or options.id is not None:
        return selected(options)
    if options.request is None:
        raise UsageError("one of the arguments --subject --id --request is required")
    request = store.requests.get(options.request)
    if request.forgotten:
        raise ValueError(f"the request {request.id!r} is {request.state}, and its names are no longer kept")
    targets: list[dict[str, Any]] = [{"subject": s} for s in request.named("subject") if store.find(subject=s)]
    held = [i for i in request.named("id") if i in store]
    subjects = {t["subject"] for t in targets}
    ids = [i for i, s in zip(held, store.get(held).subjects if held else [], strict=True) if s not in subjects]
    targets += [{"ids": ids}] if ids else []
    if not targets:
        raise RemovalError(
            f"nothing is held of those whom the request {request.id!r} names: answer it with torchlssvm request close "
            f"{options.store} {request.id} --answer TEXT"
        )
    return targets


# -- preview -----------------------------------------------------------------------------------------------------------


@command(
    "preview",
    "Show the effect of a removal without removing anything.",
    one_of(SUBJECT, ID),
    REQUEST,
    option("--features", type=Path, metavar="FILE", help="data to judge by: .npy, .pt or .csv"),
    option("--labels", metavar="FILE|COLUMN", help="labels of that data, for the accuracy"),
    BY_POSITION,
)
def preview(options: argparse.Namespace) -> int:
    """Print the number of samples, predictions and the accuracy that a removal would change."""
    import torch

    from torchlssvm.events import Remove

    if options.labels is not None and options.features is None:
        raise UsageError("--labels needs --features")
    with open_store(options) as store:
        events = [Remove(**whose) for whose in samples_to_erase(options, store)]
        x = y = None
        if options.features is not None:
            samples = read_file(options, store)
            check_width(samples, store)
            x = torch.cat([x.to(torch.float64) for _, _, x, _, _ in samples.batches(8192)])
            y = None if samples.y is None else torch.as_tensor(samples.y)
            if y is not None and y.ndim != 1:
                raise ValueError(f"the accuracy needs one label for each sample, got {tuple(y.shape)}")
        with progress(options, "previewing"):
            found = store.preview(events, x, y)
        if options.request is not None:
            store.requests.take_step(options.request, "previewed")
    lines = [f"{found.samples} samples would go, {found.remaining} would stay"]
    if x is not None:
        lines.append(f"{found.flips} of {len(x)} predictions would change")
    if found.accuracy_before is not None:
        after = "nothing to predict from" if found.accuracy_after is None else f"{found.accuracy_after:.2%}"
        lines.append(f"accuracy: {found.accuracy_before:.2%} now, {after} afterwards")
    if options.request is not None:
        lines.append(f"nothing is erased yet; next: torchlssvm remove {options.store} --request {options.request}")
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
    option("--compact", action="store_true", help="also destroy the bytes, see compact"),
    option(
        "--receipt",
        type=Path,
        metavar="FILE",
        help="file of the receipt (default: beside the certificate, or in the folder STORE.receipts)",
    ),
    SUPPRESSION_KEY,
    changes="the samples were removed",
)
def remove(options: argparse.Namespace) -> int:
    """Remove, write the receipt, compact, certify. All that can be refused is refused before."""
    from torchlssvm.errors import StoreBusyError
    from torchlssvm.events import Remove

    if options.key is not None and options.certificate is None:
        raise UsageError("--key needs --certificate")
    key = signing_key(options)
    if options.certificate is not None:
        check_output(options.certificate, options.store)
    busy: StoreBusyError | None = None
    with open_store(options) as store:
        targets = with_event(options, samples_to_erase(options, store))
        events = [Remove(**whose) for whose in targets]
        out = receipt_path(options, options.request or events[0].event_id)
        receipts = store.apply(events, request=options.request, keep_receipt=True)
        store.refresh()
        done = [receipt.event_id for receipt in receipts]
        nonces = {name: nonce for receipt in receipts for name, nonce in receipt.nonces.items()}
        said = receipts_to_json(receipts, store) | {"nonces": nonces, "compacted": False, "certificate": None}
        text = [erased_text(whose, receipt) for whose, receipt in zip(targets, receipts, strict=True)]
        if any(receipt.applied for receipt in receipts):
            subjects = sum("subject" in whose for whose in targets)
            text.append(protection_text(store, options.request, said["samples"], subjects))
        if options.request is not None:
            left = store.requests.still_held(store.requests.get(options.request))
            said["still_held"] = [n.name for n in left]
            if left:
                text.append(f"request {options.request} is not done: samples are held of {listed(said['still_held'])}")
        waiting = [e for e in store.receipts.unwritten() if e in done]
        said["receipt"] = str(out) if waiting else None
        text.append(write_receipt(store, waiting, out) if waiting else "no receipt is written: there was one before")
        if options.compact:
            try:
                text.append(compact_store(options, store, said))
            except StoreBusyError as error:
                busy = error
        if options.certificate is not None:
            certificate = store.certificate([*([options.request] if options.request else []), *done], key)
            certificate.save(options.certificate)
            if options.request is not None:
                store.requests.certified(done)
            said |= {"certificate": str(options.certificate), "signed": bool(certificate.signatures)}
            how = "signed" if certificate.signatures else "not signed"
            text.append(f"certificate: {options.certificate} ({how}, compacted: {str(certificate.compacted).lower()})")
        if not said["compacted"]:
            text.append(
                f"the bytes may still be in the files of the store: torchlssvm compact {options.store} destroys them"
            )
    if busy is not None:
        warn(f"torchlssvm: error: the samples are removed, but: {one_line(busy)}")
    emit(options, said, text)
    return OK if busy is None else BUSY


def erased_text(whose: dict[str, Any], receipt: EventResult) -> str:
    """Say what a removal did."""
    name = whose.get("subject", "by id")
    done = "erased" if receipt.applied else "were erased before, nothing was changed"
    return f"{name}: {counted(receipt.samples, 'sample')} {done} (event {receipt.event_id})"


def protection_text(store: SampleStore, request: str | None, samples: int, subjects: int) -> str:
    """Say if erased samples can be added again."""
    if store.suppression.path is None:
        return (
            "no suppression list is in use: the same samples could be added again "
            f"(torchlssvm suppression {store.path} --list FILE)"
        )
    if request is None:
        return "not entered in the suppression list, since this belongs to no request: the same samples could be added again"
    whose = f" and {counted(subjects, 'subject')}" if subjects else ""
    return f"{counted(samples, 'sample')}{whose} entered in the suppression list: they cannot be added again"


# -- receipts ----------------------------------------------------------------------------------------------------------


@command(
    "receipt",
    "Write the receipt of erasures that have none. They may lack one after a crash; until a store is compacted a receipt can "
    "be written again with --request or --event.",
    option("--out", type=Path, required=True, metavar="FILE", help="file of the receipt, outside the store"),
    one_of(
        option("--request", metavar="R", help="all erasures of this request"),
        option("--event", nargs="+", action="extend", metavar="E", help="erasures by their event ids, see history"),
    ),
    changes="the receipt was written",
)
def receipt(options: argparse.Namespace) -> int:
    """Write one receipt."""
    check_output(options.out, options.store)
    with open_store(options) as store:
        if options.request is not None:
            events = store.requests.get(options.request).events
        else:
            events = options.event or store.receipts.unwritten()
        if not events:
            raise ValueError("no receipt is waiting to be written")
        said = {"receipt": str(options.out), "events": list(events), "samples": store.receipt(events).samples}
        text = write_receipt(store, events, options.out)
    return emit(options, said, text)


def receipt_path(options: argparse.Namespace, name: str) -> Path:
    """Path of a receipt: as asked for, beside the certificate, or in the folder STORE.receipts, which is made."""
    out: Path
    if options.receipt is not None:
        out = options.receipt
    elif options.certificate is not None:
        out = options.certificate.with_name(options.certificate.name.removesuffix(".json") + RECEIPT_SUFFIX)
    else:
        store = options.store.resolve()
        folder = store.with_name(store.name + ".receipts")
        folder.mkdir(mode=0o700, exist_ok=True)
        out = folder / (OTHER_CHARACTERS.sub("-", name)[:80] + RECEIPT_SUFFIX)
    check_output(out, options.store)
    return out


def write_receipt(store: SampleStore, event_ids: Sequence[str], path: Path) -> str:
    """Write the receipt of erasures that are done, and say so. An OSError says that they are done."""
    try:
        store.write_receipt(event_ids, path)
    except OSError as error:
        raise OSError(
            f"the samples are erased, but their receipt is not written ({error}): nothing is lost until the store is "
            f"compacted. torchlssvm receipt {store.path} --out FILE writes it"
        ) from error
    return (
        f"receipt: {path} (it tells whom the erasure was about: keep it apart from the store, and destroy it when the answer "
        "can no longer be questioned)"
    )
