"""``torchlssvm preview``: the effect of a removal, without the removal."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from torchlssvm.cli.arguments import UsageError, add_command
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.event_arguments import add_request, add_sample_selection, check_selection, requested_targets
from torchlssvm.cli.progress_bar import ProgressBar
from torchlssvm.cli.store_folder import open_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    preview = add_command(commands, "preview", run_preview, "Show the effect of a removal without removing anything.")
    add_sample_selection(preview, event=False)
    add_request(preview)
    preview.add_argument("--features", type=Path, metavar="FILE", help="data to judge by: .npy, .pt or .csv")
    preview.add_argument("--labels", metavar="FILE|COLUMN", help="labels of that data, for the accuracy")
    preview.add_argument(
        "--by-position", action="store_true", help="labels without ids: the first is that of the first sample"
    )


def run_preview(options: argparse.Namespace) -> int:
    """Print the number of samples, predictions and the accuracy that a removal would change."""
    import torch

    from torchlssvm.cli import settings
    from torchlssvm.cli.samples import FileSamples
    from torchlssvm.events import Remove

    if options.labels is not None and options.features is None:
        raise UsageError("--labels needs --features")
    check_selection(options)
    with open_store(options) as store:
        events = [Remove(**whose) for whose in requested_targets(options, store)]
        x = y = None
        if options.features is not None:
            source = FileSamples(
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
        with ProgressBar(options, "previewing"):
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
    emit(options, asdict(found), "\n".join(lines))
    return OK
