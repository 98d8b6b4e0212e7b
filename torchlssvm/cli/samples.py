"""Commands on samples: ``add``, ``relabel``, ``subjects``, ``show``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import (
    BY_POSITION,
    EVENT,
    ID,
    SUBJECT,
    SUPPRESSION_KEY,
    UsageError,
    command,
    count,
    one_of,
    option,
)
from torchlssvm.cli.console import emit, progress, table
from torchlssvm.cli.store_access import Settings, learn_names, open_store
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.cli.images import ImageFolder
    from torchlssvm.cli.sample_files import SampleFile
    from torchlssvm.store import AccessReport, EventResult, SampleStore

# -- add ---------------------------------------------------------------------------------------------------------------


@command(
    "add",
    "Learn samples. After a crash run it again: samples that are there already are compared and skipped.",
    one_of(
        option("--features", type=Path, metavar="FILE", help="file of features: .npy or .pt (n, J), or .csv"),
        option("--images", type=Path, metavar="FOLDER", help="folder of images; the class is the sub-folder"),
        required=True,
    ),
    option("--labels", metavar="FILE|COLUMN", help="labels of the samples: .npy, .pt, text, or a column of the CSV"),
    option("--ids", metavar="FILE|COLUMN", help="ids of the samples (default: file name and row)"),
    one_of(
        option("--subject", metavar="NAME", help="the subject of all samples, e.g. a user"),
        option("--subjects", metavar="FILE|COLUMN", help="subject of each sample: a CSV with the header id,subject"),
    ),
    BY_POSITION,
    option("--fingerprint", metavar="F", help="the network the features of a file come from"),
    option("--weights", metavar="FILE", help="weights of the backbone, if the file has moved since init"),
    option("--batch-size", type=count, metavar="B", help="samples in one event (default: 1024, images: 64)"),
    option(
        "--erased",
        choices=("refuse", "skip"),
        default="refuse",
        help="samples that were erased on request: stop with an error, or leave them out (default: refuse)",
    ),
    SUPPRESSION_KEY,
    changes="the samples were added",
)
def add(options: argparse.Namespace) -> int:
    """Add the samples batch by batch, each of them durable when the next begins.

    Samples that the store has under the same id are compared with those to be added and skipped; if features, label or
    subject differ it is an error. (An event id made from the content would do as well, but it stays in the journal and would
    confirm a guess about an erased sample. Event ids are random.)
    """
    if options.images is None and options.labels is None:
        raise UsageError("--features needs --labels")
    for name in ("labels", "ids", "fingerprint") if options.images else ("weights",):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} does not go with --{'images' if options.images else 'features'}")
    size = options.batch_size or (64 if options.images else 1024)
    counts = {"added": 0, "skipped": 0, "left_out": 0, "events": 0}
    seen: set[str] = set()
    with open_store(options) as store:
        samples, source = open_images(options, store) if options.images else open_file(options, store)
        check_width(samples, store)
        with progress(options, "adding", len(samples)) as advance:
            for where, ids, x, y, subjects in samples.batches(size):
                try:
                    refuse_repeated(ids, seen)
                    whose = [options.subject] * len(ids) if subjects is None else subjects
                    add_batch(store, (ids, x, y, whose, source), counts)
                except ValueError as error:
                    raise ValueError(f"{where}: {error} ({counts['added']} samples before were added)") from error
                advance(len(ids))
        with progress(options, "choosing rho"):
            store.refresh()
        state = store.stats()
    text = (
        f"{counts['added']} samples added, {counts['skipped']} were there already; the store holds {state['samples']}"
    )
    if counts["left_out"]:
        text += f"\n{counts['left_out']} were left out: they were erased on request and stay erased"
    return emit(options, {**counts, "samples": state["samples"], "digest": state["digest"]}, text)


def open_file(options: argparse.Namespace, store: SampleStore) -> tuple[SampleFile, str | None]:
    """Read the samples of a file; also return the network they are said to come from."""
    backbone = Settings.load(store).backbone
    if backbone and options.fingerprint is None:
        raise ValueError(
            f"this store takes what {backbone} sees: add --images. Features that it made elsewhere need its fingerprint: "
            f"--fingerprint {store.fingerprint}"
        )
    with progress(options, f"reading {options.features}"):
        samples = read_file(options, store, ids=options.ids, subjects=options.subjects)
    return samples, options.fingerprint or store.fingerprint


def read_file(options: argparse.Namespace, store: SampleStore, **columns: str | None) -> SampleFile:
    """Read ``--features`` with ``--labels`` and other columns."""
    from torchlssvm.cli.sample_files import read_samples

    settings, classes = Settings.load(store), store.head.num_classes
    columns["labels"] = options.labels
    return read_samples(
        options.features, lambda text: settings.label(text, classes), by_position=options.by_position, **columns
    )


def open_images(options: argparse.Namespace, store: SampleStore) -> tuple[ImageFolder, str | None]:
    """Open the samples of a folder of images; also return the fingerprint of the network that computes their features."""
    from torchlssvm.cli.images import DEFAULT_WEIGHTS, Backbone, ImageFolder

    kept, classes = Settings.load(store), store.head.num_classes
    if kept.backbone is None:
        raise ValueError("this store has no backbone: it was made without init --backbone NAME")
    folder = ImageFolder(options.images, options.subjects, options.by_position)
    with progress(options, f"loading {kept.backbone}"):
        weights = options.weights or kept.weights or DEFAULT_WEIGHTS
        backbone = Backbone(kept.backbone, weights, classes, store.head, **kept.network)
    if backbone.fingerprint != store.fingerprint:
        raise ValueError(
            f"the weights or the preprocessing of {kept.backbone} are not those the store was made for: its fingerprint is "
            f"{store.fingerprint}, theirs {backbone.fingerprint}. Give the same weights with --weights FILE"
        )
    settings = learn_names(store, sorted(set(folder.class_names)))
    return folder.use(backbone, lambda name: settings.label(name, classes)), backbone.fingerprint


def check_width(samples: SampleFile | ImageFolder, store: SampleStore) -> None:
    """ValueError if the samples do not have as many features as the store takes."""
    if samples.width != store.head.in_features:
        where = getattr(samples, "path", None) or samples.folder  # type: ignore[union-attr]
        raise ValueError(f"{where} has {samples.width} features, the store takes {store.head.in_features}")


def refuse_repeated(ids: Sequence[str], seen: set[str]) -> None:
    """ValueError if one of the ids was seen before; afterwards all of them were."""
    for one in ids:
        if one in seen:
            raise ValueError(f"the id {one!r} stands there twice")
        seen.add(one)


def add_batch(store: SampleStore, batch: tuple[Any, ...], counts: dict[str, int]) -> None:
    """Add the new samples of a batch (ids, x, y, subjects, source), in one event."""
    import torch

    from torchlssvm.events import Add

    ids, x, y, subjects, source = batch
    event = store.without_held(Add(ids, x, torch.as_tensor(y), subjects, source))
    counts["skipped"] += len(ids) - (0 if event is None else len(event.ids))
    if event is None:
        return
    receipt = store.apply(event, recalibrate=False)
    counts["added"] += receipt.samples
    counts["left_out"] += len(receipt.left_out)
    counts["events"] += receipt.applied


# -- relabel -----------------------------------------------------------------------------------------------------------


@command(
    "relabel",
    "Give samples other labels.",
    one_of(SUBJECT, ID),
    EVENT,
    option("--label", nargs="+", action="extend", metavar="L", help="one label for each id, or one for all"),
    option("--file", type=Path, metavar="CSV", help="a CSV with the columns id and label"),
    changes="the labels were changed",
)
def relabel(options: argparse.Namespace) -> int:
    """Relabel all samples named, in one event or one for each subject."""
    from torchlssvm.events import Relabel

    labels = options.label
    named = options.id is not None or options.subject is not None
    if (options.file is None) != named or (options.file is None) == (labels is None):
        raise UsageError("give --id and --label, or --subject and --label, or --file")
    if options.file is not None:
        from torchlssvm.cli.sample_files import read_by_id

        found = read_by_id(options.file, "label")
        options.id, labels = list(found), list(found.values())
    elif len(labels) == 1 and options.id is not None:
        labels = labels * len(options.id)
    if len(labels) != (1 if options.id is None else len(options.id)):
        wanted = "subjects, which take one" if options.id is None else f"{len(options.id)} ids"
        raise UsageError(f"{len(labels)} labels for {wanted}")
    with open_store(options) as store:
        settings, classes = Settings.load(store), store.head.num_classes
        y = [settings.label(text, classes) for text in labels]
        targets = with_event(options, selected(options))
        receipts = store.apply([Relabel(y[0] if options.id is None else y, **whose) for whose in targets])
        store.refresh()
        said = receipts_to_json(receipts, store)
    return emit(options, said, list(map(str, receipts)))


def selected(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The samples of each event, as its keyword arguments: one event for all ids, or one for each subject."""
    return [{"subject": name} for name in dict.fromkeys(options.subject or ())] or [{"ids": options.id}]


