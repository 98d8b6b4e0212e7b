"""``torchlssvm remove``, ``relabel``, ``preview`` and ``compact``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.console import (
    BUSY,
    OK,
    Progress,
    UsageError,
    add_whose,
    command,
    emit,
    one_line,
    open_store,
    refuse_inside_store,
    warn,
)

if TYPE_CHECKING:
    from torchlssvm.cli.console import Commands
    from torchlssvm.store import Receipt, SampleStore

EVENT = "name of the event; one that was applied before changes nothing (default: a random one)"


def register(commands: Commands) -> None:
    """Add the commands to the parser."""
    remove = command(
        commands,
        "remove",
        run_remove,
        "Unlearn and erase samples, by subject or by id.",
        changes="the samples were removed",
    )
    add_whose(remove)
    remove.add_argument("--certificate", type=Path, metavar="OUT.json", help="write a certificate of the erasure")
    remove.add_argument("--key", type=Path, metavar="KEY.pem", help="sign the certificate (see keygen)")
    remove.add_argument("--compact", action="store_true", help="also destroy the bytes, see compact")
    remove.add_argument("--event-id", metavar="E", help=EVENT)

    relabel = command(commands, "relabel", run_relabel, "Give samples other labels.", changes="the labels were changed")
    add_whose(relabel, required=False)
    relabel.add_argument(
        "--label", nargs="+", action="extend", metavar="L", help="one label for each id, or one for all"
    )
    relabel.add_argument("--file", type=Path, metavar="CSV", help="a CSV with the columns id and label")
    relabel.add_argument("--event-id", metavar="E", help=EVENT)

    preview = command(commands, "preview", run_preview, "Say what a removal would do, without doing it.")
    add_whose(preview)
    preview.add_argument("--features", type=Path, metavar="FILE", help="data to judge by: .npy, .pt or .csv")
    preview.add_argument("--labels", metavar="FILE|COLUMN", help="its labels, for the accuracy")
    preview.add_argument(
        "--by-position", action="store_true", help="labels without ids: the first is that of the first sample"
    )

    text = "Destroy the bytes of what was erased in all files of the store."
    command(commands, "compact", run_compact, text, changes="the store was compacted")


def run_remove(options: argparse.Namespace) -> int:
    """Remove, then compact, then certify. Whatever can be refused is refused before."""
    from torchlssvm import audit
    from torchlssvm.errors import StoreBusyError
    from torchlssvm.events import Remove

    if options.key is not None and options.certificate is None:
        raise UsageError("--key needs --certificate")
    key = None if options.key is None else audit.private_key(options.key)
    if options.certificate is not None and options.certificate.exists():
        raise ValueError(f"{options.certificate} is there already: a certificate is not written over")
    if options.certificate is not None and not options.certificate.absolute().parent.is_dir():
        raise ValueError(
            f"{options.certificate.absolute().parent} is not a folder: the certificate cannot be written there"
        )
    if options.certificate is not None:
        refuse_inside_store(options.certificate, options.store)
    events = [Remove(**whose, **event_id(options)) for whose in each_subject(options)]
    busy: StoreBusyError | None = None
    with open_store(options) as store:
        receipts = store.apply(events)
        nonces = {name: nonce for receipt in receipts for name, nonce in receipt.nonces.items()}
        said = told(receipts, store) | {"nonces": nonces, "compacted": False, "certificate": None}
        text = [str(receipt) for receipt in receipts]
        if options.compact:
            try:
                text.append(compact(options, store, said))
            except StoreBusyError as error:
                busy = error
        if options.certificate is not None:
            certificate = store.certificate([receipt.event_id for receipt in receipts], key)
            certificate.save(options.certificate)
            said |= {"certificate": str(options.certificate), "signed": bool(certificate.signature)}
            how = "signed" if certificate.signature else "not signed"
            text.append(f"certificate: {options.certificate} ({how}, compacted: {str(certificate.compacted).lower()})")
    if busy is not None:
        warn(f"torchlssvm: error: the samples are removed, but: {one_line(busy)}")
    emit(options, said, "\n".join(text))
    return OK if busy is None else BUSY


def event_id(options: argparse.Namespace) -> dict[str, str]:
    """The event id of the command line, if there is one."""
    if options.event_id is not None and len(options.subject or ()) > 1:
        raise UsageError("--event-id goes with one subject: each subject is an event of its own")
    return {} if options.event_id is None else {"event_id": options.event_id}


def each_subject(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Whose samples the events are about: one event for all ids, or one for each subject."""
    if options.subject is None:
        return [{"ids": options.id}]
    options.subject = list(dict.fromkeys(options.subject))
    return [{"subject": name} for name in options.subject]


