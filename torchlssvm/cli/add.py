"""``torchlssvm add``: samples from files or images, in batches, each of them durable when the next begins.

After a crash, run the same command again: samples that the store has under the same id are compared with what is to be added
and skipped; if features, label or subject differ it is an error. (An event id made from the content would do as well, but
it stays in the journal for ever and would confirm a guess about an erased sample. Event ids are random.)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import UsageError, add_command, count
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.progress_bar import ProgressBar
from torchlssvm.cli.store_folder import open_store
from torchlssvm.cli.suppression_arguments import add_suppression_key

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands
    from torchlssvm.cli.samples import FileBatch, SampleSource
    from torchlssvm.store import SampleStore


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    text = "Learn samples. After a crash run it again: samples that are there already are compared and skipped."
    parser = add_command(commands, "add", run_add, text, changes="the samples were added")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--features", type=Path, metavar="FILE", help="file of features: .npy or .pt (n, J), or .csv")
    source.add_argument("--images", type=Path, metavar="FOLDER", help="folder of images; the class is the sub-folder")
    parser.add_argument(
        "--labels", metavar="FILE|COLUMN", help="labels of the samples: .npy, .pt, text, or a column of the CSV"
    )
    parser.add_argument("--ids", metavar="FILE|COLUMN", help="ids of the samples (default: file name and row)")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--subject", metavar="NAME", help="the subject of all samples, e.g. a user")
    whose.add_argument(
        "--subjects", metavar="FILE|COLUMN", help="the subject of each sample: a CSV with the header id,subject"
    )
    parser.add_argument(
        "--by-position", action="store_true", help="lists without ids: their first value is that of the first sample"
    )
    parser.add_argument("--fingerprint", metavar="F", help="the network the features of a file come from")
    parser.add_argument("--weights", metavar="FILE", help="weights of the backbone, if the file has moved since init")
    parser.add_argument(
        "--batch-size", type=count, metavar="B", help="samples in one event (default: 1024, images: 64)"
    )
    parser.add_argument(
        "--erased",
        choices=("refuse", "skip"),
        default="refuse",
        help="samples that were erased on request: stop with an error, or leave them out (default: refuse)",
    )
    add_suppression_key(parser)


def run_add(options: argparse.Namespace) -> int:
    """Add the samples batch by batch."""
    if options.images is None and options.labels is None:
        raise UsageError("--features needs --labels")
    for name in ("labels", "ids", "fingerprint") if options.images else ("weights",):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} does not go with --{'images' if options.images else 'features'}")
    with open_store(options) as store:
        samples, source = open_images(options, store) if options.images else open_file(options, store)
        J = store.head.in_features
        if samples.width != J:
            raise ValueError(f"{options.images or options.features} has {samples.width} features, the store takes {J}")
        size = options.batch_size or (64 if options.images else 1024)
        counts = {"added": 0, "skipped": 0, "left_out": 0, "events": 0}
        seen: set[str] = set()
        with ProgressBar(options, "adding", samples.total) as bar:
            for batch in samples.batches(size):
                try:
                    twice = next((i for i in batch.ids if i in seen or seen.add(i)), None)  # type: ignore[func-returns-value]
                    if twice is not None:
                        raise ValueError(f"the id {twice!r} stands there twice")
                    add_batch(store, batch, options.subject, source, samples.tolerance, counts)
                except ValueError as error:
                    raise ValueError(f"{batch.where}: {error} ({counts['added']} samples before were added)") from error
                bar.advance(len(batch.ids))
        with ProgressBar(options, "choosing rho"):
            store.refresh()
        state = store.stats()
    text = (
        f"{counts['added']} samples added, {counts['skipped']} were there already; the store holds {state['samples']}"
    )
    if counts["left_out"]:
        text += f"\n{counts['left_out']} were left out: they were erased on request and stay erased"
    emit(options, {**counts, "samples": state["samples"], "digest": state["digest"]}, text)
    return OK


def open_file(options: argparse.Namespace, store: SampleStore) -> tuple[SampleSource, str | None]:
    """Open the samples of a file; also return the network they are said to come from."""
    from torchlssvm.cli import settings
    from torchlssvm.cli.samples import FileSamples

    kept = settings.load(store)
    if kept.backbone and options.fingerprint is None:
        raise ValueError(
            f"this store takes what {kept.backbone} sees: add --images. Features that it made elsewhere need its fingerprint: "
            f"--fingerprint {store.fingerprint}"
        )
    columns = {"labels": options.labels, "ids": options.ids, "subjects": options.subjects}
    with ProgressBar(options, f"reading {options.features}"):
        source = FileSamples(options.features, kept, store.head.num_classes, **columns, by_position=options.by_position)
    return source, options.fingerprint or store.fingerprint


def open_images(options: argparse.Namespace, store: SampleStore) -> tuple[SampleSource, str | None]:
    """Open the samples of a folder of images; also return the fingerprint of the network that computes their features."""
    from torchlssvm.cli import settings
    from torchlssvm.cli.images import DEFAULT_WEIGHTS, Backbone, ImageSamples

    kept = settings.load(store)
    if kept.backbone is None:
        raise ValueError("this store has no backbone: it was made without init --backbone NAME")
    found = ImageSamples(options.images, options.subjects, options.by_position)
    classes = store.head.num_classes
    with ProgressBar(options, f"loading {kept.backbone}"):
        backbone = Backbone(kept.backbone, options.weights or kept.weights or DEFAULT_WEIGHTS, classes, store.head)
    if backbone.fingerprint != store.fingerprint:
        raise ValueError(
            f"the weights or the preprocessing of {kept.backbone} are not those the store was made for: its fingerprint is "
            f"{store.fingerprint}, theirs {backbone.fingerprint}. Give the same weights with --weights FILE"
        )
    return found.use_backbone(backbone, settings.learn_names(store, found.class_names), classes), backbone.fingerprint


def add_batch(
    store: SampleStore,
    batch: FileBatch,
    subject: str | None,
    source: str | None,
    tolerance: float,
    counts: dict[str, int],
) -> None:
    """Add the new samples of a batch, in one event."""
    import torch

    from torchlssvm.events import Add

    subjects = [subject] * len(batch.ids) if batch.subjects is None else batch.subjects
    add = Add(batch.ids, batch.x, torch.as_tensor(batch.y), subjects, source)  # checks everything
    held = [i in store for i in add.ids]
    if any(held):
        compare_with_store(store, add, [k for k, there in enumerate(held) if there], tolerance)
    new = [k for k, there in enumerate(held) if not there]
    counts["skipped"] += len(held) - len(new)
    if not new:
        return
    if len(new) < len(held):
        add = Add([add.ids[k] for k in new], add.x[new], add.y[new], [subjects[k] for k in new], source)
    receipt = store.apply(add)
    counts["added"] += receipt.samples
    counts["left_out"] += len(receipt.left_out)
    counts["events"] += receipt.applied


def compare_with_store(store: SampleStore, add: Any, which: list[int], tolerance: float) -> None:
    """Raise ValueError when samples that the store has already are not those of the event."""
    import torch

    head = store.head
    rows = store.get([add.ids[k] for k in which])
    plain = head.grid is None or head.normalize is not None  # stored as they are
    x = add.x[which].to(torch.float64) if plain else head.grid.snap(add.x[which])
    y = add.y[which]
    targets = head.statistics.target_grid
    if y.is_floating_point() and targets is not None:
        y = targets.snap(y.reshape(rows.y.shape))
    here = rows.x.to(torch.float64)
    other_x = (x - here).abs().amax(1) > tolerance * here.abs().amax(1)
    other_y = (rows.y != y.reshape(rows.y.shape)).reshape(len(which), -1).any(1)
    for at, k in enumerate(which):
        differs = [n for n, d in (("features", other_x[at]), ("label", other_y[at])) if d]
        differs += ["subject"] if rows.subjects[at] != add.subjects[k] else []
        if differs:
            raise ValueError(
                f"the id {add.ids[k]!r} is in the store already and differs in {' and '.join(differs)}: relabel or "
                "remove it, or give the new sample another id"
            )
