"""Commands on samples: ``add``, ``classify``, ``relabel``, ``subjects``, ``show``."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import (
    BY_POSITION,
    EVENT,
    FORCE,
    ID,
    SUBJECT,
    SUPPRESSION_KEY,
    UsageError,
    command,
    count,
    one_of,
    option,
)
from torchlssvm.cli.console import emit, progress, table, warn
from torchlssvm.cli.store_access import Settings, check_output, learn_names, open_store
from torchlssvm.wording import counted

if TYPE_CHECKING:
    from torchlssvm.cli.sample_files import FileSamples
    from torchlssvm.linear.attach import AttachedClassifier
    from torchlssvm.store import AccessReport, EventResult, SampleStore

SAMPLES = (
    one_of(
        option("--features", type=Path, metavar="FILE", help="a .npy or .pt array (n, J), or a .csv or .parquet table"),
        option("--images", type=Path, metavar="FOLDER", help="images"),
        option("--text", type=Path, metavar="FILE", help="texts: one per line, or a .csv or .parquet table"),
        required=True,
    ),
    option("--text-column", metavar="COLUMN", help="column of the texts in the table (default: text)"),
    option("--labels", metavar="FILE|COLUMN", help="labels: a .npy, .pt or text file, or a column of the table"),
    option("--ids", metavar="FILE|COLUMN", help="ids of the samples (default: file name and row number)"),
    BY_POSITION,
    option("--weights", metavar="FILE", help="weights of the network, if the file has moved since init"),
    option("--batch-size", type=count, metavar="B", help="samples per batch (default: 1024, images: 64)"),
)
"""Options that select the samples to read."""


def batch_size(options: argparse.Namespace, *for_features: str) -> int:
    """Return the batch size, after checking that the other options fit ``--features``, ``--images`` or ``--text``."""
    given = next(name for name in ("features", "images", "text") if getattr(options, name) is not None)
    refused = {"features": ("weights", "text_column"), "images": ("labels", "ids", "text_column", *for_features)}
    for name in refused.get(given, for_features):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} cannot be used with --{given}")
    return options.batch_size or (1024 if given == "features" else 64)


# -- add ---------------------------------------------------------------------------------------------------------------


@command(
    "add",
    "Learn samples. The class of an image is the name of its sub-folder. If the command is interrupted, run it again: samples "
    "that the store already holds are compared and skipped.",
    *SAMPLES,
    one_of(
        option("--subject", metavar="NAME", help="subject of all samples, for example a user"),
        option("--subjects", metavar="FILE|COLUMN", help="subject of each sample: a CSV with the header id,subject"),
    ),
    option("--fingerprint", metavar="F", help="fingerprint of the network that computed the features"),
    option(
        "--erased",
        choices=("refuse", "skip"),
        default="refuse",
        help="what to do with samples that were erased on request: stop, or leave them out (default: refuse)",
    ),
    SUPPRESSION_KEY,
    changes="the samples were added",
)
def add(options: argparse.Namespace) -> int:
    """Add the samples batch by batch. Each batch is on the disk before the next one begins.

    If the store already has a sample with the same id, the new sample is skipped if it is equal. It is an error if its
    features, label or subject differ. (Event ids are random. An id computed from the content would stay in the journal, where
    it could confirm a guess about an erased sample.)
    """
    from torchlssvm.events import Add

    if options.images is None and options.labels is None:
        raise UsageError(f"--{'features' if options.text is None else 'text'} needs --labels")
    size = batch_size(options, "fingerprint")
    counts = {"added": 0, "skipped": 0, "left_out": 0, "events": 0}
    with open_store(options) as store:
        samples = open_samples(options, store, labelled=True)
        source = options.fingerprint or store.fingerprint
        twice = next((one for one, times in Counter(samples.ids).items() if times > 1), None)
        if twice is not None:
            raise ValueError(f"{samples.path}: the id {twice!r} occurs twice")
        with progress(options, "adding", len(samples)) as advance:
            for x, y, ids, subjects in samples.batches(size):
                assert ids is not None
                try:
                    whose = [options.subject] * len(ids) if subjects is None else subjects
                    event = store.without_held(Add(ids, x, y, whose, source))
                    counts["skipped"] += len(ids) - (0 if event is None else len(event.ids))
                    if event is not None:
                        done = store.apply(event, recalibrate=False)
                        counts["added"] += done.samples
                        counts["left_out"] += len(done.left_out)
                        counts["events"] += done.applied
                except ValueError as error:
                    where, before = f"{samples.path}, {ids[0]} to {ids[-1]}", counted(counts["added"], "sample")
                    raise ValueError(f"{where}: {error} ({before} added before it)") from error
                advance(len(ids))
        with progress(options, "choosing rho"):
            store.refresh()
        state = store.stats()
    text = f"{counted(counts['added'], 'sample')} added, {counts['skipped']:,} skipped (already in the store); "
    text += f"the store has {counted(state['samples'], 'sample')}"
    if counts["left_out"]:
        text += f"\n{counted(counts['left_out'], 'sample')} left out: erased on request"
    return emit(options, {**counts, "samples": state["samples"], "digest": state["digest"]}, text)


def open_samples(options: argparse.Namespace, store: SampleStore, labelled: bool) -> FileSamples:
    """Open the samples to learn (``labelled``) or to classify, from a file, or from images or texts by the store's network."""
    if options.images is not None:
        return open_images(options, store, labelled)
    columns = {"ids": options.ids, "subjects": getattr(options, "subjects", None)}
    if options.text is not None:
        network = load_backbone(options, store)
        found = read_file(options, store, options.text, text=options.text_column or "text", **columns)
        return replace(found, read=lambda part: network.features(found.read(part)))
    backbone = Settings.load(store).backbone
    if labelled and backbone and options.fingerprint is None:
        raise ValueError(
            f"the features of this store come from {backbone}: give --images or --text. If {backbone} computed your features, "
            f"say so with --fingerprint {store.fingerprint}"
        )
    with progress(options, f"reading {options.features}"):
        return read_file(options, store, options.features, **columns)