def told(receipts: Sequence[Receipt], store: SampleStore) -> dict[str, Any]:
    """Receipts as primitives, without the samples' secrets: the last one's values, all samples, and each event."""
    names = ("event_id", "kind", "position", "applied", "samples")
    events = [{name: getattr(receipt, name) for name in names} for receipt in receipts]
    said = events[-1] | {"applied": any(r.applied for r in receipts), "samples": sum(r.samples for r in receipts)}
    return said | {"digest": receipts[-1].digest, "remaining": len(store), "events": events}


def compact(options: argparse.Namespace, store: SampleStore, said: dict[str, Any]) -> str:
    """Compact, and say so."""
    with Progress(options, "compacting"):
        done = store.compact()
    said |= {"compacted": True, "removed_snapshots": done.removed, "checkpoints": done.checkpoints}
    older = (
        f"; these files are older and may hold what was erased: {', '.join(done.checkpoints)}"
        if done.checkpoints
        else ""
    )
    return f"compacted at position {done.position}{older}"


def run_compact(options: argparse.Namespace) -> int:
    """Compact."""
    with open_store(options) as store:
        said: dict[str, Any] = {"position": store.position}
        text = compact(options, store, said)
    emit(options, said, text)
    return OK


def run_relabel(options: argparse.Namespace) -> int:
    """One event for all samples named."""
    from torchlssvm.cli import settings
    from torchlssvm.cli.files import CSV, pairs
    from torchlssvm.events import Relabel

    ids, labels = options.id, options.label
    if (options.file is None) == (ids is None and options.subject is None) or (options.file is None) == (
        labels is None
    ):
        raise UsageError("give --id and --label, or --subject and --label, or --file")
    if options.file is not None:
        table = CSV(options.file, ("id", "label"))
        if table.header is None or not {"id", "label"} <= set(table.header):
            raise ValueError(f"{options.file} needs a header with the columns id and label")
        found = pairs(table, "label")
        ids, labels = list(found), list(found.values())
    elif len(labels) == 1 and ids is not None:
        labels = labels * len(ids)
    if len(labels) != (1 if ids is None else len(ids)):
        raise UsageError(f"{len(labels)} labels for {'subjects, which take one' if ids is None else f'{len(ids)} ids'}")
    with open_store(options) as store:
        kept, classes = settings.load(store), store.head.num_classes
        y = [kept.label(text, classes) for text in labels]
        whose = each_subject(options) if ids is None else [{"ids": ids}]
        receipts = store.apply([Relabel(y[0] if ids is None else y, **w, **event_id(options)) for w in whose])
        said = told(receipts, store)
    emit(options, said, "\n".join(map(str, receipts)))
    return OK


def run_preview(options: argparse.Namespace) -> int:
    """What a removal would do."""
    import torch

    from torchlssvm.cli import settings
    from torchlssvm.cli.samples import FromFile
    from torchlssvm.events import Remove

    if options.labels is not None and options.features is None:
        raise UsageError("--labels needs --features")
    events = [Remove(**whose) for whose in each_subject(options)]
    with open_store(options) as store:
        x = y = None
        if options.features is not None:
            source = FromFile(
                options.features,
                settings.load(store),
                store.head.num_classes,
                labels=options.labels,
                ids=None,
                subjects=None,
                by_position=options.by_position,
            )
            if source.width != store.head.in_features:
                raise ValueError(f"{options.features} has {source.width} features, the store {store.head.in_features}")
            batches = list(source.batches(8192))
            x = torch.cat([b.x.to(torch.float64) for b in batches])
            y = None if options.labels is None else torch.cat([torch.as_tensor(b.y) for b in batches])
            if y is not None and y.ndim != 1:
                raise ValueError(f"the accuracy needs one label for each sample, got {tuple(y.shape)}")
        with Progress(options, "previewing"):
            found = store.preview(events, x, y)
    lines = [f"{found.samples} samples would go, {found.remaining} would stay"]
    if x is not None:
        lines.append(f"{found.flips} of {len(x)} predictions would change")
    if found.accuracy_before is not None:
        after = "nothing to predict from" if found.accuracy_after is None else f"{found.accuracy_after:.2%}"
        lines.append(f"accuracy: {found.accuracy_before:.2%} now, {after} afterwards")
    emit(options, asdict(found), "\n".join(lines))
    return OK