def with_event(options: argparse.Namespace, targets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ``--event``, if it is given, to the arguments of the only event."""
    if options.event is None:
        return targets
    if len(targets) > 1:
        raise UsageError("--event goes with one subject: each subject is an event of its own")
    return [targets[0] | {"event_id": options.event}]


def receipts_to_json(receipts: Sequence[EventResult], store: SampleStore) -> dict[str, Any]:
    """Convert receipts to primitives, without the samples' secrets: the last one's values, all samples, and each event."""
    names = ("event_id", "kind", "position", "applied", "samples")
    events = [{name: getattr(receipt, name) for name in names} for receipt in receipts]
    said = events[-1] | {"applied": any(r.applied for r in receipts), "samples": sum(r.samples for r in receipts)}
    return said | {"digest": receipts[-1].digest, "remaining": len(store), "events": events}


# -- whose samples -----------------------------------------------------------------------------------------------------


@command("subjects", "List whose samples the store holds, and how many of each subject.")
def subjects(options: argparse.Namespace) -> int:
    """Print each subject and the number of its samples."""
    with open_store(options, readonly=True) as store, store.view():
        found, total = store.subjects(), len(store)
    without = total - sum(found.values())
    lines = table({name: counted(n, "sample") for name, n in found.items()})
    lines.append(f"{counted(len(found), 'subject')}, {counted(total, 'sample')}")
    if without:
        lines.append(f"{counted(without, 'sample')} without a subject: a request can name these by their ids only")
    return emit(options, {"subjects": found, "samples": total, "without_subject": without}, lines)


@command(
    "show",
    "Show what is held of a subject, an access report. It lists samples, labels, since when, and the files with them.",
    option("--subject", action="append", required=True, metavar="S", help="whose samples; may be repeated"),
    option("--values", action="store_true", help="with --json: the numbers that are kept of each sample, too"),
)
def show(options: argparse.Namespace) -> int:
    """Print one report for each subject."""
    from torchlssvm.store import AccessReport

    with open_store(options, readonly=True) as store, store.view():
        settings = Settings.load(store)
        reports = [AccessReport.of(store, name) for name in dict.fromkeys(options.subject)]
        similar = [line for r in reports if not r.samples for line in look_alikes(store.subjects(), r.subject)]
    found = [report_to_json(r, settings, options.values) for r in reports]
    lines = [line for facts in found for line in ["", *report_lines(facts, str(options.store))]][1:] + similar
    lines += [
        "",
        "not known to this store: backups and copies made by other means, and what its network was trained on",
    ]
    return emit(options, {"store": str(options.store), "subjects": found}, lines)


def look_alikes(known: Iterable[str], name: str) -> list[str]:
    """Say which subjects of a store differ from a name in case, spaces or the form of their letters only."""
    from torchlssvm.events import casefolded

    wanted = " ".join(casefolded(name).split())
    found = [s for s in known if s != name and " ".join(casefolded(s).split()) == wanted]
    return [
        f"attention: the store holds samples of {s!r}, which is written in another way than {name!r}" for s in found
    ]


def report_to_json(report: AccessReport, settings: Settings, values: bool) -> dict[str, Any]:
    """Convert a report to primitives: names of labels (targets as numbers), times in UTC."""
    samples = []
    for s in report.samples:
        label = settings.name(int(s.y)) if s.y.ndim == 0 else ", ".join(f"{v:g}" for v in s.y.tolist())
        added = datetime.fromtimestamp(s.added, UTC).strftime("%Y-%m-%d %H:%M:%S")
        one = {"id": s.id, "label": label, "added": added, "numbers": len(s.x)}
        samples.append(one | ({"values": s.x.tolist()} if values else {}))
    requests = [{"id": r.id, "state": r.state, "due": r.due} for r in report.requests]
    files = [asdict(f) for f in report.files]
    return {"subject": report.subject, "samples": samples, "files": files, "requests": requests}


def report_lines(facts: dict[str, Any], store: str) -> list[str]:
    """Write a report for people."""
    samples = facts["samples"]
    lines = [f"{facts['subject']}: {counted(len(samples), 'sample') if samples else 'no sample is'} held in {store}"]
    if samples:
        width = max(6, *(len(s["id"]) for s in samples))
        lines.append(f"  {'sample':<{width}}  {'added (UTC)':<19}  label")
        lines += [f"  {s['id']:<{width}}  {s['added']}  {s['label']}" for s in samples]
        numbers = counted(samples[0]["numbers"], "number")
        lines.append(f"  of each sample {numbers} are kept, computed from it (--json --values prints them)")
        lines += ["contained in:", "  the classifier of this store, which has learned all of them"]
        lines += [
            f"  {f['path']}: {counted(f['samples'], 'sample')}{'' if f['found'] else ' (no longer found there)'}"
            for f in facts["files"]
        ] or ["  no exported file or checkpoint that this store knows of"]
    return lines + [f"request {r['id']}: {r['state']}, an answer is due by {r['due']}" for r in facts["requests"]]