def read_file(options: argparse.Namespace, store: SampleStore, file: Path, **columns: str | None) -> FileSamples:
    """Read a file of features or texts with ``--labels`` and other columns, and check the number of features."""
    from torchlssvm.cli.sample_files import read_samples
    from torchlssvm.linear.linear_head import targets_of

    settings, head = Settings.load(store), store.head
    columns["labels"] = options.labels
    found = read_samples(
        file,
        lambda text: settings.label(text, head.num_classes, targets_of(head)),
        by_position=options.by_position,
        **columns,
    )
    if "text" not in columns and found.width != head.in_features:
        raise ValueError(f"{found.path} has {found.width} features, the store has {head.in_features}")
    return found


def open_images(options: argparse.Namespace, store: SampleStore, labelled: bool) -> FileSamples:
    """Open a folder of images. Labelled images are in sub-folders with the names of their classes, which are registered."""
    from torchlssvm.cli.sample_files import FileSamples, as_subjects, find_images, read_column
    from torchlssvm.linear.linear_head import targets_of

    if labelled and targets_of(store.head) != "classes":
        raise ValueError(
            "the folder of an image is its class, and this store has several labels or numbers per sample: compute the "
            "features in Python, clf.add(images, y, ids=...)"
        )
    images = find_images(options.images, labelled)
    ids, paths = list(images), list(images.values())
    subjects = y = None
    if labelled and options.subjects is not None:
        values = read_column(Path(options.subjects), "subject", ids, options.images, options.by_position)
        subjects = as_subjects(values)
    backbone = load_backbone(options, store)
    if labelled:
        names = [one.partition("/")[0] for one in ids]
        settings = learn_names(store, sorted(set(names)))
        y = [settings.label(name, store.head.num_classes) for name in names]
    return FileSamples(
        options.images, backbone.in_features, ids, y, subjects, lambda part: backbone.features(paths[part])
    )


def load_backbone(options: argparse.Namespace, store: SampleStore) -> AttachedClassifier:
    """Load the network that computes the store's features from images or texts, and check that it is the right one."""
    from torchlssvm.backbone_hash import fingerprint
    from torchlssvm.backbones import Pictures
    from torchlssvm.cli.sample_files import attach_named
    from torchlssvm.store.database import DEFAULT_WEIGHTS

    kept, classes = Settings.load(store), store.head.num_classes
    if kept.backbone is None:
        raise ValueError(
            "this store has no network for images or texts: make one with init --backbone NAME, or in Python by a name, "
            "attach('mobilenet_v2', ..., store=folder). A network of your own computes features, for --features"
        )
    with progress(options, f"loading {kept.backbone}"):
        weights = options.weights or kept.weights or DEFAULT_WEIGHTS
        backbone = attach_named(kept.backbone, weights, classes, store.head, **kept.network)
    takes = "images" if isinstance(backbone.preprocess, Pictures) else "text"
    if getattr(options, takes) is None:
        raise ValueError(f"{kept.backbone} takes --{takes}")
    found = fingerprint(backbone.backbone, backbone.preprocess)
    if found != store.fingerprint:
        raise ValueError(
            f"the weights or the preprocessing of {kept.backbone} have changed since init: the store expects the fingerprint "
            f"{store.fingerprint}, got {found}. Give the original weights with --weights FILE"
        )
    return backbone


# -- classify ----------------------------------------------------------------------------------------------------------


