"""``torchlssvm init``: make an empty store."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlssvm.cli.arguments import UsageError, add_command, count, regularization
from torchlssvm.cli.console import OK, emit
from torchlssvm.cli.store_folder import holds_store, open_store

if TYPE_CHECKING:
    from torchlssvm.cli.arguments import Commands

ALREADY = "there is a store at {} already: nothing was changed"
"""Error where a store is to be made."""


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands, "init", run_init, "Make an empty store. Its head and its network are fixed from then on.",
        changes="the store was made",
    )  # fmt: skip
    parser.add_argument("--features", type=count, metavar="J", help="number of features (a backbone knows its own)")
    parser.add_argument("--classes", required=True, metavar="K", help="number of classes, or their names: ants,bees")
    parser.add_argument(
        "--head", choices=("lssvm", "margin"), default="lssvm",
        help="least squares (default), or the squared hinge of a max-margin classifier",
    )  # fmt: skip
    parser.add_argument(
        "--rho", type=regularization, metavar="gcv|R",
        help="regularization; gcv: chosen from the samples after each command (default). A margin head takes a number "
        "(default: 1); set --rho kfold chooses it once there are samples",
    )  # fmt: skip
    parser.add_argument(
        "--intercept",
        choices=("free", "penalized", "none"),
        default="free",
        help="form of the intercept (default: free)",
    )
    parser.add_argument(
        "--grid", default="auto", metavar="LIMIT[:BITS]",
        help="largest feature and resolution, e.g. 8:20; auto: chosen from the first batch (default); none: float64 sums",
    )  # fmt: skip
    parser.add_argument(
        "--normalize", choices=("l2", "sqrt"), help="normalize each row: divide by its length, or take square roots"
    )
    parser.add_argument(
        "--scale", choices=("std",), help="standardise the features, derived again from the sums after each removal"
    )
    parser.add_argument("--class-weight", metavar="W", help="balanced, complement, or one number for each class: 1,2.5")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--backbone", metavar="NAME", help="torchvision network for images, e.g. mobilenet_v2")
    source.add_argument("--fingerprint", metavar="F", help="name of the network that features from files come from")
    parser.add_argument(
        "--weights", metavar="FILE", help="state_dict of the backbone, or default: torchvision's (default)"
    )


def run_init(options: argparse.Namespace) -> int:
    """Make the head, then the store."""
    from torchlssvm.cli import settings
    from torchlssvm.errors import StoreError
    from torchlssvm.linear import head_class
    from torchlssvm.store import SampleStore

    names = parse_class_names(options.classes)
    if options.weights is not None and options.backbone is None:
        raise UsageError("--weights needs --backbone")
    if options.features is None and options.backbone is None:
        raise UsageError("give --features J or --backbone NAME")
    if options.head == "margin" and options.rho == "gcv":
        raise UsageError(
            "--rho gcv is for a least-squares head. Give a margin head a number, and when samples are added let "
            f"torchlssvm set {options.store} --rho kfold choose"
        )
    existed = holds_store(options.store)
    if existed:
        refuse_finished(options)
    build: dict[str, Any] = {
        "rho": options.rho if options.rho is not None else "gcv" if options.head == "lssvm" else 1.0,
        "intercept": options.intercept,
        "grid": parse_grid(options.grid),
    }
    build["class_weight"] = parse_class_weight(options.class_weight)
    build |= {"normalize": options.normalize, "scale": options.scale}
    chosen = settings.Settings(names or [])
    classes = len(names) if names else int(options.classes)
    try:
        if options.backbone is None:
            head: Any = head_class(options.head)(options.features, classes, **build)
            source = options.fingerprint
        else:
            from torchlssvm.cli.images import DEFAULT_WEIGHTS, Backbone

            given = options.weights or DEFAULT_WEIGHTS
            chosen.backbone, chosen.weights = (
                options.backbone,
                given if given == DEFAULT_WEIGHTS else str(Path(given).absolute()),
            )
            backbone = Backbone(options.backbone, given, classes, options.head, **build)
            head, source = backbone.classifier.head, backbone.fingerprint
    except (MemoryError, RuntimeError) as error:
        raise ValueError(f"such a head cannot be made: {error}") from error
    if options.features not in (None, head.in_features):
        raise ValueError(f"{options.backbone} gives {head.in_features} features, not {options.features}")
    with SampleStore(options.store, head, fingerprint=source, timeout=options.timeout) as store:
        if existed and (settings.is_initialized(store) or store.position):
            raise StoreError(ALREADY.format(options.store))  # another process was faster
        settings.save(store, chosen)
        made = {"store": str(options.store), "features": head.in_features, "classes": classes, "fingerprint": source}
    bound = f", for the images that {options.backbone} sees" if options.backbone else ""
    emit(options, made, f"{options.store}: an empty store of {head.in_features} features and {classes} classes{bound}")
    return OK


def refuse_finished(options: argparse.Namespace) -> None:
    """StoreError if the store was made by a command that finished, whatever its head; one that was interrupted is completed."""
    from torchlssvm.cli import settings
    from torchlssvm.errors import StoreBusyError, StoreError

    try:
        with open_store(options, readonly=True) as store:
            finished = settings.is_initialized(store) or store.position > 0
    except StoreBusyError:
        raise
    except StoreError:  # never finished, or damaged: the new head's opening tells which
        finished = False
    if finished:
        raise StoreError(ALREADY.format(options.store))


def parse_class_names(text: str) -> list[str] | None:
    """Parse the names of the classes; None when only their number is given."""
    if text.strip().isdecimal():
        return None
    names = [name.strip() for name in text.split(",")]
    if len(names) < 2 or not all(names) or len(set(names)) < len(names):
        raise UsageError(f"--classes takes a number, or at least two different names with commas; got {text!r}")
    return names


def parse_grid(text: str) -> Any:
    """Parse ``auto``, ``none`` or ``LIMIT[:BITS]``."""
    from torchlssvm.functional.grid import as_grid

    try:
        return as_grid(text)
    except ValueError as error:
        if not str(error).startswith("grid must"):
            raise
        raise UsageError(f"--grid takes auto, none, LIMIT or LIMIT:BITS, e.g. 8:20; got {text!r}") from None


def parse_class_weight(text: str | None) -> Any:
    """Parse a rule, or numbers as a tensor (K,)."""
    import torch

    if text is None or text in ("balanced", "complement"):
        return text
    try:
        return torch.tensor([float(part) for part in text.split(",")], dtype=torch.float64)
    except ValueError:
        raise UsageError(f"--class-weight takes balanced, complement or numbers with commas; got {text!r}") from None