@command(
    "classify",
    "Predict the classes of new samples without learning them. Prints CSV with the columns id, class and score, or JSON with "
    "--json. For several labels per sample (init --targets multilabel), the columns are id and labels; for numbers (--targets "
    "regression), id and one column per number.",
    *SAMPLES,
    option("--subjects", metavar="COLUMN", help="column of the subjects in the table, which is not used as a feature"),
    option("--scores", action="store_true", help="add the score of every class"),
    option("--out", type=Path, metavar="FILE", help="write to this .csv or .json file, not to the terminal"),
    FORCE,
    changes="the file was written",
)
def classify(options: argparse.Namespace) -> int:
    """Print or write one prediction per sample, and the accuracy if labels are given."""
    import torch

    from torchlssvm.audit.documents import write_private
    from torchlssvm.linear.linear_head import predictions

    size = batch_size(options)
    if options.out is not None:
        if options.out.suffix not in (".csv", ".json"):
            raise UsageError(f"--out {options.out}: the file name must end with .csv or .json")
        check_output(options.out, options.force)
    rows: list[dict[str, Any]] = []
    right = 0
    with open_store(options, readonly=True) as store:
        settings, head = Settings.load(store), store.head
        samples = open_samples(options, store, labelled=False)
        names = [settings.name(k) for k in range(head.num_classes)]
        if head.targets != "classes" and options.labels is not None:
            raise UsageError("--labels counts right classes, and this store has several labels or numbers per sample")
        with progress(options, "classifying", len(samples)) as advance:
            for x, y, ids, _ in samples.batches(size):
                assert ids is not None
                scores = head(x.to(head.device, torch.float64)).cpu()
                bad = (~scores.isfinite().all(1)).nonzero()[:, 0].tolist()
                if bad:
                    raise ValueError(f"{samples.path}: the features of {ids[bad[0]]!r} are not finite numbers")
                found = predictions(head, scores)
                right += 0 if y is None else int((found == y).sum())
                for sample, answer, row in zip(ids, found.tolist(), scores.tolist(), strict=True):
                    rows.append({"id": sample} | answer_columns(head.targets, answer, row, names))
                    if options.scores:
                        rows[-1] |= {f"score {name}": score for name, score in zip(names, row, strict=True)}
                advance(len(ids))
    said: dict[str, Any] = {"samples": len(rows), "accuracy": right / len(rows) if options.labels else None}
    as_csv = io.StringIO(newline="")
    writer = csv.DictWriter(as_csv, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    accuracy = f", accuracy {said['accuracy']:.2%}" if options.labels else ""
    summary = f"{counted(len(rows), 'sample')} classified{accuracy}"
    if options.out is None:
        if accuracy and not options.json:
            warn(summary)  # standard output has the predictions only
        options.changes = ""
        return emit(options, said | {"predictions": rows}, as_csv.getvalue().splitlines())
    text = as_csv.getvalue() if options.out.suffix == ".csv" else json.dumps(said | {"predictions": rows}, indent=1)
    write_private(options.out, text.encode(), overwrite=options.force)
    return emit(options, said | {"out": str(options.out)}, f"{options.out}: {summary}")


def answer_columns(targets: str, answer: Any, scores: list[float], names: list[str]) -> dict[str, Any]:
    """Return the columns of one prediction: the class and its score, the labels that apply, or the numbers by name."""
    if targets == "multilabel":
        return {"labels": ";".join(name for name, applies in zip(names, answer, strict=True) if applies)}
    if targets == "regression":
        return dict(zip(names, scores, strict=True))
    return {"class": names[answer], "score": scores[answer]}


# -- relabel -----------------------------------------------------------------------------------------------------------


@command(
    "relabel",
    "Change the labels of samples.",
    one_of(SUBJECT, ID),
    EVENT,
    option("--label", nargs="+", action="extend", metavar="L", help="one label per id, or one for all"),
    option("--file", type=Path, metavar="CSV", help="a CSV with the columns id and label"),
    changes="the labels were changed",
)
def relabel(options: argparse.Namespace) -> int:
    """Relabel the samples: one event for all ids, or one per subject."""
    from torchlssvm.events import Relabel, new_event_id
    from torchlssvm.linear.linear_head import targets_of

    labels = options.label
    named = options.id is not None or options.subject is not None
    if (options.file is None) != named or (options.file is None) == (labels is None):
        raise UsageError("give --id and --label, or --subject and --label, or --file")
    if options.file is not None:
        from torchlssvm.cli.sample_files import read_by_id

        found = read_by_id(options.file, "label")
        options.id, labels = list(found), list(found.values())
    targets = [{"subject": name} for name in dict.fromkeys(options.subject or ())] or [{"ids": options.id}]
    check_single_event(options, targets)
    wanted = 1 if options.id is None else len(options.id)
    if len(labels) not in (1, wanted):
        raise UsageError(f"give one label, or one for each id; got {len(labels)} labels")
    with open_store(options) as store:
        settings = Settings.load(store)
        y: Any = [settings.label(text, store.head.num_classes, targets_of(store.head)) for text in labels]
        if len(y) == 1:
            y = y[0] if options.id is None else y * wanted
        results = store.apply([Relabel(y, **whose, event_id=options.event or new_event_id()) for whose in targets])
        store.refresh()
        said = results_to_json(results, store)
    return emit(options, said, list(map(str, results)))


def check_single_event(options: argparse.Namespace, targets: Sequence[Any]) -> None:
    """Raise UsageError if ``--event`` would name several events."""
    if options.event is not None and len(targets) > 1:
        raise UsageError("--event needs a single subject: every subject is a separate event")


def results_to_json(results: Sequence[EventResult], store: SampleStore) -> dict[str, Any]:
    """Convert the results of events to primitives, without secrets: the last event, the total, and the list of events."""
    names = ("event_id", "kind", "position", "applied", "samples")
    events = [{name: getattr(result, name) for name in names} for result in results]
    said = events[-1] | {"applied": any(r.applied for r in results), "samples": sum(r.samples for r in results)}
    return said | {"digest": results[-1].digest, "remaining": len(store), "events": events}


# -- whose samples -----------------------------------------------------------------------------------------------------


@command("subjects", "List the subjects, with the number of samples of each.")
def subjects(options: argparse.Namespace) -> int:
    """Print each subject and its number of samples."""
    with open_store(options, readonly=True) as store, store.view():
        found, total = store.subjects(), len(store)
    without = total - sum(found.values())
    lines = table({name: counted(n, "sample") for name, n in found.items()})
    lines.append(f"{counted(len(found), 'subject')}, {counted(total, 'sample')}")
    if without:
        lines.append(f"{counted(without, 'sample')} without a subject: requests must name these by id")
    return emit(options, {"subjects": found, "samples": total, "without_subject": without}, lines)


@command(
    "show",
    "Show everything that the store has about a subject: an access report. It lists samples, labels, dates and files.",
    option("--subject", action="append", required=True, metavar="S", help="the subject; may be repeated"),
    option("--values", action="store_true", help="with --json: include the stored features"),
)
def show(options: argparse.Namespace) -> int:
    """Print one report per subject."""
    from torchlssvm.store import AccessReport

    with open_store(options, readonly=True) as store, store.view():
        settings = Settings.load(store)
        reports = [AccessReport.of(store, name) for name in dict.fromkeys(options.subject)]
        similar = [line for r in reports if not r.samples for line in look_alikes(store.subjects(), r.subject)]
    found = [report_to_json(r, settings, options.values) for r in reports]
    lines = [line for facts in found for line in ["", *report_lines(facts, str(options.store))]][1:] + similar
    lines += ["", "The store does not know about backups, other copies, or the data that its network was trained on."]
    return emit(options, {"store": str(options.store), "subjects": found}, lines)


def look_alikes(known: Iterable[str], name: str) -> list[str]:
    """Warn about subjects that differ from a name only in case, spaces or Unicode form."""
    from torchlssvm.events import casefolded

    wanted = " ".join(casefolded(name).split())
    found = [s for s in known if s != name and " ".join(casefolded(s).split()) == wanted]
    return [f"attention: the store has samples of {s!r}, which is spelled differently from {name!r}" for s in found]


def report_to_json(report: AccessReport, settings: Settings, values: bool) -> dict[str, Any]:
    """Convert a report to primitives, with the names of classes and times in UTC."""
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
    """Format a report for people."""
    samples = facts["samples"]
    lines = [f"{facts['subject']}: {counted(len(samples), 'sample') if samples else 'no samples'} in {store}"]
    if samples:
        width = max(6, *(len(s["id"]) for s in samples))
        lines.append(f"  {'sample':<{width}}  {'added (UTC)':<19}  label")
        lines += [f"  {s['id']:<{width}}  {s['added']}  {s['label']}" for s in samples]
        numbers = counted(samples[0]["numbers"], "feature")
        lines.append(f"  {numbers} stored per sample (--json --values prints them)")
        lines += ["these samples are in:", "  the classifier of this store, which has learned them"]
        lines += [
            f"  {f['path']}: {counted(f['samples'], 'sample')}{'' if f['found'] else ' (file not found)'}"
            for f in facts["files"]
        ] or ["  no exported file or checkpoint known to this store"]
    return lines + [f"request {r['id']}: {r['state']}, due on {r['due']}" for r in facts["requests"]]
